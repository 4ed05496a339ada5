"""Codecs: how a shard stores its wide tensors, features and last_hidden. One module each, with the same functions.

Codecs see bytes, not tensors: a sample's rows as uint8 [T_n, row_bytes], where row_bytes is W * itemsize.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.shards.codec import raw, zstd

Bytes = npt.NDArray[np.uint8]


class Encoder(Protocol):
    """What each module's Encoder does: one tensor of one shard."""

    def add(self, rows: Bytes) -> None:
        """The next sample's rows, uint8 [T_n, row_bytes], with gaps between them or without; not to be changed any
        more."""

    def finish(self) -> dict[str, list[Bytes]]:
        """The bytes of each stored tensor, in pieces."""


class Codec(Protocol):
    """What each module of this folder has. ``name`` is features or last_hidden."""

    def stored(
        self, name: str, dtype: str, num_samples: int, num_tokens: int, width: int
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The safetensors tensors that hold ``name``: dtype and shape of each; a size of -1 depends on the bytes."""

    def Encoder(self, name: str, pool: Executor) -> Encoder:
        """Encodes ``name`` of one shard, in ``pool``."""

    def check(self, name: str, tensors: Mapping[str, Bytes], offsets: npt.NDArray[np.int64], row_bytes: int) -> None:
        """Prove that every sample can be located, from the index alone. Raises ValueError.

        tensors: the flat bytes of the shard's tensors; offsets: int64 [N+1].
        """

    def decode(
        self,
        name: str,
        tensors: Mapping[str, Bytes],
        offsets: npt.NDArray[np.int64],
        row_bytes: int,
        n: int,
        rows: slice,
    ) -> Bytes:
        """Rows ``rows`` (start and stop within the sample) of sample n: uint8 [rows, row_bytes].

        Touches no more bytes than it needs; may be a view of ``tensors``. Raises ValueError where the bytes are not
        what encode() makes.
        """


CODECS: Mapping[str, Codec] = {"raw": raw, "zstd": zstd}
