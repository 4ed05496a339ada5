"""Ledgers: which shards are sealed and which samples they hold, without opening a shard.

``ledger/<worker>.jsonl`` gets one line per shard, appended and fsynced after the shard itself is durable under its
name. A line carries its own checksum, so a torn or damaged one is told from a whole one (docs/format.md, "Ledger").
Everything here works without torch: opening a dataset of 120 000 shards takes about a second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, publish, remove_temporaries
from eyas.shards.errors import HeldError, LedgerError, ShardError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import parse_sample_ids
from eyas.taps.errors import UsageError

SHARDS_FOLDER = "shards"
LEDGER_FOLDER = "ledger"
LOCK_FILE = ".lock"
_HOLDER = re.compile(r"process (?P<process>\d+) on (?P<host>.+)")
CORRUPT_SUFFIX = ".corrupt"

_WORKER = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_WORKER_NAME = re.compile(_WORKER)
_SHARD_NAME = re.compile(rf"({_WORKER})-([0-9]{{6,12}})\.safetensors")
_CHECK_KEY = b',"line_xxh3":"'
_CHECK_BYTES = len(_CHECK_KEY) + 16 + 2  # the key, 16 hex digits, and "}


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedShard:
    """One ledger line: a shard that is durable under its name."""

    shard: str  # file name, <worker>-<seq>.safetensors
    num_bytes: int  # of the file
    xxh3: str  # xxh3-64 of the whole file, hex
    num_tokens: int
    num_trained_tokens: int  # tokens with loss_mask 1
    sample_ids: tuple[str, ...]
    statistics: dict[str, Any]  # per tap and for last_hidden: mean_norm, max_abs, zeros (share), nonfinite (count)
    seconds: float  # from the shard's first sample to its seal
    sealed_at: float  # unix time


_DECODER = msgspec.json.Decoder(SealedShard)  # the standard library's parser takes 2 s for 120 000 lines, this one 0.5


@dataclass(frozen=True)
class Problem:
    """Something in a dataset folder that is not as a finished capture leaves it."""

    # torn line, leftover temporary, shard without line, line without shard, size differs, duplicate sample, set aside
    kind: str
    where: str  # path relative to the dataset
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class LedgerState:
    """What the ledgers of a dataset say, as far as the shards are there."""

    entries: list[SealedShard]  # those whose shard is there with its size; by worker, then seq
    problems: list[Problem]

    @cached_property
    def stored_ids(self) -> npt.NDArray[np.uint64]:
        """The sample ids in the order of the entries, repeats included: uint64 [M]."""
        return parse_sample_ids(sample_id for entry in self.entries for sample_id in entry.sample_ids)

    @cached_property
    def _ids(self) -> npt.NDArray[np.uint64]:
        ids = np.sort(self.stored_ids)
        return ids[np.append(True, ids[1:] != ids[:-1])] if len(ids) else ids  # np.unique takes ten times as long

    def sample_ids(self) -> npt.NDArray[np.uint64]:
        """The distinct sample ids, ascending: uint64 [N], an id's 16 hex digits read as a number."""
        return self._ids

    def contains(self, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of ``ids`` (uint64 [M]) are sealed: bool [M]."""
        known = self._ids
        if not len(known):
            return np.zeros(len(ids), dtype=np.bool_)
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.asarray(known[places] == ids, dtype=np.bool_)

    def __contains__(self, sample_id: str) -> bool:
        return bool(self.contains(parse_sample_ids([sample_id]))[0])

    @property
    def num_samples(self) -> int:
        """Distinct samples."""
        return len(self._ids)

    @property
    def num_tokens(self) -> int:
        """Rows stored. A duplicate sample, which is a problem of its own, counts each time."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_trained_tokens(self) -> int:
        return sum(entry.num_trained_tokens for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def read_ledgers(dataset: Path) -> LedgerState:
    """Read every ledger of ``dataset`` and compare with the names and sizes in its shards folder.

    Modifies nothing and opens no shard. A line counts only where its shard is there with the recorded size; every
    exception is listed in ``problems``. While a capture runs, its temporary file shows up there too.
    """
    ledgers = ((path.stem, path.read_bytes(), str(path)) for path in _ledgers(dataset))
    return ledger_state(ledgers, lambda: _shard_sizes(dataset))


def ledger_state(
    ledgers: Iterable[tuple[str, bytes, str]], shard_sizes: Callable[[], Mapping[str, int]]
) -> LedgerState:
    """read_ledgers() of a dataset that need not be a local folder.

    ledgers: worker, content and, for messages, the place of each ledger. shard_sizes: lists the shards folder, name to
    bytes; called once all ledgers are read, so that what a ledger names is there. Raises LedgerError.
    """
    entries: list[SealedShard] = []
    problems: list[Problem] = []
    with _no_garbage_collection():
        for worker, content, where in ledgers:
            lines, torn = parse_ledger(content, worker, where)
            entries += lines
            problems += [Problem("torn line", f"{LEDGER_FOLDER}/{worker}.jsonl", message) for message in torn]
        sizes = shard_sizes()
        present = []
        for entry in entries:
            found = sizes.get(entry.shard)
            where = f"{SHARDS_FOLDER}/{entry.shard}"
            if found == entry.num_bytes:
                present.append(entry)
            elif found is None:
                message = f"its ledger records {len(entry.sample_ids)} samples; they will be captured again"
                problems.append(Problem("line without shard", where, message))
            else:
                message = f"{found} bytes, and its ledger records {entry.num_bytes}; its samples do not count"
                problems.append(Problem("size differs", where, message))
        recorded = {entry.shard for entry in entries}
        for name in sorted(sizes.keys() - recorded):
            where = f"{SHARDS_FOLDER}/{name}"
            if name.startswith(TEMPORARY_PREFIX):
                message = "of a running capture, or left by one that was killed; the next capture removes it"
                problems.append(Problem("leftover temporary", where, message))
            elif name.endswith(CORRUPT_SUFFIX):
                problems.append(Problem("set aside", where, "a damaged shard, kept for you to look at or delete"))
            elif _SHARD_NAME.fullmatch(name):
                message = "in no ledger; the next capture verifies it and takes it in"
                problems.append(Problem("shard without line", where, message))
        state = LedgerState(present, problems)
        problems += _duplicates(state)
    return state


def check_worker_name(worker: str) -> None:
    """Refuse a name that cannot begin file names. Raises UsageError."""
    if not _WORKER_NAME.fullmatch(worker):
        raise UsageError(
            f"worker name {worker!r}: expected letters, digits, dots, dashes and underscores, at most 200 in all, the "
            f"first a letter or digit"
        )


def ledger_worker(name: str) -> str | None:
    """The worker whose ledger (or rejects) a file called ``name`` holds; None where it is no such name."""
    worker, dot, suffix = name.rpartition(".")
    return worker if dot and suffix == "jsonl" and _WORKER_NAME.fullmatch(worker) else None


class WorkerLedger:
    """The ledger of one worker, held exclusively: whoever holds it alone writes shards under the worker's name.

    Raises HeldError where another process holds it. A torn last line is cut off.
    """

    def __init__(self, dataset: Path, worker: str) -> None:
        check_worker_name(worker)
        self.dataset, self.worker = dataset, worker
        for folder in (SHARDS_FOLDER, LEDGER_FOLDER):
            (dataset / folder).mkdir(parents=True, exist_ok=True)
        fsync_folder(dataset)
        self.path = dataset / LEDGER_FOLDER / f"{worker}.jsonl"
        self._fd = _open_locked(self.path, f"worker {worker} is already writing into {dataset}: give another --worker")
        try:
            fsync_folder(self.path.parent)
            self._cut_torn_tail()
            self.next_seq = 1 + max((seq for seq in self._seqs()), default=-1)
        except BaseException:
            self.close()
            raise

    def shard_name(self, seq: int) -> str:
        return f"{self.worker}-{seq:06d}.safetensors"

    def append(self, shard: SealedShard) -> None:
        """Record a shard that is durable under its name. Raises OSError; nothing of the line is left then."""
        line = format_line(shard)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            written = os.write(self._fd, line)
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        """Give the worker name back. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> WorkerLedger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cut_torn_tail(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)

    def _seqs(self) -> Iterator[int]:
        """Sequence numbers in use: of shards, of temporaries, of shards set aside, of ledger lines."""
        pattern = re.compile(rf"(?:{re.escape(TEMPORARY_PREFIX)})?{re.escape(self.worker)}-([0-9]{{6,12}})\..*")
        names = [entry.name for entry in os.scandir(self.dataset / SHARDS_FOLDER)]
        names += [line.shard for line in _read_ledger(self.path)[0]]
        for name in names:
            if match := pattern.fullmatch(name):
                yield int(match[1])


@contextlib.contextmanager
def lock_dataset(dataset: Path) -> Iterator[None]:
    """Hold ``dataset`` for one capture or standardize run. Raises HeldError naming the holder's host and process.

    The lock is flock's: it ends with the process, however that ends. The file that carries it stays.
    """
    dataset.mkdir(parents=True, exist_ok=True)
    path = dataset / LOCK_FILE
    try:
        holder = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        holder = ""
    fd = _open_locked(
        path, f"{dataset} is in use by {holder or 'another process'}: wait for it or stop it, one run at a time"
    )
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)


def is_known_to_rest(dataset: Path) -> bool:
    """Whether no run holds ``dataset``, as far as its lock file tells: the last one ended in order, or is a process of
    this machine that is gone. Takes no lock, which a run that begins would be refused for."""
    try:
        holder = (dataset / LOCK_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    found = _HOLDER.fullmatch(holder)
    if found is None or found["host"] != socket.gethostname():
        return not holder
    try:
        os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def recover(dataset: Path, identity: DatasetIdentity) -> list[Problem]:
    """Bring ``dataset`` to a state where every shard has its line and every line its shard. Call under lock_dataset().

    Leftover temporaries are removed. Shards without a line are verified in full and taken in; those that fail, and
    those whose size differs from their line, are set aside as ``<name>.corrupt``. Ledgers lose torn lines and lines
    whose shard is gone, so that those samples are captured again. Returns what was found and what was done about it.
    Raises HeldError where a worker of an earlier run is still writing.
    """
    done: list[Problem] = []
    shards, ledgers = dataset / SHARDS_FOLDER, dataset / LEDGER_FOLDER
    for folder in (shards, ledgers):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as locks:
        for path in _ledgers(dataset):
            refusal = f"{dataset}: worker {path.stem} of an earlier run is still writing: stop it, or wait for its end"
            locks.callback(os.close, _open_locked(path, refusal))
        for folder in (dataset, ledgers, shards):
            for name in remove_temporaries(folder):
                where = os.path.relpath(folder / name, dataset)
                done.append(Problem("leftover temporary", where, "removed; nothing in it counted as done"))
        sizes = _shard_sizes(dataset)
        lines: dict[str, list[SealedShard]] = {}  # per worker, what its ledger should hold
        changed: set[str] = set()
        for path in _ledgers(dataset):
            entries, torn = _read_ledger(path)
            lines[path.stem] = [entry for entry in entries if sizes.get(entry.shard) == entry.num_bytes]
            if torn or len(lines[path.stem]) < len(entries):
                changed.add(path.stem)
            done += [Problem("torn line", f"{LEDGER_FOLDER}/{path.name}", f"{message}; removed") for message in torn]
            for entry in entries:
                again = f"its {len(entry.sample_ids)} samples will be captured again"
                found, where = sizes.pop(entry.shard, None), f"{SHARDS_FOLDER}/{entry.shard}"
                if found is None:
                    done.append(Problem("line without shard", where, f"line removed; {again}"))
                elif found != entry.num_bytes:
                    message = f"{found} bytes instead of {entry.num_bytes}; {_set_aside(shards / entry.shard)}; {again}"
                    done.append(Problem("size differs", where, message))
        for name in sorted(sizes):  # what no line names
            if match := _SHARD_NAME.fullmatch(name):
                adopted, message = _adopt(shards / name, identity)
                done.append(Problem("shard without line", f"{SHARDS_FOLDER}/{name}", message))
                if adopted is not None:
                    lines.setdefault(match[1], []).append(adopted)
                    changed.add(match[1])
        for worker in sorted(changed):
            publish(ledgers / f"{worker}.jsonl", b"".join(map(format_line, lines[worker])))
    return done


def _adopt(path: Path, identity: DatasetIdentity) -> tuple[SealedShard | None, str]:
    """The line of a shard that has none, or None where it is damaged and was set aside; and what to say about it."""
    from eyas.shards.validate import read_entry

    try:
        entry = read_entry(path, identity, None)
    except ShardError as error:
        return None, f"{_set_aside(path)}, since {error.tensor or 'it'}: {error.what}"
    return entry, f"verified and taken in, with {len(entry.sample_ids)} samples"


def _set_aside(path: Path) -> str:
    os.rename(path, path.with_name(path.name + CORRUPT_SUFFIX))
    fsync_folder(path.parent)
    return f"set aside as {path.name}{CORRUPT_SUFFIX}"


def format_line(shard: SealedShard) -> bytes:
    """The ledger line of ``shard``: one JSON object, last in it the xxh3-64 of all that stands before that key."""
    body = msgspec.json.encode(shard)[:-1]
    return body + _CHECK_KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def _read_ledger(ledger: Path) -> tuple[list[SealedShard], list[str]]:
    return parse_ledger(ledger.read_bytes(), ledger.stem, str(ledger))


def parse_ledger(content: bytes, worker: str, where: str) -> tuple[list[SealedShard], list[str]]:
    """The whole lines of a worker's ledger by seq, and a message for each line that is not whole.

    Every shard name is proven to be one of that worker's, so that it names a file in the shards folder and no other.
    Raises LedgerError, naming ``where``.
    """
    written = content.split(b"\n")
    lines, torn = [], []
    if written.pop():
        torn.append("the last line is torn, and does not count")
    for number, line in enumerate(written, start=1):
        body, check = line[:-_CHECK_BYTES], line[-_CHECK_BYTES:]
        if check == _CHECK_KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
            lines.append(line)
        else:
            torn.append(f"line {number} is torn or damaged, and does not count")
    try:
        entries = [_checked(_DECODER.decode(line), worker) for line in lines]
        if len({entry.shard for entry in entries}) < len(entries):
            raise ValueError("a shard has two lines")
        entries.sort(key=lambda entry: (len(entry.shard), entry.shard))  # by seq: of one worker, and zero-padded
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise LedgerError(
            f"{where}: whole lines, and yet not what a worker {worker} writes ({error}): restore the file, or "
            f"move it away and run the capture again, which verifies its shards and takes them in"
        ) from error
    return entries, torn


def _checked(entry: SealedShard, worker: str) -> SealedShard:
    """Types are right already. The name comes from a file: it must stay inside the shards folder."""
    match = _SHARD_NAME.fullmatch(entry.shard)
    if match is None or match[1] != worker:
        raise ValueError(f"shard name {entry.shard!r}")
    if not entry.sample_ids or set(map(len, entry.sample_ids)) != {16}:
        raise ValueError(f"sample ids of {entry.shard}")
    bytes.fromhex("".join(entry.sample_ids))
    return entry


def _ledgers(dataset: Path) -> list[Path]:
    return sorted((dataset / LEDGER_FOLDER).glob("[!.]*.jsonl"))


def _shard_sizes(dataset: Path) -> dict[str, int]:
    try:
        with os.scandir(dataset / SHARDS_FOLDER) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}
    except FileNotFoundError:
        return {}


def _duplicates(state: LedgerState) -> list[Problem]:
    """One problem for each shard that holds samples which a shard before it holds already."""
    entries, ids = state.entries, state.stored_ids
    if state.num_samples == len(ids):
        return []
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    counts = np.array([len(entry.sample_ids) for entry in entries])
    shards, num = np.unique(np.searchsorted(np.cumsum(counts), again, side="right"), return_counts=True)
    return [
        Problem(
            "duplicate sample",
            f"{SHARDS_FOLDER}/{entries[shard].shard}",
            f"{n} of its samples are in shards before it too; readers take the first",
        )
        for shard, n in zip(shards.tolist(), num.tolist(), strict=True)
    ]


def _open_locked(path: Path, refusal: str) -> int:
    """Open ``path`` for appending (made if missing) under an exclusive flock; HeldError(refusal) where it is held."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # recover() may have replaced the file between open and flock: then the lock is on a dead name.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
            os.close(fd)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise HeldError(refusal) from error
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise HeldError(f"{path}: this file system cannot lock files, and eyas needs that") from error
            raise


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of containers that all stay: the collector would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
