"""Reads the hidden states that NVIDIA ModelOpt dumps for its offline training.

Read in NVIDIA/Model-Optimizer at a2fbac7b (2026-08-21; 0.47.0.dev),
examples/speculative_decoding/collect_hidden_states/compute_hidden_states_{hf,vllm,trtllm}.py and
modelopt/torch/speculative/eagle/utils.py (OfflineSupervisedDataset), and in their releases 0.39.0, 0.42.0 and 0.44.0::

    {conversation_id}.pt   input_ids int64 [T], aux_hidden_states [T, A*H], hidden_states [T, H], conversation_id,
                           loss_mask int64 [T] (from 0.45 on), hidden_states_prenorm bool (read from 0.46 on)

``hidden_states`` is ``final`` where transformers or TensorRT-LLM wrote it, in every release. The vLLM script keeps what
vLLM numbers L, which is pre-norm, and does not say so: no script of theirs writes ``hidden_states_prenorm``, though the
trainer reads it. Taps are the outputs of layers (``after:k``), the vLLM script's ``--aux-layers`` apart, which vLLM
reads as ``after:{k-1}``.

Mask: the chat template's assistant tokens themselves, not shifted; all ones without ``--answer-only-loss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eyas.standardize.formats.base import ForeignFileError, ForeignSample, Layout
from eyas.standardize.formats.torch_files import TorchFilesReader, require, rows, token_ids, zeros_and_ones

SUFFIXES = (".pt",)
KEYS = ("input_ids", "hidden_states", "aux_hidden_states")
PRE_NORM = "hidden_states_prenorm"


def open_reader(folder: Path, layout: Layout) -> TorchFilesReader:
    """A reader of ``folder``, whose layout detect() found."""
    return TorchFilesReader(folder, layout, SUFFIXES, _sample)


def norm_of(contents: Mapping[str, Any]) -> Literal["pre-norm", "post-norm"]:
    """What a file says of ``hidden_states``: post-norm where it says nothing, as their trainer takes it."""
    import torch

    return "pre-norm" if bool(torch.as_tensor(contents.get(PRE_NORM, False)).any()) else "post-norm"


def _sample(where: str, contents: Mapping[str, Any], layout: Layout) -> ForeignSample:
    require(where, contents, KEYS, "ModelOpt")
    assert layout.hidden_size is not None
    ids = token_ids(where, contents["input_ids"])  # [T]
    A, H, T = layout.num_taps, layout.hidden_size, len(ids)
    last_hidden = rows(where, "hidden_states", contents["hidden_states"], T, H, layout.dtype)
    if not A:
        raise ForeignFileError(where, "aux_hidden_states is empty: no layer but the last was dumped, so no tap is here")
    features = rows(where, "aux_hidden_states", contents["aux_hidden_states"], T, A * H, layout.dtype)
    norm = norm_of(contents)
    if norm != layout.last_hidden:
        raise ForeignFileError(where, f"hidden_states is {norm}; expected {layout.last_hidden}, as in the first file")
    mask = None
    if "loss_mask" in contents:
        require(where, contents, ("loss_mask",), "ModelOpt")
        mask = zeros_and_ones(where, contents["loss_mask"], T)
    return ForeignSample(
        where=where, input_ids=ids, loss_mask=mask, features=features.view(T, A, H), last_hidden=last_hidden
    )
