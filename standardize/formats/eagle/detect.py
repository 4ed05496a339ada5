"""Whether a folder holds EAGLE's training data: .ckpt or .pt files with ``hidden_state``, and no other states."""

from __future__ import annotations

from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.eagle.read import KEYS, SUFFIXES, open_reader
from eyas.standardize.formats.torch_files import dtype_name, first_contents, is_plain, looked_through

# Of layouts that share EAGLE's keys and put other states under them: SpecForge's, and speculators' first.
_ANOTHER_LAYOUT = ("aux_hidden_state", "target")


def detect(folder: Path) -> Layout | None:
    """The layout, told from the first file that can be read; three files are looked at for what is wrong."""
    found = first_contents(folder, SUFFIXES)
    if found is None:
        return None
    _, contents = found
    if not all(is_plain(contents.get(key)) for key in KEYS) or any(key in contents for key in _ANOTHER_LAYOUT):
        return None
    states = contents["hidden_state"]
    dtype = dtype_name(states)
    if states.ndim != 2 or not states.shape[1] or dtype is None:  # [1, N, H] is SpecForge's without its other states
        return None
    layout = Layout(
        format="eagle",
        version="EAGLE-1 and EAGLE-2: the last hidden state alone, which says nothing of an EAGLE-3 draft's taps",
        num_files=0,
        num_taps=1,
        hidden_size=states.shape[1],
        dtype=dtype,
        last_hidden=None,
        has_loss_mask=True,
        layer_ids=(-1,),
        convention="hf",
    )
    return looked_through(open_reader(folder, layout))
