"""Canaries: did all workers, builds and tensor-parallel sizes capture the same of the same samples?

Every worker captured the same few samples before its own (shards/canaries.py). Each canary is compared with the first
one, tap by tap: the median over tokens of the relative L2 distance, token 0 left out, as taps/match.py has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eyas.align.checks.subject import Subject
from eyas.align.verdict import Finding
from eyas.shards.canaries import CANARIES_FOLDER, SESSION, open_canaries
from eyas.shards.dataset import Dataset
from eyas.shards.errors import ShardError
from eyas.shards.ledger import SHARDS_FOLDER
from eyas.shards.validate import validate

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.sample import Sample
    from eyas.taps.notation import Tap

# Of a canary's metadata: where these are the same, so is the arithmetic, up to the order of sums.
_SETTING = ("engine", "transformers", "vllm", "sglang", "torch", "path", "device", "attention", "tp")
_TOP1_SHARE = 0.5  # of the rows; near ties fall either way, and a small random target has many
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Canary:
    """What one worker captured of the canaries in one session."""

    worker: str
    shard: str
    sealed_at: float  # unix time
    made_by: dict[str, str]
    samples: dict[str, Sample]  # by id

    @property
    def build(self) -> str:
        """What ran the target, e.g. ``vllm 0.32.0 (torch 2.13.0+cpu)``."""
        engine = self.made_by.get("engine", "an unknown engine")
        return f"{engine} {self.made_by.get(engine, '')} (torch {self.made_by.get('torch', '?')})"

    @property
    def tp(self) -> str:
        return self.made_by.get("tp", "?")

    @property
    def setting(self) -> tuple[str | None, ...]:
        return tuple(self.made_by.get(name) for name in _SETTING)

    @property
    def session(self) -> str:
        return self.made_by.get(SESSION, "?")

    def __str__(self) -> str:
        return f"{self.worker} ({self.build}, tp {self.tp})"

    def beside(self, others: Sequence[Canary]) -> str:
        """Its name, with its session where the worker has canaries of several among ``others``."""
        same = {canary.shard for canary in others if canary.worker == self.worker} - {self.shard}
        return f"{self.worker} in session {self.session} ({self.build}, tp {self.tp})" if same else str(self)


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """How far one tensor of a canary is from the first's."""

    what: str
    amount: float
    allowed: float
    nearer: str = ""  # which of the first's taps it is nearer to

    @property
    def is_allowed(self) -> bool:
        return self.amount <= self.allowed

    def __str__(self) -> str:
        return f"{self.what} by {self.amount:.2g} (allowed {self.allowed:g}){self.nearer}"


def check_canaries(subject: Subject) -> list[Finding]:
    """Nothing where one worker's dataset has no canaries (captured before there were any, or by something else)."""
    dataset = open_canaries(subject.dataset)
    workers = set()
    if subject.identity.stage == "captured":  # in a standard dataset shards may be named after who wrote them
        workers = {entry.shard.rpartition("-")[0] for entry in subject.ledgers.entries}
    if dataset is None or not dataset.ledgers.entries:
        return [_unknown(f"none, of {len(workers)} workers", [])] if len(workers) > 1 else []
    unreadable: list[str] = []
    first, others, compared = _compare_all(dataset, None, unreadable)
    if first is None:
        return [_unknown("none of its canaries can be read", unreadable)]
    if 2 * sum(map(_differs, compared)) > len(compared) > 1:  # it may be the first that is wrong
        suspect = next(canary for canary, differences in zip(others, compared, strict=True) if _differs(differences))
        again = _compare_all(dataset, suspect.shard, [])
        if sum(map(_differs, again[2])) < sum(map(_differs, compared)):
            first, others, compared = again
            assert first is not None
    wrong = [pair for pair in zip(others, compared, strict=True) if _differs(pair[1])]
    if wrong:
        return [_mismatch(subject, first, wrong, others)]
    findings = [_ok(first, others, compared)]
    if alone := [canary for canary, differences in zip(others, compared, strict=True) if not differences]:
        names = _names(alone, [first, *others])
        findings.append(_unknown(f"{names} captured none of the samples that {first} did", []))
    captured = {canary.worker for canary in (first, *others)}
    if missing := sorted(workers - captured):
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if missing[_SHOWN:] else "")
        findings.append(_unknown(f"{shown} captured samples and no canary that is whole", unreadable))
        unreadable = []
    if unreadable:
        findings.append(_unknown(f"{len(unreadable)} of its canaries cannot be read", unreadable))
    return findings


def read_canaries(dataset: Dataset, unreadable: list[str]) -> Iterator[Canary]:
    """The canaries in ``dataset``, the earliest first. Why one cannot be read is added to ``unreadable``."""
    entries = dataset.ledgers.entries
    for index in sorted(range(len(entries)), key=lambda n: (entries[n].sealed_at, entries[n].shard)):
        entry = entries[index]
        try:
            validate(dataset.path / SHARDS_FOLDER / entry.shard, dataset.identity, entry)
            shard = dataset.shard(index)
            yield Canary(
                worker=entry.shard.rpartition("-")[0],
                shard=entry.shard,
                sealed_at=entry.sealed_at,
                made_by=shard.metadata.engine,
                samples={sample.sample_id: sample for sample in shard},
            )
        except (ShardError, OSError) as error:
            unreadable.append(str(error))


def _compare_all(
    dataset: Dataset, reference: str | None, unreadable: list[str]
) -> tuple[Canary | None, list[Canary], list[list[_Difference]]]:
    """The canary in shard ``reference`` (None: the first), the others without their samples, and how each differs."""
    first: Canary | None = None
    if reference is not None:
        first = next(canary for canary in read_canaries(dataset, []) if canary.shard == reference)
    others: list[Canary] = []
    compared: list[list[_Difference]] = []
    for canary in read_canaries(dataset, unreadable):
        if first is None:
            first = canary
        elif canary.shard != first.shard:
            compared.append(_compare(dataset, first, canary))
            others.append(replace(canary, samples={}))
    return first, others, compared


def _compare(dataset: Dataset, first: Canary, other: Canary) -> list[_Difference]:
    """Of every captured tensor; empty where the two have no sample in common."""
    import torch

    from eyas.capture.self_test import LSE_TOLERANCES, RANK_TOLERANCES, TOLERANCES

    identity = dataset.identity
    pairs = [(first.samples[name], other.samples[name]) for name in first.samples if name in other.samples]
    if not pairs:
        return []
    allowed = (RANK_TOLERANCES if first.setting == other.setting else TOLERANCES)[identity.dtype]
    ours = _columns(dataset, [pair[0] for pair in pairs])
    theirs = _columns(dataset, [pair[1] for pair in pairs])
    found = []
    for tap, column in theirs.items():
        error = _distance(column, ours[tap])
        nearer = ""
        if not error <= allowed:
            distances = {other_tap: _distance(column, state) for other_tap, state in ours.items()}
            best = min(distances, key=lambda tap: distances[tap] if distances[tap] == distances[tap] else float("inf"))
            if best != tap and distances[best] <= allowed:
                nearer = f", and is the first's {best} ({distances[best]:.2g})"
        found.append(_Difference(what=str(tap), amount=error, allowed=allowed, nearer=nearer))
    lse = [(a.target_lse, b.target_lse) for a, b in pairs if a.target_lse is not None and b.target_lse is not None]
    if lse:
        error = float(torch.cat([(b - a).abs() for a, b in lse]).nanmedian())
        found.append(_Difference(what="target_lse", amount=error, allowed=LSE_TOLERANCES[identity.dtype]))
    top1 = [(a.target_top1, b.target_top1) for a, b in pairs if a.target_top1 is not None and b.target_top1 is not None]
    rows = torch.cat([torch.stack((a, b), 1)[a >= 0] for a, b in top1]) if top1 else torch.empty(0, 2)  # [N, 2]
    if len(rows):
        share = float((rows[:, 0] != rows[:, 1]).float().mean())
        found.append(_Difference(what="target_top1", amount=share, allowed=_TOP1_SHARE))
    return found


def _columns(dataset: Dataset, samples: Sequence[Sample]) -> dict[Tap, Tensor]:
    """By tap its rows of all ``samples``, token 0 of each left out: float32 [N, H]."""
    import torch

    identity = dataset.identity
    features = torch.cat([s.features.view(s.num_tokens, len(identity.taps), -1)[1:].float() for s in samples])
    columns = dict(zip(identity.taps, features.unbind(1), strict=True))
    if identity.last_hidden is not None:
        last = [sample.last_hidden[1:].float() for sample in samples if sample.last_hidden is not None]
        columns[identity.last_hidden] = torch.cat(last)
    return columns


def _distance(rows: Tensor, reference: Tensor) -> float:
    """Median over tokens of the relative L2 distance. Both [N, H]."""
    return float(((rows - reference).norm(dim=-1) / reference.norm(dim=-1)).nanmedian())


def _differs(differences: Sequence[_Difference]) -> bool:
    return not all(difference.is_allowed for difference in differences)


def _ok(first: Canary, others: Sequence[Canary], compared: Sequence[Sequence[_Difference]]) -> Finding:
    every = [first, *others]
    builds = sorted({canary.build for canary in every})
    sizes = sorted({canary.tp for canary in every}, key=lambda size: (len(size), size))
    of = (
        f"{len(every)} by {_count(len({canary.worker for canary in every}), 'worker')}, "
        f"{_count(len(builds), 'build')} ({', '.join(builds[:_SHOWN])}), tp {', '.join(sizes)}"
    )
    measured = [
        (difference.amount / difference.allowed, difference, canary)
        for canary, differences in zip(others, compared, strict=True)
        for difference in differences
    ]
    if not measured:
        return Finding(check="canaries", status="ok", found=f"{of}: none to compare with")
    _, worst, canary = max(measured, key=lambda entry: entry[0])
    return Finding(check="canaries", status="ok", found=f"{of}: alike; most differs {worst} of {canary.worker}")


def _mismatch(
    subject: Subject,
    first: Canary,
    wrong: Sequence[tuple[Canary, Sequence[_Difference]]],
    others: Sequence[Canary],
) -> Finding:
    canary, differences = wrong[0]
    every = [first, *others]
    worst = [difference for difference in differences if not difference.is_allowed]
    more = f"; so do {_names([other for other, _ in wrong[1:]], every)}" if wrong[1:] else ""
    which = "" if len(others) > 1 else "; which of the two is wrong they cannot tell: replay does (--target)"
    return Finding(
        check="canaries",
        status="mismatch",
        found=f"{canary.beside(every)} differs from {first.beside(every)} in "
        f"{', '.join(map(str, worst[:_SHOWN]))}{more}",
        expected=f"what {first} captured of the same samples, session {first.session}{which}",
        consequence="the dataset mixes samples of two kinds, and a draft would be trained on both",
        mend=f"find out why, then take out what that worker wrote and capture it again: mv "
        f"{' '.join(_written_with(subject, canary, every))} ELSEWHERE, and the capture's own command once more"
        if subject.identity.stage == "captured"
        else "check the captured dataset, which tells what to take out of it, and standardize it again",
    )


def _written_with(subject: Subject, canary: Canary, every: Sequence[Canary]) -> list[str]:
    """The files of the worker of ``canary``; of its session alone where it had others: those sealed until the next."""
    shards, canaries = (subject.dataset / part / SHARDS_FOLDER for part in ("", CANARIES_FOLDER))
    sessions = [other.sealed_at for other in every if other.worker == canary.worker]
    if len(sessions) == 1:
        return [f"{shards}/{canary.worker}-*", f"{canaries}/{canary.worker}-*"]
    end = min((at for at in sessions if at > canary.sealed_at), default=float("inf"))
    written = [
        entry.shard
        for entry in subject.ledgers.entries
        if entry.shard.rpartition("-")[0] == canary.worker and canary.sealed_at <= entry.sealed_at < end
    ]
    return [*(f"{shards}/{shard}" for shard in written), f"{canaries}/{canary.shard}"]


def _unknown(found: str, reasons: Sequence[str]) -> Finding:
    return Finding(
        check="canaries",
        status="unknown",
        found=found + (f": {reasons[0]}" if reasons and reasons[0] not in found else ""),
        consequence="that these workers captured the same is not shown",
        mend="compare them with the target itself: eyas check DATASET --target TARGET",
    )


def _names(canaries: Sequence[Canary], every: Sequence[Canary]) -> str:
    names = list(dict.fromkeys(canary.beside(every) for canary in canaries))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
