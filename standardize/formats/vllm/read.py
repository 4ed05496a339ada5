"""Reads what vLLM's ExampleHiddenStatesConnector wrote (formats/hidden_states_file.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.standardize.formats.base import ForeignSample, FormatError, Layout
from eyas.standardize.formats.hidden_states_file import StatesShape, read_states
from eyas.standardize.formats.vllm.detect import state_files


def open_reader(folder: Path, layout: Layout) -> VllmReader:
    """The reader of a folder that detect() found to be vLLM's."""
    if layout.hidden_size is None:
        raise FormatError(f"{folder}: no hidden size")
    return VllmReader(folder, layout, layout.hidden_size)


class VllmReader:
    """Each slot is a tap; there is no last_hidden of its own, and no loss mask."""

    def __init__(self, folder: Path, layout: Layout, hidden_size: int) -> None:
        self._folder, self._layout = folder, layout
        self._shape = StatesShape(num_slots=layout.num_taps, hidden_size=hidden_size, dtype=layout.dtype, is_fp8=False)
        self._items = state_files(folder)

    @property
    def layout(self) -> Layout:
        return self._layout

    def items(self) -> Sequence[str]:
        """Files below the folder, sorted."""
        return self._items

    def read(self, item: str) -> ForeignSample:
        """One request. Raises ForeignFileError."""
        ids, states = read_states(self._folder / item, item, self._shape)
        return ForeignSample(where=item, input_ids=ids, loss_mask=None, features=states, last_hidden=None)
