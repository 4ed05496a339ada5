"""Codec raw: the rows as they are, in the dataset's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt


def stored(
    name: str, dtype: str, num_samples: int, num_tokens: int, width: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, (num_tokens, width))}


def encode(
    name: str, samples: Sequence[npt.NDArray[np.uint8]], pool: Executor
) -> dict[str, list[npt.NDArray[np.uint8]]]:
    return {name: list(samples)}


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
