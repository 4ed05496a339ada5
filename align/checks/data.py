"""Inside the data: what ledgers, a bounded number of shard headers and a bounded sample of rows tell.

Ledgers are read whole (one line a shard). Headers and rows are those of a few shards spread over the dataset and of the
shards with the most tokens a sample; what was looked at is said where it is not everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.align.checks.subject import Subject
from eyas.align.verdict import Finding
from eyas.shards.errors import ShardError
from eyas.shards.layout import ShardMetadata, check_header, read_header
from eyas.shards.ledger import SHARDS_FOLDER, Problem, SealedShard

if TYPE_CHECKING:
    from torch import Tensor

NUM_HEADERS = 24
NUM_ROW_SAMPLES = 16
NUM_ROWS = 256  # of each, of the features
NUM_TOKENS = 8192  # of each, of the tokens and masks


@dataclass(frozen=True)
class ShardHeader:
    """What stands before a shard's tensors, and its offsets."""

    index: int
    path: Path
    entry: SealedShard
    metadata: ShardMetadata
    begins: dict[str, int]  # of each tensor, in bytes of the file
    offsets: npt.NDArray[np.int64]  # [N+1]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample: int64 [N]."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class LookedAt:
    """Headers of a few shards, and rows of a few samples."""

    subject: Subject

    @cached_property
    def places(self) -> list[int]:
        """Indexes of the shards: spread over the dataset, and those with the most tokens a sample."""
        entries = self.subject.ledgers.entries
        spread = np.linspace(0, len(entries) - 1, min(len(entries), NUM_HEADERS)).round().astype(int).tolist()
        longest = sorted(range(len(entries)), key=lambda i: entries[i].num_tokens / max(1, len(entries[i].sample_ids)))
        return sorted({*spread, *longest[-NUM_HEADERS // 3 :]}) if entries else []

    @cached_property
    def headers(self) -> list[ShardHeader]:
        """Raises ShardError."""
        return [self._read(index) for index in self.places]

    def _read(self, index: int) -> ShardHeader:
        entry = self.subject.ledgers.entries[index]
        path = self.subject.dataset / SHARDS_FOLDER / entry.shard
        header = read_header(path)
        metadata = check_header(path, header, self.subject.identity)
        begins = {name: place.begin for name, place in header.tensors.items()}
        offsets = np.fromfile(path, dtype="<i8", count=len(metadata.sample_ids) + 1, offset=begins["offsets"])  # [N+1]
        return ShardHeader(index, path, entry, metadata, begins, offsets)

    @property
    def is_everything(self) -> bool:
        return len(self.places) == len(self.subject.ledgers.entries)

    def __str__(self) -> str:
        total = len(self.subject.ledgers.entries)
        return "every shard looked at" if self.is_everything else f"{len(self.places)} of {total:,} shards looked at"

    @cached_property
    def _chosen(self) -> list[tuple[ShardHeader, int]]:
        """(shard, sample) of a few samples, spread over the shards looked at."""
        headers = self.headers[:: max(1, len(self.headers) // NUM_ROW_SAMPLES)][:NUM_ROW_SAMPLES]
        each = max(1, NUM_ROW_SAMPLES // max(1, len(headers)))
        return [
            (header, n)
            for header in headers
            for num in [len(header.metadata.sample_ids)]
            for n in np.linspace(0, num - 1, min(num, each)).round().astype(int).tolist()
        ]

    def features(self) -> Tensor:
        """Rows of a few samples: [n, A, H] in the dataset's dtype."""
        import torch

        from eyas.shards.dataset import Dataset

        dataset = Dataset(self.subject.dataset, self.subject.identity, self.subject.ledgers)
        samples = [dataset.shard(header.index).sample(n, slice(0, NUM_ROWS)) for header, n in self._chosen]
        rows = torch.cat([sample.features for sample in samples])  # [n, A*H]
        return rows.view(len(rows), len(self.subject.identity.taps), self.subject.identity.hidden_size)

    def tokens(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """input_ids int32 [t] and loss_mask uint8 [t] of a few samples."""
        for header, n in self._chosen:
            begin, end = header.offsets[n : n + 2].tolist()
            count = min(end - begin, NUM_TOKENS)
            ids = np.fromfile(header.path, dtype="<i4", count=count, offset=header.begins["input_ids"] + 4 * begin)
            mask = np.fromfile(header.path, dtype=np.uint8, count=count, offset=header.begins["loss_mask"] + begin)
            yield ids, mask


def check_data(subject: Subject, looked_at: LookedAt) -> list[Finding]:
    """Ledger problems, duplicates, NaN and Inf, taps that carry nothing, empty masks, sequences that are too long."""
    if not subject.ledgers.entries:
        return [
            Finding(
                check="data",
                status="mismatch",
                found="no sealed shard",
                expected="at least one",
                consequence="there is nothing to train on",
                mend=f"eyas capture PREPARED {subject.dataset} --target ...",
            ),
            *_problems(subject),
        ]
    found = [*_problems(subject), *_duplicates(subject), *_nonfinite(subject), *_dead(subject)]
    try:
        looked_at.headers  # noqa: B018  damage shows here
    except ShardError as error:
        damage = Finding(
            check="shards",
            status="mismatch",
            found=str(error),
            expected="a whole shard of this dataset",
            consequence="its samples cannot be read",
            mend=f"eyas inspect {subject.dataset} --verify finds every damaged shard; move them away and capture again",
        )
        return [*found, damage]
    return [*found, *_empty_masks(looked_at), *_too_long(subject, looked_at), *_rows(subject, looked_at)]


def _problems(subject: Subject) -> list[Finding]:
    others = [problem for problem in subject.ledgers.problems if problem.kind != "duplicate sample"]
    if not others:
        num = len(subject.ledgers.entries)
        counts = f"{num:,} shards, {subject.ledgers.num_samples:,} samples"
        return [Finding(check="ledgers", status="ok", found=f"{counts}. {_not_compared(subject)}")]
    return [
        Finding(
            check="ledgers",
            status="warning",
            found=f"{others[0]}"
            + (f", and {len(others) - 1} more" if len(others) > 1 else "")
            + f". {_not_compared(subject)}",
            expected="every shard with its line, every line with its shard",
            consequence="those samples do not count",
            mend="run the same eyas capture again: it recovers and captures what is missing",
        )
    ]


def _not_compared(subject: Subject) -> str:
    return f"Shards' bytes were not compared with their checksums: eyas inspect {subject.dataset} --verify does"


def _duplicates(subject: Subject) -> list[Finding]:
    repeated: list[Problem] = [p for p in subject.ledgers.problems if p.kind == "duplicate sample"]
    stored = sum(len(entry.sample_ids) for entry in subject.ledgers.entries)
    extra = stored - subject.ledgers.num_samples
    if not extra:
        return [Finding(check="duplicates", status="ok", found="none")]
    return [
        Finding(
            check="duplicates",
            status="warning",
            found=f"{extra:,} of {stored:,} stored samples are there twice, e.g. in {repeated[0].where}",
            expected="each sample once",
            consequence="readers of eyas take the first; anything that reads the shards itself trains on them twice",
            mend=f"eyas standardize {subject.dataset} OUT keeps each once",
        )
    ]


def _nonfinite(subject: Subject) -> list[Finding]:
    counts: dict[str, int] = {}
    shards: dict[str, str] = {}
    for entry in subject.ledgers.entries:
        for name, statistics in entry.statistics.items():
            if number := statistics["nonfinite"]:
                counts[name] = counts.get(name, 0) + number
                shards.setdefault(name, entry.shard)
    if not counts:
        return [Finding(check="NaN and Inf", status="ok", found="none")]
    name, number = max(counts.items(), key=lambda item: item[1])
    return [
        Finding(
            check="NaN and Inf",
            status="mismatch",
            found=", ".join(f"{name}: {number:,} values" for name, number in counts.items()),
            expected="none",
            consequence="one of them makes the loss of its whole batch NaN",
            mend=f"capture {shards[name]} again; where float16 overflows, with --dtype bfloat16",
        )
    ]


def _dead(subject: Subject) -> list[Finding]:
    """Taps that are all zeros, in some or all shards."""
    entries = subject.ledgers.entries
    dead = {
        name: [entry.shard for entry in entries if entry.statistics.get(name, {}).get("max_abs") == 0]
        for name in _names(subject)
    }
    found = []
    for name, shards in dead.items():
        if not shards:
            continue
        some = f"{len(shards)} of {len(entries)} shards, e.g. {shards[0]}"
        found.append(
            Finding(
                check=f"tap {name}",
                status="mismatch",
                found=f"nothing but zeros in {'every shard' if len(shards) == len(entries) else some}",
                expected="hidden states",
                consequence="the tensor was never captured there, and the draft learns to do without it",
                mend="capture again; of a foreign dataset, find out which tensors it holds: eyas check --identify",
            )
        )
    return found or [Finding(check="taps carry something", status="ok", found="none is all zeros")]


def _names(subject: Subject) -> list[str]:
    return sorted({name for entry in subject.ledgers.entries[:1] for name in entry.statistics})


def _empty_masks(looked_at: LookedAt) -> list[Finding]:
    entries = looked_at.subject.ledgers.entries
    whole = [entry for entry in entries if entry.num_trained_tokens == 0]
    empty = [
        f"sample {sample} in {header.entry.shard}"
        for header in looked_at.headers
        for sample, trained in zip(header.metadata.sample_ids, header.metadata.num_trained_tokens, strict=True)
        if trained == 0
    ]
    if not whole and not empty:
        return [Finding(check="loss masks", status="ok", found=f"none is empty ({looked_at})")]
    every = len(whole) == len(entries)
    return [
        Finding(
            check="loss masks",
            status="mismatch" if every else "warning",
            found=f"{len(empty)} samples have no trained token, e.g. {empty[0]} ({looked_at})"
            if empty
            else f"no token of {whole[0].shard} is trained",
            expected="at least one trained token in each sample",
            consequence="nothing is learned from them" + (": this is every shard" if every else ""),
            mend="eyas prepare leaves such conversations out; of a foreign dataset, its masks were lost on the way",
        )
    ]


def _too_long(subject: Subject, looked_at: LookedAt) -> list[Finding]:
    if subject.draft is None or subject.draft.config.max_positions is None:
        return []
    limit = subject.draft.config.max_positions
    # A shard's longest sample is at most its tokens less one for each other sample.
    bound = max(e.num_tokens - len(e.sample_ids) + 1 for e in subject.ledgers.entries)
    if bound <= limit:
        return [
            Finding(
                check="sequence lengths",
                status="ok",
                found=f"no shard can hold one above {bound:,} tokens, and the draft takes {limit:,}",
            )
        ]
    longest = max(int(header.lengths.max()) for header in looked_at.headers)
    over = sum(int((header.lengths > limit).sum()) for header in looked_at.headers)
    if not over:
        return [
            Finding(
                check="sequence lengths",
                status="ok" if looked_at.is_everything else "unknown",
                found=f"at most {longest:,} tokens, the draft takes {limit:,} ({looked_at})",
                mend="" if looked_at.is_everything else f"eyas inspect {subject.dataset} shows every length",
            )
        ]
    return [
        Finding(
            check="sequence lengths",
            status="mismatch",
            found=f"{over:,} samples are longer than the draft's positions, up to {longest:,} tokens ({looked_at})",
            expected=f"at most {limit:,} (max_position_embeddings of the draft)",
            consequence="those positions are not defined for the draft, or cut: it is trained on rows it cannot place",
            mend=f'"max_position_embeddings": {longest} or more, or eyas prepare --max-length {limit}',
        )
    ]


def _rows(subject: Subject, looked_at: LookedAt) -> list[Finding]:
    """Taps that repeat one row, and taps that are equal to each other, in the rows looked at."""
    import torch

    names = [str(tap) for tap in subject.identity.taps]
    rows = looked_at.features()  # [n, A, H]
    seen = f"{len(rows):,} rows looked at"
    found = []
    if len(rows) > 1:
        for slot, name in enumerate(names):
            if bool((rows[1:, slot] == rows[:1, slot]).all()) and bool(rows[0, slot].any()):
                found.append(
                    _useless(
                        f"tap {name}", f"every row is the same one ({seen})", "hidden states that depend on the tokens"
                    )
                )
    for a, b in combinations(range(len(names)), 2):
        if torch.equal(rows[:, a], rows[:, b]) and bool(rows[:, a].any()):
            found.append(
                _useless(
                    f"taps {names[a]} and {names[b]}", f"they are the same tensor ({seen})", "two different layers"
                )
            )
    return found or [Finding(check="taps differ", status="ok", found=f"from each other, and from row to row ({seen})")]


def _useless(check: str, found: str, expected: str) -> Finding:
    return Finding(
        check=check,
        status="mismatch",
        found=found,
        expected=expected,
        consequence="the draft gets less from the target than its config says, and other than the engine will feed it",
        mend="capture again; of a foreign dataset, find out which tensors it holds: eyas check --identify",
    )
