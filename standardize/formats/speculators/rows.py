"""The rows of a `datasets` folder of tokens and masks, mapped: opening 1.4 million reads no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.standardize.formats.base import FormatError

if TYPE_CHECKING:
    import pyarrow as pa

STATE_FILE = "state.json"


def has_rows(folder: Path) -> bool:
    """Whether ``folder`` is one that `datasets` saved."""
    return (folder / STATE_FILE).is_file()


class TokenRows:
    """``input_ids`` and ``loss_mask`` by row."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)  # [batches + 1]

    @classmethod
    def open(cls, folder: Path) -> TokenRows:
        """Raises FormatError where it cannot be read, or lacks one of the columns."""
        import pyarrow as pa

        try:
            state = json.loads((folder / STATE_FILE).read_bytes())
            # Only names: a path inside a file is never followed out of its folder.
            names = [Path(entry["filename"]).name for entry in state["_data_files"]]
            tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
            return cls(pa.concat_tables(tables).select(["input_ids", "loss_mask"]))
        except (OSError, ValueError, KeyError, TypeError) as error:  # pa.ArrowInvalid is a ValueError
            raise FormatError(f"{folder}: its Arrow dataset is unreadable, or has no input_ids and loss_mask "
                              f"({error})") from error  # fmt: skip

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """input_ids int64 [T] and loss_mask uint8 [T] of a row. Raises IndexError."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        n = int(np.searchsorted(self._starts, row, side="right")) - 1
        batch, at = self._batches[n], row - int(self._starts[n])
        ids, mask = (_values(batch.column(name), at) for name in ("input_ids", "loss_mask"))
        return ids.astype(np.int64, copy=False), (mask != 0).astype(np.uint8)


def _values(column: Any, n: int) -> npt.NDArray[Any]:
    start, end = column.offsets[n].as_py(), column.offsets[n + 1].as_py()
    values: npt.NDArray[Any] = column.values.slice(start, end - start).to_numpy(zero_copy_only=False)
    return values
