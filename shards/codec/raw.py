"""Codec raw: the rows as they are, in the dataset's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt


def stored(
    name: str, dtype: str, num_samples: int, num_tokens: int, width: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, (num_tokens, width))}


class Encoder:
    """One tensor of one shard: its samples' own memory."""

    def __init__(self, name: str, pool: Executor) -> None:
        self._name = name
        self._samples: list[npt.NDArray[np.uint8]] = []

    def add(self, rows: npt.NDArray[np.uint8]) -> None:
        self._samples.append(rows)

    def finish(self) -> dict[str, list[npt.NDArray[np.uint8]]]:
        return {self._name: self._samples}


def check(
    name: str, tensors: Mapping[str, npt.NDArray[np.uint8]], offsets: npt.NDArray[np.int64], row_bytes: int
) -> None:
    """Shape and offsets say it all."""


def decode(
    name: str,
    tensors: Mapping[str, npt.NDArray[np.uint8]],
    offsets: npt.NDArray[np.int64],
    row_bytes: int,
    n: int,
    rows: slice,
) -> npt.NDArray[np.uint8]:
    begin = int(offsets[n])
    return tensors[name].reshape(-1, row_bytes)[begin + rows.start : begin + rows.stop]
