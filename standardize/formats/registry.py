"""The formats there are, and which of them a folder is in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.standardize.formats.base import FormatError, Layout, Reader, Writer

if TYPE_CHECKING:
    from torch import Tensor

READABLE = ("vllm", "speculators", "specforge", "modelopt", "eagle", "torchspec", "dump")
WRITABLE = ("vllm", "speculators", "specforge", "modelopt", "eagle")
POST_NORM = ("specforge", "modelopt", "eagle")  # whose writers apply the target's norm where they are given it


def detect(folder: Path, name: str | None = None) -> Layout:
    """The layout of ``folder``; ``name`` says which format to take where it could be several, or looks like none.

    Raises FormatError where it is in none of the formats known, or in several.
    """
    found: list[Layout] = [
        layout for known in ([name] if name else READABLE) if (layout := _module(known, "detect").detect(folder))
    ]
    if not found:
        wanted = f"not in the layout of {name}" if name else f"in none of the formats known ({', '.join(READABLE)})"
        raise FormatError(
            f"{folder}: {wanted}. Files of a patch of your own need a description: eyas standardize --describe {folder}"
        )
    if len(found) > 1:
        raise FormatError(f"{folder} could be {' or '.join(layout.format for layout in found)}: say which with --from")
    return found[0]


def open_reader(folder: Path, layout: Layout) -> Reader:
    """The reader of a folder that detect() looked at. Raises FormatError."""
    reader: Reader = _module(layout.format, "read").open_reader(folder, layout)
    return reader


def describe(folder: Path, *, hidden_size: int | None = None, vocab_size: int | None = None) -> str:
    """A description (TOML) of a dump, as far as its files show it, and the target's sizes. Raises FormatError."""
    text: str = _module("dump", "guess").describe(folder, hidden_size=hidden_size, vocab_size=vocab_size)
    return text


def create_writer(
    name: str,
    *,
    final_norm: Callable[[Tensor], Tensor] | None = None,
    d2t: npt.NDArray[np.int64] | None = None,
    t2d: npt.NDArray[np.bool_] | None = None,
) -> Writer:
    """The writer of format ``name``; its check() comes first.

    final_norm: the target's, [T, H] -> [T, H], None where it is not at hand. d2t int64 [Vd] offsets and t2d bool [V]:
    the draft vocabulary, None where it is the target's.
    """
    writer: Writer = _module(name, "write").Writer(final_norm=final_norm, d2t=d2t, t2d=t2d)
    return writer


def _module(name: str, file: str) -> Any:
    return importlib.import_module(f"eyas.standardize.formats.{name}.{file}")
