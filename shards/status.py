"""How far a dataset has come, from its ledgers alone: no shard is opened, no torch imported."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.shards.identity import DatasetIdentity, read_identity
from eyas.shards.ledger import Problem, SealedShard, is_known_to_rest, read_ledgers
from eyas.shards.rejects import read_rejects

WINDOW_SECONDS = 1800.0  # rates are over at most this much of a worker's latest work
LIVE_SECONDS = 600.0  # a worker that sealed nothing for this long, and for three of its shards, is not live
RESTART_SECONDS = 60.0  # between a seal and the next shard's first sample: the worker was down, not slow


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker name, over all its runs."""

    worker: str
    num_shards: int
    num_samples: int
    num_tokens: int
    last_sealed_at: float  # unix time
    live: bool  # sealed something lately, and the dataset is neither finished nor known to be at rest
    samples_per_second: float | None  # of its recent work; None where unknown
    tokens_per_second: float | None
    bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class DatasetStatus:
    """What ``eyas status`` prints."""

    dataset: str
    identity: DatasetIdentity
    num_prepared: int  # samples of the prepared input
    num_samples: int  # sealed
    num_rejected: int
    num_left: int
    num_shards: int
    num_tokens: int
    num_trained_tokens: int
    num_bytes: int
    is_at_rest: bool  # it is known that no run holds it
    workers: tuple[WorkerStatus, ...]
    samples_per_second: float | None  # of all live workers together; None while none is
    tokens_per_second: float | None
    bytes_per_second: float | None
    seconds_left: float | None  # at that rate of samples; None where unknown
    rejects: dict[str, str]  # sample id -> reason
    problems: tuple[Problem, ...]


def dataset_status(dataset: Path, *, now: float | None = None) -> DatasetStatus:
    """Read the ledgers of ``dataset``. Modifies nothing. Raises IdentityError where it is no dataset.

    ``now`` is a unix time, the present by default.
    """
    now = time.time() if now is None else now
    identity = read_identity(dataset)
    state = read_ledgers(dataset)
    rejects = read_rejects(dataset, state)
    by_worker: defaultdict[str, list[SealedShard]] = defaultdict(list)
    for entry in state.entries:
        by_worker[entry.shard.rpartition("-")[0]].append(entry)
    num_samples = state.num_samples
    num_left = max(identity.prepared.num_samples - num_samples - len(rejects), 0)
    recent = tuple(_worker_status(worker, entries, now) for worker, entries in sorted(by_worker.items()))
    is_at_rest = is_known_to_rest(dataset)
    workers = tuple(replace(worker, live=False) for worker in recent) if is_at_rest or not num_left else recent
    live = [worker for worker in workers if worker.live]
    samples_per_second = _sum(worker.samples_per_second for worker in live)
    return DatasetStatus(
        dataset=str(dataset),
        identity=identity,
        num_prepared=identity.prepared.num_samples,
        num_samples=num_samples,
        num_rejected=len(rejects),
        num_left=num_left,
        num_shards=len(state.entries),
        num_tokens=state.num_tokens,
        num_trained_tokens=state.num_trained_tokens,
        num_bytes=state.num_bytes,
        is_at_rest=is_at_rest,
        workers=workers,
        samples_per_second=samples_per_second,
        tokens_per_second=_sum(worker.tokens_per_second for worker in live),
        bytes_per_second=_sum(worker.bytes_per_second for worker in live),
        seconds_left=0.0 if not num_left else num_left / samples_per_second if samples_per_second else None,
        rejects=rejects,
        # What a worker is writing at this moment is no problem: one that tries rejected samples again, too.
        problems=tuple(
            problem
            for problem in state.problems
            if problem.kind != "leftover temporary" or is_at_rest or not any(worker.live for worker in recent)
        ),
    )


def _worker_status(worker: str, entries: Sequence[SealedShard], now: float) -> WorkerStatus:
    by_time = sorted(entries, key=lambda entry: entry.sealed_at)
    last = by_time[-1]
    recent = _recent(by_time)
    # From the first sample of the recent work to its last seal: sealing overlaps the next shard's filling, so shards'
    # own seconds would count time twice.
    seconds = last.sealed_at - min(entry.sealed_at - entry.seconds for entry in recent)
    known = seconds > 0
    return WorkerStatus(
        worker=worker,
        num_shards=len(entries),
        num_samples=sum(len(entry.sample_ids) for entry in entries),
        num_tokens=sum(entry.num_tokens for entry in entries),
        last_sealed_at=last.sealed_at,
        live=now - last.sealed_at <= max(LIVE_SECONDS, 3 * last.seconds),
        samples_per_second=sum(len(entry.sample_ids) for entry in recent) / seconds if known else None,
        tokens_per_second=sum(entry.num_tokens for entry in recent) / seconds if known else None,
        bytes_per_second=sum(entry.num_bytes for entry in recent) / seconds if known else None,
    )


def _recent(by_time: Sequence[SealedShard]) -> list[SealedShard]:
    """The latest shards of one uninterrupted run, at most WINDOW_SECONDS of them but at least one."""
    recent = [by_time[-1]]
    for entry in reversed(by_time[:-1]):
        started = recent[-1].sealed_at - recent[-1].seconds
        if started - entry.sealed_at > RESTART_SECONDS or by_time[-1].sealed_at - entry.sealed_at > WINDOW_SECONDS:
            break
        recent.append(entry)
    return recent


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
