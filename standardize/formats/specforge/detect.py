"""Whether a folder holds SpecForge's offline features: .ckpt or .ckpt.gz files with an ``aux_hidden_state``."""

from __future__ import annotations

from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.specforge.read import KEYS, SUFFIXES, open_reader, padded
from eyas.standardize.formats.torch_files import dtype_name, first_contents, is_plain, looked_through


def detect(folder: Path) -> Layout | None:
    """The layout, told from the first file that can be read; three files are looked at for what is wrong."""
    found = first_contents(folder, SUFFIXES)
    if found is None:
        return None
    name, contents = found
    if not all(is_plain(contents.get(key)) for key in KEYS):
        return None
    aux, last = contents["aux_hidden_state"], contents["hidden_state"]
    hidden_size, dtype = last.shape[-1] if last.ndim else 0, dtype_name(aux)
    if not aux.ndim or not hidden_size or aux.shape[-1] % hidden_size or not aux.shape[-1] or dtype is None:
        return None
    kinds = ["compressed"] * name.endswith(".gz") + ["padded"] * padded(contents)
    layout = Layout(
        format="specforge",
        version="offline features in .ckpt files" + (f", {' and '.join(kinds)}" if kinds else ""),
        num_files=0,
        num_taps=aux.shape[-1] // hidden_size,
        hidden_size=hidden_size,
        dtype=dtype,
        last_hidden="post-norm",
        has_loss_mask=True,
    )
    return looked_through(open_reader(folder, layout))
