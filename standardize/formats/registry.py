"""The formats there are, and which of them a folder is in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from eyas.standardize.formats.base import FormatError, Layout, Reader

READABLE = ("vllm", "speculators", "specforge", "modelopt", "eagle", "torchspec", "dump")
WRITABLE = ("vllm", "speculators", "specforge", "modelopt", "eagle")


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


def _module(name: str, file: str) -> Any:
    return importlib.import_module(f"eyas.standardize.formats.{name}.{file}")
