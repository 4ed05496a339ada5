"""Writes a dataset in another system's layout, row by row, and can be killed at any instant.

Files are written without an fsync each. Once a thread has written about 256 MB it makes them durable together, and
appends their rows to a journal: what stands there is done, whatever became of the files since, so that finished files
may be moved elsewhere while the export goes on (``max_disk``). What a killed run wrote beyond the journal is written
again, byte for byte the same. Last, once every row is there, the writer's files of the whole set and the done marker.

::

    OUT/.eyas-rows     the journal: a line that says what is exported, then a line for each batch; gone at the end
    OUT/eyas.json      the done marker: what the journal's first line said
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import fsync_folder, publish, remove_temporaries, start_writeback
from eyas.shards.dataset import Dataset
from eyas.shards.errors import HeldError
from eyas.shards.identity import content_hash
from eyas.shards.ledger import SHARDS_FOLDER
from eyas.shards.report import plain_bytes_per_token
from eyas.shards.validate import validate
from eyas.standardize.formats.base import FormatError, Writer

JOURNAL_FILE = ".eyas-rows"
DONE_FILE = "eyas.json"

BATCH_BYTES = 256 << 20
_CLAIMED_ROWS = 8  # rows a thread takes at a time: neighbours, so that shards are read in order
_WRITE_BYTES = 1 << 20  # at a time: a write of all of a large file at once takes several times as long
_POLL_SECONDS = 0.2


class OtherSamplesError(FormatError):
    """A folder that holds an export of something else."""


class ExportFailed(FormatError):
    """Files could not be written (disk full, permissions). What the journal lists stays done."""


@dataclass(frozen=True, kw_only=True)
class RowsPlan:
    """What is left to write."""

    num_rows: int  # in all
    num_left: int
    num_bytes: int  # of what is left, about
    num_tokens: int  # of what is left, about where only a part is


@dataclass(frozen=True, kw_only=True)
class RowsSummary:
    """How an export ended."""

    num_rows: int  # in all
    num_done: int  # earlier runs included
    num_new: int  # by this run
    num_new_tokens: int
    num_new_bytes: int
    stopped: Literal["signal", "max disk"] | None  # why it stopped with rows left
    changed: str | None = None  # what became of the files since an earlier run finished them


def read_done(out: Path) -> dict[str, Any] | None:
    """What the done marker of an export says: format, dataset, taps, last_hidden; None where there is none."""
    try:
        body = json.loads((out / DONE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def plan_rows(
    dataset: Dataset,
    out: Path,
    *,
    format: str,
    sample_ids: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> RowsPlan:
    """What write_rows() with these arguments has left. Writes nothing. Raises OtherSamplesError."""
    ids = dataset.sample_ids() if sample_ids is None else sample_ids
    contents = _contents(dataset, format, ids, options or {})
    if _is_complete(out, contents):
        return RowsPlan(num_rows=len(ids), num_left=0, num_bytes=0, num_tokens=0)
    done = np.zeros(len(ids), dtype=np.bool_)
    with suppress(FileNotFoundError):
        _read_journal((out / JOURNAL_FILE).read_bytes(), contents, out, done)
    return _plan(dataset, done)


def write_rows(
    dataset: Dataset,
    out: Path,
    writer: Writer,
    *,
    format: str,
    sample_ids: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    threads: int = 4,
    max_disk: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_plan: Callable[[RowsPlan], None] = lambda plan: None,
    written: Callable[[int], None] = lambda tokens: None,
) -> RowsSummary:
    """Write ``dataset`` into ``out`` as ``format``, whose ``writer`` this is.

    sample_ids: the samples, as rows in this order; None is every one in the order of the shards, which are then read
    one after the other. options: what else decides the bytes (the draft vocabulary's hash), to be told from an export
    with others. threads: each holds one sample. max_disk: stop once ``out`` holds this many bytes. ``on_plan`` is
    called once before the first file, ``written`` with the tokens of each sample, both in the calling thread.

    Called again with the same arguments, it goes on. Raises FormatError (also where the disk lacks the space or the
    inodes, unless max_disk is given), OtherSamplesError, ExportFailed, ShardError.
    """
    writer.check(dataset.identity)
    ids = dataset.sample_ids() if sample_ids is None else sample_ids
    contents = _contents(dataset, format, ids, options or {})
    if _is_complete(out, contents):
        (out / JOURNAL_FILE).unlink(missing_ok=True)  # of a run that was killed in its last instant
        summary = _summary(len(ids), np.ones(len(ids), np.bool_), _Progress(), None)
        return replace(summary, changed=_changed(out))
    if out.is_dir() and not (out / JOURNAL_FILE).exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise FormatError(f"{out} is not empty: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    with _journal(out) as journal:
        remove_temporaries(out)
        done = np.zeros(len(ids), dtype=np.bool_)
        _start_journal(journal, contents, out, done)
        plan = _plan(dataset, done)
        if max_disk is None:
            _check_space(out, plan)
        on_plan(plan)
        progress = _Progress()
        export = _Export(dataset, out, writer, ids, done, journal, _Disk(out, max_disk), threads=threads)
        stopped = export.run(should_stop, progress, written)
        if stopped is None:
            writer.finish(out, dataset, ids)
            fsync_folder(out)
            publish(out / DONE_FILE, json.dumps({**contents, **_held(out)}).encode())
            (out / JOURNAL_FILE).unlink()
        return _summary(len(ids), done, progress, stopped)


@dataclass
class _Progress:
    """Of this run."""

    num_rows: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


def _summary(
    num_rows: int, done: npt.NDArray[np.bool_], progress: _Progress, stopped: Literal["signal", "max disk"] | None
) -> RowsSummary:
    return RowsSummary(
        num_rows=num_rows,
        num_done=int(done.sum()),
        num_new=progress.num_rows,
        num_new_tokens=progress.num_tokens,
        num_new_bytes=progress.num_bytes,
        stopped=stopped,
    )


def _plan(dataset: Dataset, done: npt.NDArray[np.bool_]) -> RowsPlan:
    num_left = int((~done).sum())
    tokens = round(dataset.num_tokens * num_left / max(dataset.num_samples, 1))
    # Ids as int64 in the place of int32 and a mask byte, and a header.
    return RowsPlan(
        num_rows=len(done),
        num_left=num_left,
        num_bytes=tokens * (plain_bytes_per_token(dataset.identity) + 4) + 512 * num_left,
        num_tokens=tokens,
    )


def _check_space(out: Path, plan: RowsPlan) -> None:
    """Raises FormatError with the numbers where the disk cannot hold what is left."""
    disk = os.statvfs(out)
    free = disk.f_bavail * disk.f_frsize
    if plan.num_bytes > free:
        raise FormatError(
            f"{out}: {plan.num_left:,} samples to write take about {plan.num_bytes:,} bytes, and the disk has {free:,} "
            f"free: give another disk, or write it piecewise with --max-disk (docs/formats.md)"
        )
    if disk.f_files and plan.num_left > disk.f_favail:  # file systems that make inodes as they go say 0
        raise FormatError(
            f"{out}: {plan.num_left:,} samples are a file each, and the disk has {disk.f_favail:,} inodes free: give "
            f"another disk, or write it piecewise with --max-disk (docs/formats.md)"
        )


def _held(out: Path) -> dict[str, int]:
    """The files of the export that ``out`` holds, and their bytes."""
    sizes = [
        os.stat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(out)
        for name in names
        if name not in (DONE_FILE, JOURNAL_FILE)
    ]
    return {"num_files": len(sizes), "num_bytes": sum(sizes)}


def _changed(out: Path) -> str | None:
    """How ``out`` differs from what its done marker says that it held; None where it does not."""
    done, now = read_done(out) or {}, _held(out)
    if all(done.get(name) == value for name, value in now.items()):
        return None
    return (
        f"{out} held {done.get('num_files', 0):,} files of {done.get('num_bytes', 0):,} bytes when it was finished and "
        f"holds {now['num_files']:,} of {now['num_bytes']:,} now. If they were not moved elsewhere, remove {out} and "
        f"write it anew"
    )


# --- the journal --------------------------------------------------------------------------------


def _contents(dataset: Dataset, format: str, ids: Sequence[str], options: Mapping[str, str]) -> dict[str, Any]:
    """What an export is, as far as its bytes depend on it, and the dataset's path for who reads it."""
    identity = dataset.identity
    digest = hashlib.blake2b(digest_size=16)
    for sample_id in ids:
        digest.update(bytes.fromhex(sample_id))
    return {
        "format": format,
        "dataset": str(dataset.path),
        "content": content_hash(identity),
        "taps": [str(tap) for tap in identity.taps],
        "last_hidden": None if identity.last_hidden is None else str(identity.last_hidden),
        "num_rows": len(ids),
        "samples": digest.hexdigest(),
        "options": dict(options),
    }


def _refuse_other(out: Path, found: Any, contents: dict[str, Any]) -> None:
    if not isinstance(found, dict):
        found = {}
    differing = [name for name, value in contents.items() if name != "dataset" and found.get(name) != value]
    if differing:
        raise OtherSamplesError(
            f"{out} holds other samples or another export ({', '.join(differing)} differ): give another folder, or "
            f"remove it"
        )


def _is_complete(out: Path, contents: dict[str, Any]) -> bool:
    found = read_done(out)
    if found is None:
        return False
    _refuse_other(out, found, contents)
    return True


@contextmanager
def _journal(out: Path) -> Iterator[int]:
    """The journal, open for appending, held by this process alone."""
    fd = os.open(out / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HeldError(f"{out}: another eyas standardize is writing there: wait for it or stop it") from error
        yield fd
    finally:
        os.close(fd)


def _start_journal(fd: int, contents: dict[str, Any], out: Path, done: npt.NDArray[np.bool_]) -> None:
    """Read what is done, cut off a torn tail, and say in the first line what this is where nothing does."""
    size = os.fstat(fd).st_size
    whole = _read_journal(os.pread(fd, size, 0), contents, out, done)
    if whole < size:
        os.ftruncate(fd, whole)
    if not whole:
        _append(fd, contents)
        fsync_folder(out)


def _read_journal(content: bytes, contents: dict[str, Any], out: Path, done: npt.NDArray[np.bool_]) -> int:
    """Mark the rows that are done; returns the bytes that are whole lines."""
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    if lines:
        _refuse_other(out, _parsed(lines[0]), contents)
    for line in lines[1:]:
        runs = _parsed(line)
        for first, stop in runs if isinstance(runs, list) else ():
            done[first:stop] = True
    return whole


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _append(fd: int, body: Any) -> None:
    line = memoryview(json.dumps(body, separators=(",", ":")).encode() + b"\n")
    while line:
        line = line[os.write(fd, line) :]
    os.fsync(fd)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending runs [first, stop) of ``rows``."""
    runs: list[tuple[int, int]] = []
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs


# --- the work -----------------------------------------------------------------------------------


class _Disk:
    """The bytes that OUT holds."""

    def __init__(self, out: Path, limit: int | None) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0
        if limit is not None:
            self._used = sum(
                os.stat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(out) for name in names
            )

    def take(self, num_bytes: int, replaced: Sequence[str]) -> bool:
        """Whether so many may be written in the place of the files ``replaced``; they count then."""
        if self.limit is None:
            return True
        with self._lock:
            more = num_bytes - sum(os.stat(path).st_size for path in replaced if os.path.exists(path))
            if self._used + more > self.limit:
                return False
            self._used += more
            return True


@dataclass
class _Batch:
    """What one thread has written since its last journal line."""

    rows: list[int]
    paths: list[str]
    num_bytes: int


class _Export:
    """The rows that are left, by several threads."""

    def __init__(
        self,
        dataset: Dataset,
        out: Path,
        writer: Writer,
        ids: Sequence[str],
        done: npt.NDArray[np.bool_],
        journal: int,
        disk: _Disk,
        *,
        threads: int,
    ) -> None:
        self._dataset, self._out, self._writer, self._ids = dataset, out, writer, ids
        self._done, self._journal, self._disk = done, journal, disk
        self._left = np.flatnonzero(~done)
        self._num_threads = max(1, min(threads, len(self._left)))
        self._next = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._full = False
        self._events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._folders: set[str] = set()
        self._proofs: dict[int, threading.Lock] = {}  # by shard
        self._proven: set[int] = set()

    def run(
        self, should_stop: Callable[[], bool], progress: _Progress, written: Callable[[int], None]
    ) -> Literal["signal", "max disk"] | None:
        """Write them; returns why rows are left, if any are. Raises what the first thread to fail raised."""
        if not len(self._left):
            return None
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(self._num_threads, thread_name_prefix="eyas-rows"))
            stack.callback(self._stop.set)  # the pool waits for its threads
            running = [pool.submit(self._work) for _ in range(self._num_threads)]
            num_running = self._num_threads
            while num_running:
                if should_stop():
                    self._stop.set()
                with suppress(queue.Empty):
                    event = self._events.get(timeout=_POLL_SECONDS)
                    if event is None:
                        num_running -= 1
                        continue
                    progress.num_rows += 1
                    progress.num_tokens += event[0]
                    progress.num_bytes += event[1]
                    written(event[0])
            for future in running:
                future.result()
        if self._done.all():
            return None
        return "max disk" if self._full else "signal"

    def _work(self) -> None:
        batch = _Batch([], [], 0)
        try:
            while claimed := self._claim():
                for row in claimed:
                    if self._stop.is_set() or not self._write(row, batch):
                        break
                    if batch.num_bytes >= BATCH_BYTES:
                        self._seal(batch)
                        batch = _Batch([], [], 0)
            self._seal(batch)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._events.put(None)

    def _claim(self) -> list[int]:
        with self._lock:
            if self._stop.is_set():
                return []
            claimed: list[int] = self._left[self._next : self._next + _CLAIMED_ROWS].tolist()
            self._next += _CLAIMED_ROWS
            return claimed

    def _write(self, row: int, batch: _Batch) -> bool:
        """Write one sample's files; False where the disk budget does not allow it."""
        shard, n = self._dataset.locate(self._ids[row])
        self._prove(shard)
        sample = self._dataset.shard(shard).sample(n)
        files = self._writer.files(row, sample)
        num_bytes = sum(piece.nbytes if isinstance(piece, memoryview) else len(piece)
                        for pieces in files.values() for piece in pieces)  # fmt: skip
        if not self._disk.take(num_bytes, [os.path.join(self._out, name) for name in files]):
            if num_bytes > (self._disk.limit or 0):
                raise FormatError(
                    f"--max-disk {self._disk.limit:,}: sample {sample.sample_id} alone takes {num_bytes:,} bytes: "
                    f"allow more"
                )
            self._full = True
            self._stop.set()
            return False
        for name, pieces in files.items():
            path = os.path.join(self._out, name)
            try:
                self._make_folder(os.path.dirname(path))
                _write_file(path, pieces)
            except OSError as error:
                raise _failed(path, error) from error
            batch.paths.append(path)
        batch.rows.append(row)
        batch.num_bytes += num_bytes
        self._events.put((sample.num_tokens, num_bytes))
        return True

    def _prove(self, shard: int) -> None:
        """Compare a shard with its checksums before the first of its samples is written: what other systems read has
        none, so that nobody could find a damaged byte in it later. Raises ShardError."""
        with self._lock:
            proof = self._proofs.setdefault(shard, threading.Lock())
        with proof:
            if shard not in self._proven:
                entry = self._dataset.ledgers.entries[shard]
                validate(self._dataset.path / SHARDS_FOLDER / entry.shard, self._dataset.identity, entry)
                self._proven.add(shard)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    def _seal(self, batch: _Batch) -> None:
        """Make a batch durable, then say so."""
        if not batch.rows:
            return
        try:
            for path in batch.paths:
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            folders = {os.path.dirname(path) for path in batch.paths}
            for folder in {*folders, *(os.path.dirname(folder) for folder in folders if folder != str(self._out))}:
                fsync_folder(Path(folder))
            with self._lock:
                _append(self._journal, _runs(batch.rows))
        except OSError as error:
            raise _failed(batch.paths[-1], error) from error
        self._done[batch.rows] = True
        self._dataset.give_back()


def _failed(path: str, error: OSError) -> ExportFailed:
    return ExportFailed(
        f"{path}: cannot write ({error.strerror}). What was finished before is whole: mend it (space, permissions, "
        f"limits) and run the same command again, which goes on from there"
    )


def _write_file(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    """Whatever an earlier run left under this name is replaced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view[:_WRITE_BYTES]) :]
        start_writeback(fd, 0, 0)  # all of it
    finally:
        os.close(fd)
