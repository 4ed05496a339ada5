"""Whether a folder holds TorchSpec's offline files: .ckpt files with ``aux_hidden_states``."""

from __future__ import annotations

from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.torch_files import dtype_name, first_contents, is_plain, looked_through
from eyas.standardize.formats.torchspec.read import KEYS, SUFFIXES, open_reader


def detect(folder: Path) -> Layout | None:
    """The layout, told from the first file that can be read; three files are looked at for what is wrong."""
    found = first_contents(folder, SUFFIXES)
    if found is None:
        return None
    _, contents = found
    if not all(is_plain(contents.get(key)) for key in KEYS):
        return None
    aux, last = contents["aux_hidden_states"], contents["hidden_states"]
    hidden_size, dtype = last.shape[-1] if last.ndim else 0, dtype_name(aux)
    if not aux.ndim or not hidden_size or aux.shape[-1] % hidden_size or not aux.shape[-1] or dtype is None:
        return None
    layout = Layout(
        format="torchspec",
        version="offline samples in .ckpt files",
        num_files=0,
        num_taps=aux.shape[-1] // hidden_size,
        hidden_size=hidden_size,
        dtype=dtype,
        last_hidden="post-norm",
        has_loss_mask=True,
    )
    return looked_through(open_reader(folder, layout))
