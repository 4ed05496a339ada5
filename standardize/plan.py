"""What a standard dataset is to be made of, and what of that is left to do: from identities and ledgers alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.shards.identity import IDENTITY_FILE, DatasetIdentity, read_identity
from eyas.shards.ledger import SHARDS_FOLDER, Problem, SealedShard, read_ledgers
from eyas.standardize.convert import refuse_overflow, same_bytes, standard_identity
from eyas.taps.errors import EyasError
from eyas.taps.notation import Tap


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to make of what. Built by request()."""

    source: Path
    out: Path
    source_identity: DatasetIdentity
    identity: DatasetIdentity  # out's

    @property
    def links(self) -> bool:
        """Whether captured shards already are the answer."""
        return same_bytes(self.source_identity, self.identity)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One captured shard, and which of its samples are still needed."""

    entry: SealedShard
    missing: frozenset[str]  # sample ids
    link: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is left to do."""

    tasks: tuple[Task, ...]
    num_done_samples: int  # in out already
    problems: tuple[Problem, ...]  # of the captured dataset

    @property
    def num_samples(self) -> int:
        return sum(len(task.missing) for task in self.tasks)

    @property
    def num_tokens(self) -> int:
        """Of the captured shards to work through."""
        return sum(task.entry.num_tokens for task in self.tasks)


def request(
    source: Path,
    out: Path,
    *,
    taps: tuple[Tap, ...] | None = None,
    last_hidden: Tap | Literal["captured", "none"] = "captured",
    dtype: str | None = None,
    codec: str | None = None,
) -> Request:
    """Resolve what is asked of the dataset ``source``; None and "captured" mean as captured. Writes nothing.

    Raises EyasError: ``source`` is no dataset, a tap was not captured, ``out`` is ``source`` or holds something else.
    """
    found = read_identity(source)
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise EyasError(f"{out} is the captured dataset {source} or inside it, which is never changed: name another")
    if out.exists() and not (out / IDENTITY_FILE).exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise EyasError(f"{out} holds files and is no eyas dataset: name a new or an empty folder")
    dtype = dtype or found.dtype
    if codec is None:  # as captured, where the dtype lets it
        codec = found.codec if dtype == "bfloat16" else "raw"
    identity = standard_identity(
        found,
        taps=found.taps if taps is None else taps,
        last_hidden=found.last_hidden if last_hidden == "captured" else None if last_hidden == "none" else last_hidden,
        dtype=dtype,
        codec=codec,
        where=str(source),
    )
    return Request(source=source, out=out, source_identity=found, identity=identity)


def plan(request: Request, without: Container[str] = ()) -> Plan:
    """What is left to do, from the ledgers alone. ``without``: captured shards not to use. Writes nothing.

    Raises OverflowRefusedError where the statistics show that a tap does not fit the dtype asked for.
    """
    captured = read_ledgers(request.source)
    done = read_ledgers(request.out) if request.out.exists() else None
    taken = {sample_id for entry in done.entries for sample_id in entry.sample_ids} if done else set()
    names = {entry.shard for entry in done.entries} if done else set()
    tasks: list[Task] = []
    for entry in captured.entries:
        if entry.shard in without:
            continue
        missing = frozenset(entry.sample_ids) - taken
        taken |= missing
        if missing:
            refuse_overflow(
                request.source_identity, request.identity, entry, str(request.source / SHARDS_FOLDER / entry.shard)
            )
            # A shard some of whose samples are in another one already cannot be linked: they would be there twice.
            whole = len(missing) == len(entry.sample_ids)
            tasks.append(Task(entry=entry, missing=missing, link=request.links and whole and entry.shard not in names))
    return Plan(
        tasks=tuple(tasks),
        num_done_samples=done.num_samples if done else 0,
        problems=tuple(captured.problems),
    )
