"""What a batch is, and which samples go into which, as a function of the seed and the epoch alone.

An epoch is a sequence of batches: samples in a random order, packed whole, best fit first, into batches of at most
``batch_tokens`` rows. It knows nothing of ranks. A step takes the next few batches, rank r of W the r-th, (r+W)-th, ...
of them, so that the position in the data is two numbers (epoch, batch) and any world size goes on from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.train.split import mix64

if TYPE_CHECKING:
    from torch import Tensor

_WINDOW = 512  # samples that a batch is chosen from; more of them change the fill by less than 0.1 %
_POSITION_BITS = 40


@dataclass
class Batch:
    """Whole documents back to back: T rows. Where T is fixed, padding fills the end: document -1, mask 0, zeros."""

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]: the token itself is a training target
    document: Tensor  # int32 [T], 0.. ascending
    position: Tensor  # int64 [T], within the sample
    features: Tensor  # [T, A*H]
    last_hidden: Tensor  # [T, H], tap after:{L-1} or final
    target_top1: Tensor | None  # int64 [T], -1 unset
    target_lse: Tensor | None  # float32 [T], NaN unset
    num_tokens: int  # rows that are no padding


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one epoch. Batch b holds the samples ``members[starts[b]:starts[b + 1]]``."""

    members: npt.NDArray[np.int64]  # [N] each sample of the epoch exactly once
    starts: npt.NDArray[np.int64]  # [B+1]

    @property
    def num_batches(self) -> int:
        return len(self.starts) - 1

    def samples(self, batch: int) -> npt.NDArray[np.int64]:
        """The samples of one batch, in the order of their rows."""
        return self.members[self.starts[batch] : self.starts[batch + 1]]


@dataclass(frozen=True)
class Share:
    """One batch that one rank works on in a step. A filler keeps a rank in step and counts for nothing."""

    batch: int
    is_filler: bool


def plan_epoch(
    samples: npt.NDArray[np.int64],
    ids: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.int32],
    *,
    batch_tokens: int,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """Shuffle ``samples`` (int64 [n], indexes into ``ids`` and ``lengths``) and pack them into batches.

    A sample longer than ``batch_tokens`` counts as that long: the reader cuts it. The order depends on ids, seed and
    epoch alone, and the packing on order and lengths.
    """
    key = int(mix64(np.array([seed], np.uint64), epoch + 1)[0])
    order = samples[np.argsort(mix64(ids[samples], key), kind="stable")]
    return pack(order, np.minimum(lengths[order], batch_tokens), batch_tokens)


def pack(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32], batch_tokens: int) -> EpochPlan:
    """Pack ``order`` (int64 [n]) with ``lengths`` [n] each at most ``batch_tokens``.

    A batch begins with the oldest sample that waits and takes, again and again, the longest of the next 512 that still
    fits: each sample waits for a bounded number of batches.
    """
    sizes = lengths.tolist()
    members: list[int] = []
    starts = [0]
    waiting: list[int] = []  # ascending keys: length, then the older of equal ones last
    taken = bytearray(len(sizes))
    last = (1 << _POSITION_BITS) - 1
    next_in = oldest = 0

    def key(position: int) -> int:
        return int(sizes[position]) << _POSITION_BITS | last - position

    while len(members) < len(sizes):
        while next_in < len(sizes) and len(waiting) < _WINDOW:
            insort(waiting, key(next_in))
            next_in += 1
        while taken[oldest]:
            oldest += 1
        room = batch_tokens
        at = bisect_left(waiting, key(oldest))
        while at >= 0:
            chosen = waiting.pop(at)
            position = last - (chosen & last)
            taken[position] = 1
            members.append(position)
            room -= chosen >> _POSITION_BITS
            if next_in < len(sizes):
                insort(waiting, key(next_in))
                next_in += 1
            at = bisect_right(waiting, room << _POSITION_BITS | last) - 1
        starts.append(len(members))
    return EpochPlan(order[np.array(members, dtype=np.int64)], np.array(starts, dtype=np.int64))


def rank_shares(num_batches: int, first: int, per_step: int, *, rank: int, world_size: int) -> Iterator[list[Share]]:
    """What ``rank`` works on in each step from batch ``first`` on to the epoch's end.

    A step takes ``per_step`` batches, a multiple of ``world_size``; the last step of an epoch what is left. Every rank
    gets the same number of shares, fillers included.
    """
    assert per_step % world_size == 0
    for start in range(first, num_batches, per_step):
        stop = min(start + per_step, num_batches)
        rounds = -(-(stop - start) // world_size)
        batches = [start + n * world_size + rank for n in range(rounds)]
        yield [Share(batch, False) if batch < stop else Share(stop - 1, True) for batch in batches]
