"""One conversation as tokens, and the tensors captured from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


def sample_id(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> str:
    """16 hex digits that name a sample by its content, whatever the order, world size or machine.

    blake2b, digest_size 8, over the length as uint32, then input_ids [T] as int32, then loss_mask [T] as uint8, all
    little-endian (docs/format.md, "Sample ids").
    """
    if input_ids.shape != loss_mask.shape or input_ids.ndim != 1:
        raise ValueError(f"input_ids {input_ids.shape} and loss_mask {loss_mask.shape} must be vectors of one length")
    digest = hashlib.blake2b(digest_size=8)
    digest.update(np.uint32(len(input_ids)).astype("<u4").tobytes())
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()


def parse_sample_ids(ids: Iterable[str]) -> npt.NDArray[np.uint64]:
    """Sample ids as numbers, uint64 [N], in the order given: 8 bytes each instead of a string's 65."""
    return np.frombuffer(bytes.fromhex("".join(ids)), dtype=">u8").astype(np.uint64)


@dataclass(frozen=True, kw_only=True)
class TokenSample:
    """One conversation as tokens: what an engine is given."""

    sample_id: str
    input_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 where the token itself is a training target

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One conversation with its captured tensors, on the CPU: what a shard holds and what a reader gives back."""

    sample_id: str
    input_ids: Tensor  # int32 [T]
    loss_mask: Tensor  # uint8 [T]
    features: Tensor  # dataset dtype [T, A*H]: view(T, A, H) takes the taps apart
    last_hidden: Tensor | None  # dataset dtype [T, H], tap dataset.json's last_hidden
    target_top1: Tensor | None  # int32 [T], -1 where unset
    target_lse: Tensor | None  # float32 [T], NaN where unset

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])
