"""What a dataset holds, from its ledgers alone: counts, bytes, and each tap's norms and ranges. No shard is opened."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from eyas.shards.identity import DatasetIdentity, IdentityError, read_identity
from eyas.shards.ledger import LedgerState, Problem, SealedShard, read_ledgers
from eyas.shards.rejects import read_rejects


@dataclass(frozen=True, kw_only=True)
class TapReport:
    """One tap over all tokens of a dataset."""

    tap: str
    mean_norm: float  # of the L2 norms of its rows
    lowest_mean_norm: float  # of any shard, and the highest: a shard far off is suspect
    highest_mean_norm: float
    max_abs: float
    zeros: float  # share of its values
    nonfinite: int  # values that are NaN or Inf


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What ``eyas inspect`` prints."""

    dataset: str
    identity: DatasetIdentity
    num_shards: int
    num_samples: int
    num_tokens: int
    num_trained_tokens: int
    num_bytes: int
    plain_bytes: int  # the same tensors uncompressed
    taps: tuple[TapReport, ...]  # the features', then last_hidden
    num_rejected: int
    reject_reasons: dict[str, int]  # the most common first
    problems: tuple[Problem, ...]

    @property
    def compression(self) -> float:
        """plain_bytes / num_bytes, over everything in the shards; 1 where there is nothing."""
        return self.plain_bytes / self.num_bytes if self.num_bytes else 1.0


def dataset_report(dataset: Path, state: LedgerState | None = None) -> DatasetReport:
    """Read the ledgers of ``dataset`` (or take them as read_ledgers gave them). Raises IdentityError."""
    identity = read_identity(dataset)
    state = read_ledgers(dataset) if state is None else state
    rejects = read_rejects(dataset, state)
    return DatasetReport(
        dataset=str(dataset),
        identity=identity,
        num_shards=len(state.entries),
        num_samples=state.num_samples,
        num_tokens=state.num_tokens,
        num_trained_tokens=state.num_trained_tokens,
        num_bytes=state.num_bytes,
        plain_bytes=state.num_tokens * plain_bytes_per_token(identity),
        taps=_tap_reports(identity, state.entries),
        num_rejected=len(rejects),
        reject_reasons=dict(Counter(rejects.values()).most_common()),
        problems=tuple(state.problems),
    )


def plain_bytes_per_token(identity: DatasetIdentity) -> int:
    """What codec raw stores for one token: features and last_hidden, id and mask, target statistics."""
    width = identity.features_width + (identity.hidden_size if identity.last_hidden is not None else 0)
    return width * identity.itemsize_bytes + 5 + (8 if identity.target_statistics else 0)


def _tap_reports(identity: DatasetIdentity, entries: list[SealedShard]) -> tuple[TapReport, ...]:
    names = [str(tap) for tap in identity.taps]
    if identity.last_hidden is not None:
        names.append("last_hidden")
    num_tokens = sum(entry.num_tokens for entry in entries)
    if not num_tokens:
        return ()
    strange = [entry.shard for entry in entries if set(names) - entry.statistics.keys()]
    if strange:
        raise IdentityError(
            f"dataset.json names the tensors {', '.join(names)}, and the ledger line of {strange[0]} has others "
            f"({', '.join(entries[0].statistics)}): dataset.json was changed after the capture; restore it"
        )
    reports = []
    for name in names:
        means = [entry.statistics[name]["mean_norm"] for entry in entries]
        reports.append(
            TapReport(
                tap=name if name != "last_hidden" else f"last_hidden ({identity.last_hidden})",
                mean_norm=_weighted(means, entries, num_tokens),
                lowest_mean_norm=min(means),
                highest_mean_norm=max(means),
                max_abs=max(entry.statistics[name]["max_abs"] for entry in entries),
                zeros=_weighted([entry.statistics[name]["zeros"] for entry in entries], entries, num_tokens),
                nonfinite=sum(entry.statistics[name]["nonfinite"] for entry in entries),
            )
        )
    return tuple(reports)


def _weighted(values: list[float], entries: list[SealedShard], num_tokens: int) -> float:
    return math.fsum(value * entry.num_tokens for value, entry in zip(values, entries, strict=True)) / num_tokens
