"""Reads the files of TorchSpec's offline dataset.

Read in lightseekorg/TorchSpec at 6f21829c (2026-04-28), torchspec/data/preprocessing.py (OfflineEagle3Dataset). Its
repository has a reader of these files and nothing that writes them: it trains online, over Mooncake::

    *.ckpt   input_ids [T], loss_mask [T], aux_hidden_states [T, A*H] or [1, T, A*H], hidden_states [T, H] or [1, T, H]

``hidden_states`` is taken as ``final``: its trainer (torchspec/training/eagle3_trainer.py) applies a norm only where
``last_hidden_states_prenorm`` is set, which it is not by default.

Nothing is shifted in the files: on loading, tokens and teacher rows move one to the left, and the mask stays, with its
last value set to 0. The mask marks the assistant's own tokens (torchspec/data/parse.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.standardize.formats.base import ForeignSample, Layout
from eyas.standardize.formats.torch_files import TorchFilesReader, require, rows, token_ids, zeros_and_ones

SUFFIXES = (".ckpt",)
KEYS = ("input_ids", "loss_mask", "hidden_states", "aux_hidden_states")


def open_reader(folder: Path, layout: Layout) -> TorchFilesReader:
    """A reader of ``folder``, whose layout detect() found."""
    return TorchFilesReader(folder, layout, SUFFIXES, _sample)


def _sample(where: str, contents: Mapping[str, Any], layout: Layout) -> ForeignSample:
    require(where, contents, KEYS, "TorchSpec")
    assert layout.hidden_size is not None
    ids = token_ids(where, contents["input_ids"])  # [T]
    A, H, T = layout.num_taps, layout.hidden_size, len(ids)
    features = rows(where, "aux_hidden_states", contents["aux_hidden_states"], T, A * H, layout.dtype)
    return ForeignSample(
        where=where,
        input_ids=ids,
        loss_mask=zeros_and_ones(where, contents["loss_mask"], T),
        features=features.view(T, A, H),
        last_hidden=rows(where, "hidden_states", contents["hidden_states"], T, H, layout.dtype),
    )
