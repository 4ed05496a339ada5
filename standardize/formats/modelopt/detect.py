"""Whether a folder holds ModelOpt's offline hidden states: .pt files with ``aux_hidden_states``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.modelopt.read import KEYS, PRE_NORM, SUFFIXES, norm_of, open_reader
from eyas.standardize.formats.torch_files import dtype_name, first_contents, is_plain, looked_through


def detect(folder: Path) -> Layout | None:
    """The layout, told from the first file that can be read; three files are looked at for what is wrong."""
    found = first_contents(folder, SUFFIXES)
    if found is None:
        return None
    name, contents = found
    if not all(is_plain(contents.get(key)) for key in KEYS):
        return None
    aux, last, mask = contents["aux_hidden_states"], contents["hidden_states"], contents.get("loss_mask")
    hidden_size, dtype = last.shape[-1] if last.ndim else 0, dtype_name(last)
    if not hidden_size or dtype is None or (aux.numel() and aux.shape[-1] % hidden_size):
        return None
    layout = Layout(
        format="modelopt",
        version="hidden states in .pt files, " + ("with" if "loss_mask" in contents else "without") + " loss_mask",
        num_files=0,
        num_taps=aux.shape[-1] // hidden_size if aux.numel() else 0,
        hidden_size=hidden_size,
        dtype=dtype,
        last_hidden=norm_of(contents),
        has_loss_mask="loss_mask" in contents,
    )
    problems = []
    if PRE_NORM not in contents:
        problems.append(
            f"{name} does not say whether hidden_states is pre-norm: taken as post-norm, as ModelOpt's trainer does "
            "and compute_hidden_states_hf.py and _trtllm.py write it. What compute_hidden_states_vllm.py wrote is "
            "pre-norm, and its --aux-layers k is after:k-1, not after:k: find the taps by replay (--taps identify)"
        )
    if is_plain(mask) and bool(mask.all()):
        problems.append(f"{name}: loss_mask is 1 throughout, as it is written without --answer-only-loss")
    return looked_through(open_reader(folder, replace(layout, problems=tuple(problems))))
