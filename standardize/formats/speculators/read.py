"""Reads what speculators' data generation wrote (detect.py says which layouts there are).

Shapes: T tokens, A taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import ForeignFileError, ForeignSample, FormatError, Layout
from eyas.standardize.formats.hidden_states_file import StatesShape, read_states
from eyas.standardize.formats.speculators.detect import old_files, state_rows, states_folder
from eyas.standardize.formats.speculators.rows import TokenRows, has_rows
from eyas.standardize.formats.torch_files import is_plain, require, rows, token_ids, zeros_and_ones


def open_reader(folder: Path, layout: Layout) -> ArrowReader | OldReader:
    """The reader of a folder that detect() found to be speculators'. Raises FormatError."""
    if layout.hidden_size is None:
        raise FormatError(f"{folder}: no hidden size")
    if layout.num_taps < 1:
        raise FormatError(f"{folder}: a single slot, which is the last hidden state: there are no features to take")
    if layout.version.startswith("0.9"):
        return ArrowReader(folder, layout, layout.hidden_size)
    return OldReader(folder, layout, layout.hidden_size)


class ArrowReader:
    """0.9: hs_N.safetensors, and row N of the Arrow dataset where there is one."""

    def __init__(self, folder: Path, layout: Layout, hidden_size: int) -> None:
        self._layout = layout
        self._folder, self._states = folder, states_folder(folder)
        self._shape = StatesShape(
            num_slots=layout.num_taps + 1, hidden_size=hidden_size, dtype=layout.dtype, is_fp8=False
        )
        self._tokens = TokenRows.open(folder) if has_rows(folder) else None
        inside = "" if self._states == folder else f"{self._states.name}/"
        self._items = [f"{inside}hs_{row}.safetensors" for row in state_rows(self._states)]

    @property
    def layout(self) -> Layout:
        return self._layout

    def items(self) -> Sequence[str]:
        """Files of hidden states, by row."""
        return self._items

    def read(self, item: str) -> ForeignSample:
        """One row. Raises ForeignFileError, also where the file's tokens are not its row's: their trainer skips it."""
        import torch

        ids, states = read_states(self._folder / item, item, self._shape)
        mask = None
        if self._tokens is not None:
            row = int(item.rpartition("hs_")[2].partition(".")[0])
            try:
                row_ids, row_mask = self._tokens[row]
            except IndexError:
                raise ForeignFileError(
                    item, f"the Arrow dataset has no row {row}, only {len(self._tokens):,}"
                ) from None
            if not np.array_equal(ids.numpy(), row_ids):
                raise ForeignFileError(
                    item, f"its {len(ids):,} token_ids are not the {len(row_ids):,} input_ids of row {row}"
                )
            if len(row_mask) != len(row_ids):
                raise ForeignFileError(item, f"row {row} has {len(row_ids):,} tokens and a mask of {len(row_mask):,}")
            mask = torch.from_numpy(row_mask)
        return ForeignSample(
            where=item, input_ids=ids, loss_mask=mask, features=states[:, :-1], last_hidden=states[:, -1]
        )


class OldReader:
    """v0 and v1: a .pt file a sample."""

    def __init__(self, folder: Path, layout: Layout, hidden_size: int) -> None:
        self._folder, self._layout, self._hidden_size = folder, layout, hidden_size
        self._items = old_files(folder)

    @property
    def layout(self) -> Layout:
        return self._layout

    def items(self) -> Sequence[str]:
        """Files below the folder, by the numbers in their names."""
        return self._items

    def read(self, item: str) -> ForeignSample:
        """One file. Raises ForeignFileError."""
        import torch

        try:
            content = read_tensor_file(self._folder / item)
        except TensorFileError as error:
            raise ForeignFileError(item, error.what) from error
        if not isinstance(content, dict):
            raise ForeignFileError(item, f"holds a {type(content).__name__}, expected a dict")
        layout, H = self._layout, self._hidden_size
        named = ["input_ids", *(["loss_mask"] if layout.has_loss_mask else [])]
        if "hidden_states" not in content:
            named += ["hidden_state", "target"]
        require(item, content, named, layout.format)
        ids = token_ids(item, content["input_ids"])
        T, A = len(ids), layout.num_taps
        mask = zeros_and_ones(item, content["loss_mask"], T) if layout.has_loss_mask else None
        if "hidden_states" in content:
            states = content["hidden_states"]
            if not isinstance(states, list) or len(states) != A + 1 or not all(map(is_plain, states)):
                raise ForeignFileError(item, f"hidden_states is no list of {A + 1} tensors, one for each layer")
            *features, last_hidden = [rows(item, "hidden_states", state, T, H, layout.dtype) for state in states]
            stacked = torch.stack(features, dim=1)
        else:
            stacked = rows(item, "hidden_state", content["hidden_state"], T, A * H, layout.dtype).view(T, A, H)
            last_hidden = rows(item, "target", content["target"], T, H, layout.dtype)
        return ForeignSample(where=item, input_ids=ids, loss_mask=mask, features=stacked, last_hidden=last_hidden)
