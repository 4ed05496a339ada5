"""A folder that vLLM's ExampleHiddenStatesConnector wrote: one safetensors file a request, named by its id.

The layer ids are those of the server's configuration; no file says them. The loss mask is nobody's there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.hidden_states_file import read_shape

NAME = "vllm"

_TRIED_FILES = 16
_SPECULATORS_FILE = re.compile(r"hs_[0-9]+\.safetensors")


def detect(folder: Path) -> Layout | None:
    """The layout of ``folder``; None where it is another's."""
    names = state_files(folder)
    if not names or all(_SPECULATORS_FILE.fullmatch(os.path.basename(name)) for name in names):
        return None
    for name in names[:_TRIED_FILES]:
        shape = read_shape(folder / name)
        if shape is not None:
            break
    else:
        return None
    locks = sum(1 for name in names if (folder / f"{name}.lock").exists()) if len(names) < 10_000 else 0
    problems = [f"{locks:,} of the files have a lock file beside them: a server may still be writing"] if locks else []
    return Layout(
        format=NAME,
        version="ExampleHiddenStatesConnector" + (" of hs_connectors, fp8" if shape.is_fp8 else ""),
        num_files=len(names),
        num_taps=shape.num_slots,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        last_hidden=None,
        has_loss_mask=False,
        problems=tuple(problems),
    )


def state_files(folder: Path) -> list[str]:
    """Every safetensors file below ``folder``, by its path there, sorted."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(parent, folder)
        names += [
            name if inside == "." else os.path.join(inside, name)
            for name in files
            if name.endswith(".safetensors") and not name.startswith(".")
        ]
    return sorted(names)
