"""Stored states as the replay takes them: samples of an eyas dataset or of foreign files, with one tensor per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from eyas.taps.notation import Tap

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.dataset import Dataset
    from eyas.shards.sample import Sample

LAST_HIDDEN = "last_hidden"
MIN_TOKENS = 4  # of a sample worth replaying: token 0 says nothing
CANARY = "canary "  # what the name of one begins with
MOST_BUILDS = 4  # of which a canary is replayed
# Rows of a sample that are scanned for damage without being replayed.
SCANNED_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor of H columns in every stored row."""

    name: str  # "slot 0", ... in the order of the features' row; "last_hidden"; a foreign tensor's name
    tensor: str  # the stored tensor whose rows it is a part of
    declared: Tap | None  # None where nothing says what it is


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """One sample, on the CPU. Rows [T', H] per slot: T' is the number of tokens T, unless foreign files lost some."""

    name: str  # sample id, or file
    where: str  # shard or file
    input_ids: Tensor  # int64 [T]
    slots: tuple[Tensor, ...]  # [T', H] each
    loss_mask: Tensor | None = None  # uint8 [T]
    target_top1: Tensor | None = None  # int64 [T]
    target_lse: Tensor | None = None  # float32 [T]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class Source(Protocol):
    """Where stored samples come from."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    @property
    def compute_dtype(self) -> str:
        """bfloat16, float16 or float32: what the states were computed in, as far as is known."""
        ...

    @property
    def weights_hash(self) -> str | None:
        """Of the weights that the states were captured with (hash_weights); None where nothing says which."""
        ...

    def pick(self, num_samples: int) -> list[StoredSample]:
        """Up to ``num_samples`` samples, evenly spread."""
        ...

    def neighbours(self, sample: StoredSample, num_samples: int) -> list[StoredSample]:
        """Samples stored next to ``sample``: those it would be mixed up with."""
        ...


class DatasetSource:
    """The samples of an eyas dataset. Reads the picked samples' bytes and nothing else.

    canaries: those of the dataset. One of each build is picked with the samples, so that with the canaries' own check
    (checks/canaries.py) every worker's are compared with the target.
    """

    def __init__(self, dataset: Dataset, canaries: Dataset | None = None) -> None:
        self._dataset = dataset
        self._canaries = canaries
        identity = dataset.identity
        self.name = str(dataset.path)
        self.compute_dtype = identity.dtype
        self.weights_hash = identity.target.weights_hash
        slots = [Slot(name=f"slot {n}", tensor="features", declared=tap) for n, tap in enumerate(identity.taps)]
        if identity.last_hidden is not None:
            slots.append(Slot(name=LAST_HIDDEN, tensor=LAST_HIDDEN, declared=identity.last_hidden))
        self.slots = tuple(slots)

    def pick(self, num_samples: int) -> list[StoredSample]:
        """Evenly spread over the dataset's samples, and so over its shards; what is too short to tell anything is
        replaced by the next sample that is not."""
        counts = np.array([len(entry.sample_ids) for entry in self._dataset.ledgers.entries])
        if not counts.sum():
            return []
        starts = np.concatenate([[0], np.cumsum(counts)])
        picked: dict[int, StoredSample] = {}
        for place in np.unique(((np.arange(num_samples) + 0.5) * counts.sum() / num_samples).astype(int)).tolist():
            for number in range(place, min(place + 16, int(starts[-1]))):
                shard = int(np.searchsorted(starts, number, side="right")) - 1
                if number in picked or self._num_tokens(shard, number - int(starts[shard])) < MIN_TOKENS:
                    continue
                picked[number] = self._read(shard, number - int(starts[shard]))
                break
        return [*picked.values(), *self._pick_canaries()]

    def _pick_canaries(self) -> list[StoredSample]:
        from eyas.align.checks.canaries import read_canaries

        chosen: dict[tuple[str, str], list[StoredSample]] = {}
        for canary in [] if self._canaries is None else read_canaries(self._canaries, []):
            if (canary.build, canary.tp) not in chosen and len(chosen) < MOST_BUILDS:
                chosen[canary.build, canary.tp] = [
                    self._stored(sample, name=f"{CANARY}{name}", where=canary.shard)
                    for name, sample in canary.samples.items()
                    if sample.num_tokens >= MIN_TOKENS
                ]
        return [sample for samples in chosen.values() for sample in samples]

    def neighbours(self, sample: StoredSample, num_samples: int) -> list[StoredSample]:
        """Samples of the same shard around ``sample``, nearest first."""
        if sample.name.startswith(CANARY):
            return []
        index, n = self._dataset.locate(sample.name)
        around = sorted(range(len(self._dataset.shard(index))), key=lambda place: abs(place - n))[1 : num_samples + 1]
        return [self._read(index, place) for place in around]

    def _num_tokens(self, shard: int, n: int) -> int:
        offsets = self._dataset.shard(shard).offsets
        return int(offsets[n + 1] - offsets[n])

    def _read(self, shard: int, n: int) -> StoredSample:
        opened = self._dataset.shard(shard)
        return self._stored(
            opened.sample(n, slice(0, SCANNED_TOKENS)), name=opened.sample_ids[n], where=opened.path.name
        )

    def _stored(self, sample: Sample, *, name: str, where: str) -> StoredSample:
        width = self._dataset.identity.hidden_size
        slots = list(sample.features.view(-1, len(self._dataset.identity.taps), width).unbind(1))
        if sample.last_hidden is not None:
            slots.append(sample.last_hidden)
        return StoredSample(
            name=name,
            where=where,
            input_ids=sample.input_ids.long(),
            slots=tuple(slots),
            loss_mask=sample.loss_mask,
            target_top1=None if sample.target_top1 is None else sample.target_top1.long(),
            target_lse=sample.target_lse,
        )


def format_slots(slots: Sequence[Slot]) -> str:
    """``slots 0, 1, 2`` or ``slot 0, last_hidden``."""
    numbers = [slot.name.removeprefix("slot ") for slot in slots if slot.name.startswith("slot ")]
    parts = [f"slot{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []
    return ", ".join([*parts, *(slot.name for slot in slots if not slot.name.startswith("slot "))])
