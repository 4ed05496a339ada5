"""Reads the training data of EAGLE-1 and EAGLE-2.

Read in SafeAILab/EAGLE: eagle/ge_data/ge_data_all_{vicuna,llama2chat,llama3,qwen2}.py at f2f2366^ (the commit before
EAGLE-3, which deletes them; 6aa1ed8, the first one, writes the same) and eagle/train/main.py at cb7e0841
(2026-02-19)::

    OUTDIR/{index}/data_0.ckpt   input_ids int64 [T], hidden_state [T, H], loss_mask int64 [T]

``hidden_state`` is transformers' ``hidden_states[-1]``, tap ``final``: features and target of those drafts in one, so
it is read as the one tap there is. An EAGLE-3 draft cannot be trained on it: its taps are intermediate layers, and its
trainer (eagle/traineagle3) reads no files, but runs the target as it goes.

Nothing is shifted in the files: row t is token t's. The mask marks the assistant's own tokens, as far as the scripts
hit them (they count tokens of each turn's text, and are one or two off at some borders). What the trainer shifts is in
write.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.standardize.formats.base import ForeignSample, Layout
from eyas.standardize.formats.torch_files import TorchFilesReader, require, rows, token_ids, zeros_and_ones

SUFFIXES = (".ckpt", ".pt")
KEYS = ("input_ids", "hidden_state", "loss_mask")


def open_reader(folder: Path, layout: Layout) -> TorchFilesReader:
    """A reader of ``folder``, whose layout detect() found."""
    return TorchFilesReader(folder, layout, SUFFIXES, _sample)


def _sample(where: str, contents: Mapping[str, Any], layout: Layout) -> ForeignSample:
    require(where, contents, KEYS, "EAGLE")
    assert layout.hidden_size is not None
    ids = token_ids(where, contents["input_ids"])  # [T]
    H, T = layout.hidden_size, len(ids)
    states = rows(where, "hidden_state", contents["hidden_state"], T, H, layout.dtype)
    return ForeignSample(
        where=where,
        input_ids=ids,
        loss_mask=zeros_and_ones(where, contents["loss_mask"], T),
        features=states[:, None],  # [T, 1, H]
        last_hidden=None,
    )
