"""Datasets from one place to another, shard by shard: to a URL, or from one.

What is done is what the other end says: a shard counts as there once a ledger line there names it and it is listed
with that line's size. Nothing is remembered here, so a transfer that was killed at any instant goes on from there,
from any machine. Each shard is hashed on its way and compared with its ledger line before it can be seen at the other
end. Reading while it grows is safe: dataset.json comes first, a shard before the ledger line that names it, and what is
derived from the shards (token counts) last.

Threads: all that takes time here (network, disk, xxh3) releases the interpreter's lock.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, publish, remove_temporaries
from eyas.shards.canaries import CANARIES_FOLDER
from eyas.shards.errors import ShardError, ShardWriteError
from eyas.shards.identity import (
    IDENTITY_FILE,
    DatasetIdentity,
    IdentityError,
    create_or_match,
    identity_differences,
    parse_identity,
)
from eyas.shards.ledger import (
    LEDGER_FOLDER,
    SHARDS_FOLDER,
    LedgerState,
    SealedShard,
    WorkerLedger,
    format_line,
    ledger_state,
    ledger_worker,
    lock_dataset,
    parse_ledger,
    read_ledgers,
    recover,
)
from eyas.shards.rejects import REJECTS_FOLDER
from eyas.shards.remote import RemoteError, RemoteMissingError, Store, proven
from eyas.shards.token_counts import TOKEN_COUNTS_FILE, counted_shards, shards_fingerprint
from eyas.taps.errors import EyasError

_TRIES = 6  # beyond what the file systems try themselves
_PAUSE_SECONDS = 1.0  # before the second try; twice as long before each further one
_POLL_SECONDS = 0.2
_SHOWN = 5
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a transfer would do."""

    identity: DatasetIdentity
    missing: list[SealedShard]  # to be transferred
    there: list[SealedShard]  # at the other end already
    failures: dict[str, str]  # shards that cannot be transferred, and why
    notes: list[str]  # what else the two ends show

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.missing)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The transfer begins. ``num_bytes``: how many Advanced events will add up to."""

    plan: Plan
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """``num_bytes`` more went through; negative where a shard is begun anew."""

    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A shard is at the other end, and a ledger there names it."""

    shard: SealedShard


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A shard is not as its ledger line says. The transfer goes on, and fails at its end."""

    shard: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Something that the user should know, and that fails nothing."""

    message: str


@dataclass(kw_only=True)
class Summary:
    """How it ended. The last event."""

    num_shards: int = 0  # at the other end now, of this dataset
    num_samples: int = 0
    num_bytes: int = 0
    num_placed: int = 0  # shards, by this run
    placed_bytes: int = 0
    num_there: int = 0  # shards that were there before
    num_verified: int = 0  # shards read back and found whole
    failures: dict[str, str] = field(default_factory=dict)  # shard -> reason
    stopped_early: bool = False


Event = Planned | Advanced | Placed | Failed | Noticed | Summary


def plan_transfer(source: Store, destination: Store) -> Plan:
    """Compare the two ends. Changes nothing.

    Raises EyasError where the source is no dataset, or the destination holds another one or something else.
    """
    identity = _match(source, destination)
    found, other = _read_end(source), _read_end(destination)
    assert found is not None  # _match() has seen it
    shards = {entry.shard: entry for entry in other[1].entries} if other else {}
    missing, there, failures = [], [], {}
    for entry in found[1].entries:
        placed = shards.get(entry.shard)
        if placed is None:
            missing.append(entry)
        elif (placed.xxh3, placed.num_bytes) == (entry.xxh3, entry.num_bytes):
            there.append(entry)
        else:
            failures[entry.shard] = (
                f"{destination.where(SHARDS_FOLDER)}/{entry.shard} is another shard of the same name: two captures "
                f"used one --worker name. Give another destination"
            )
    notes = []
    for problem in found[1].problems:
        name = problem.where.rpartition("/")[2]
        what = f"{source.where(problem.where)}: {problem.kind}: {problem.message}"
        if problem.kind in ("line without shard", "size differs") and name not in shards:
            failures[name] = what
        elif problem.kind in ("torn line", "shard without line"):
            notes.append(what)
    for problem in other[1].problems if other else ():
        if problem.kind in ("line without shard", "size differs"):
            notes.append(f"{destination.where(problem.where)}: {problem.kind}: it does not count")
    return Plan(identity=identity, missing=missing, there=there, failures=failures, notes=notes)


def transfer(
    source: Store, destination: Store, *, workers: int, verify: bool, should_stop: Callable[[], bool]
) -> Iterator[Event]:
    """Bring to ``destination`` what it has not got of ``source``, one of which is a local folder.

    verify: read every shard back from the destination, those that were there before too; what is not whole there is
    transferred again. should_stop: asked often; once true, the shards under way are left, and those that are through
    are made to count. The last event is the Summary. Raises EyasError and OSError: the same call goes on from there.
    """
    run = _Run(source, destination, workers=workers, verify=verify)
    with ThreadPoolExecutor(1, thread_name_prefix="eyas-transfer") as conductor, run.stopped_at_exit():
        done = conductor.submit(run.conduct)
        while not (done.done() and run.events.empty()):
            if should_stop():
                run.stop()
            with suppress(queue.Empty):
                yield run.events.get(timeout=_POLL_SECONDS)
        yield done.result()


def _match(source: Store, destination: Store) -> DatasetIdentity:
    """The identity that both ends have, or the source and an empty destination. Raises EyasError."""
    ours, theirs = source.read(IDENTITY_FILE), destination.read(IDENTITY_FILE)
    if ours is None:
        raise _foreign(source)
    identity = parse_identity(ours, where=source.where(IDENTITY_FILE))
    if theirs is None:
        if _names(destination):
            raise _foreign(destination)
        return identity
    other = parse_identity(theirs, where=destination.where(IDENTITY_FILE))
    if differences := identity_differences(other, identity):
        raise IdentityError(
            f"{destination.url} holds another dataset than {source.url}: "
            + "; ".join(f"{name} is {there!r} there and {here!r} here" for name, there, here in differences)
            + ". Give another destination"
        )
    return identity


def _read_end(store: Store) -> tuple[DatasetIdentity, LedgerState] | None:
    """What is there; None where there is no dataset.json. Ledgers are read before the shards are listed."""
    content = store.read(IDENTITY_FILE)
    if content is None:
        return None
    identity = parse_identity(content, where=store.where(IDENTITY_FILE))

    def ledgers() -> Iterator[tuple[str, bytes, str]]:
        for name in sorted(store.sizes(LEDGER_FOLDER)):
            worker, path = ledger_worker(name), f"{LEDGER_FOLDER}/{name}"
            if worker is not None:
                yield worker, store.read(path) or b"", store.where(path)

    return identity, ledger_state(ledgers(), lambda: store.sizes(SHARDS_FOLDER))


def _names(store: Store) -> list[str]:
    """What lies there, but for what every repository has and what a killed download leaves."""
    return [name for name in sorted(store.sizes()) if not name.startswith(".") and name.rstrip("/") != "README.md"]


def _foreign(store: Store) -> EyasError:
    names = _names(store)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return EyasError(
        f"{store.url}: no {IDENTITY_FILE} there, so this is no eyas dataset (there is {shown or 'nothing'}). "
        + (
            "Give a place that is empty or holds the dataset; what another tool wrote becomes one by: eyas standardize"
            if names
            else "Look at the name, and at what your credentials may see"
        )
    )


class _Stopped(Exception):
    """The run ends; what is under way is left."""


class _End(Protocol):
    """The destination, as a run writes into it."""

    def begin(self, identity: DatasetIdentity) -> None:
        """Put dataset.json there, unless it is, and make what killed runs left count or go."""

    def put(self, entry: SealedShard, blocks: Iterator[bytes]) -> None:
        """Place one shard. Called by several threads."""

    def flush(self) -> None:
        """Make every shard that was put count."""

    def publish(self, files: dict[str, bytes]) -> None:
        """Write small files, in that order, each whole."""


class _Run:
    """One transfer: its threads, its retries, and the events they tell."""

    def __init__(self, source: Store, destination: Store, *, workers: int, verify: bool) -> None:
        self.source, self.destination = source, destination
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._num_workers, self._verify = workers, verify
        self._stopping = threading.Event()  # asked to, or one of the threads has failed
        self._asked = False

    def stop(self) -> None:
        """End soon."""
        self._asked = True
        self._stopping.set()

    @contextmanager
    def stopped_at_exit(self) -> Iterator[None]:
        """For a caller that leaves the events unread: the threads must not go on without it."""
        try:
            yield
        finally:
            self._stopping.set()

    def conduct(self) -> Summary:
        """The transfer from its beginning to its end."""
        with ExitStack() as stack, suppress(_Stopped):
            end: _End
            if self.destination.folder is None:
                end = _StoreEnd(self)
            else:
                self.patiently(lambda: _match(self.source, self.destination))  # before anything is made there
                end = stack.enter_context(_FolderEnd(self, self.destination.folder))
            end.begin(self.patiently(lambda: _match(self.source, self.destination)))
            plan = self.patiently(lambda: plan_transfer(self.source, self.destination))
            if self.destination.folder is not None:
                _check_space(self.destination.folder, plan)
            return self._work_through(plan, end)
        return Summary(stopped_early=True)

    def _work_through(self, plan: Plan, end: _End) -> Summary:
        summary = Summary(failures=dict(plan.failures), num_there=len(plan.there))
        for note in plan.notes:
            self.events.put(Noticed(message=note))
        total = plan.num_bytes + (sum(e.num_bytes for e in [*plan.missing, *plan.there]) if self._verify else 0)
        self.events.put(Planned(plan=plan, num_bytes=total))
        for shard, reason in plan.failures.items():
            self.events.put(Failed(shard=shard, reason=reason))
        placed = self._put_all(plan.missing, end, summary)
        if self._verify and not self._asked:
            self._verify_all([*plan.there, *placed], end, summary)
        found = self.patiently(lambda: _read_end(self.destination))
        state = found[1] if found else LedgerState([], [])
        named = {entry.shard: entry.xxh3 for entry in state.entries}
        if lost := [entry.shard for entry in placed if named.get(entry.shard) != entry.xxh3]:
            raise EyasError(
                f"{self.destination.url}: the ledgers there do not name {', '.join(lost[:_SHOWN])}, just stored: is "
                f"another transfer writing there? Run one at a time, and this command again"
            )
        if not self._asked:
            self._bring_canaries(summary)
            self._finish(state, end)
        mine = [entry for entry in [*plan.there, *placed] if entry.shard not in summary.failures]
        summary.num_placed, summary.placed_bytes = len(placed), sum(entry.num_bytes for entry in placed)
        summary.num_shards, summary.num_bytes = len(mine), sum(entry.num_bytes for entry in mine)
        summary.num_samples = LedgerState(mine, []).num_samples
        summary.stopped_early = self._asked
        return summary

    def _put_all(self, entries: list[SealedShard], end: _End, summary: Summary) -> list[SealedShard]:
        """Place ``entries``; returns those that are through."""
        placed: list[SealedShard] = []

        def put(entry: SealedShard) -> None:
            if self._put(entry, end, summary):
                placed.append(entry)

        try:
            self._each(entries, put)
        except BaseException:
            with suppress(RemoteError, _Stopped):  # the first error is the one to tell
                end.flush()
            raise
        end.flush()
        return placed

    def _put(self, entry: SealedShard, end: _End, summary: Summary) -> bool:
        """Place one shard; False where its bytes are not what its ledger line says."""
        again = self.source.folder is None  # what came damaged may have been so on its way only
        while True:
            try:
                self.patiently(lambda: self._through(self.source, entry, lambda blocks: end.put(entry, blocks)))
            except ShardError as error:
                if again:
                    again = False
                    self.events.put(Noticed(message=f"{error}: once more"))
                    continue
                self._fail(entry, str(error), summary)
                return False
            return True

    def _verify_all(self, entries: list[SealedShard], end: _End, summary: Summary) -> None:
        """Read ``entries`` back; what is not whole is put again and read once more."""
        bad: list[SealedShard] = []

        def verify(entry: SealedShard) -> None:
            if reason := self._damage(entry):
                bad.append(entry)
                self.events.put(Noticed(message=f"{reason}: it is transferred again"))
            else:
                summary.num_verified += 1

        self._each(entries, verify)
        for entry in self._put_all(bad, end, summary):
            if reason := self._damage(entry):
                self._fail(entry, reason, summary)
            else:
                summary.num_verified += 1

    def _damage(self, entry: SealedShard) -> str | None:
        """What is wrong with a shard at the destination."""

        def read(blocks: Iterator[bytes]) -> None:
            for _ in proven(blocks, entry, self.destination.where(f"{SHARDS_FOLDER}/{entry.shard}")):
                pass

        try:
            self.patiently(lambda: self._through(self.destination, entry, read))
        except ShardError as error:
            return str(error)
        return None

    def _through(self, store: Store, entry: SealedShard, work: Callable[[Iterator[bytes]], None]) -> None:
        """work() on the bytes of a shard in ``store``, told as they come, and taken back where it fails.

        A file that cannot be had while others can is that shard's failure: ShardError.
        """
        name, told = f"{SHARDS_FOLDER}/{entry.shard}", 0

        def blocks() -> Iterator[bytes]:
            nonlocal told
            try:
                for block in store.blocks(name):
                    if self._stopping.is_set():
                        raise _Stopped
                    told += len(block)
                    self.events.put(Advanced(num_bytes=len(block)))
                    yield block
            except RemoteError as error:
                if isinstance(error, RemoteMissingError) or store.folder is not None:
                    raise ShardError(Path(store.where(name)), None, f"unreadable ({error})") from error
                raise

        try:
            work(blocks())
        except BaseException:
            self.events.put(Advanced(num_bytes=-told))
            raise

    def _fail(self, entry: SealedShard, reason: str, summary: Summary) -> None:
        summary.failures[entry.shard] = reason
        self.events.put(Failed(shard=entry.shard, reason=reason))

    def _bring_canaries(self, summary: Summary) -> None:
        """Transfer the small dataset inside the dataset, where there is one. Only what goes wrong is told of it."""
        source = self.source.inside(CANARIES_FOLDER)
        if self.patiently(lambda: source.read(IDENTITY_FILE)) is None:
            return
        destination = self.destination.inside(CANARIES_FOLDER)
        run = _Run(source, destination, workers=self._num_workers, verify=self._verify)
        run._stopping = self._stopping
        for shard, reason in run.conduct().failures.items():
            summary.failures[f"{CANARIES_FOLDER}/{shard}"] = reason
        while not run.events.empty():
            event = run.events.get()
            if isinstance(event, (Failed, Noticed)):
                self.events.put(event)

    def _finish(self, state: LedgerState, end: _End) -> None:
        """Bring rejects and token counts, which are of use once the shards are there."""
        files: dict[str, bytes] = {}

        def add(name: str, content: bytes) -> None:
            if content != self.patiently(lambda: self.destination.read(name)):
                files[name] = content

        for name in self.patiently(lambda: self.source.sizes(REJECTS_FOLDER)):
            if ledger_worker(name) is not None:
                path = f"{REJECTS_FOLDER}/{name}"
                add(path, self.patiently(lambda path=path: self._merged_rejects(path)))  # type: ignore[misc]
        counts = self.patiently(lambda: self.source.read(TOKEN_COUNTS_FILE))
        if counts is not None:
            if counted_shards(counts) == shards_fingerprint(state.entries):
                add(TOKEN_COUNTS_FILE, counts)
            else:
                message = (
                    f"{self.source.where(TOKEN_COUNTS_FILE)} was counted from other shards than are at "
                    f"{self.destination.url}, and was left: finish the dataset (eyas standardize), then run this again"
                )
                self.events.put(Noticed(message=message))
        if files:
            self.patiently(lambda: end.publish(files))

    def _merged_rejects(self, name: str) -> bytes:
        """The whole lines of both ends, those of the destination first, each once."""
        ends = (self.destination.read(name) or b"", self.source.read(name) or b"")
        lines = dict.fromkeys(line for content in ends for line in content.split(b"\n")[:-1] if line)
        return b"".join(line + b"\n" for line in lines)

    def _each(self, entries: list[SealedShard], work: Callable[[SealedShard], None]) -> None:
        """work() on every entry, by several threads, until told to stop. Raises what the first to fail raised."""
        todo: queue.SimpleQueue[SealedShard] = queue.SimpleQueue()
        for entry in entries:
            todo.put(entry)

        def loop() -> None:
            try:
                while not self._stopping.is_set():
                    try:
                        entry = todo.get_nowait()
                    except queue.Empty:
                        return
                    work(entry)
            except _Stopped:
                return
            except BaseException:
                self._stopping.set()
                raise

        with ThreadPoolExecutor(self._num_workers, thread_name_prefix="eyas-transfer") as pool:
            running = [pool.submit(loop) for _ in range(min(self._num_workers, len(entries)))]
        for future in running:
            future.result()

    def patiently(self, work: Callable[[], Result]) -> Result:
        """work(), again and again with pauses while its errors are of the kind that passes."""
        for attempt in range(1, _TRIES + 1):
            try:
                return work()
            except RemoteError as error:
                if not error.transient:
                    raise
                if self._stopping.is_set():
                    raise _Stopped from error
                if attempt == _TRIES:
                    raise RemoteError(
                        f"{error}. Given up after {_TRIES} tries; what is there stays: run the same command again",
                        transient=False,
                    ) from error
                pause = _PAUSE_SECONDS * 2 ** (attempt - 1)
                message = f"{error}: try {attempt} of {_TRIES}, again in {pause:.0f} s"
                self.events.put(Noticed(message=message))
                self._stopping.wait(pause)
        raise AssertionError("the last try raises or returns")


class _StoreEnd:
    """A destination behind a URL: shards are stored, and every so often the ledgers that name them."""

    def __init__(self, run: _Run) -> None:
        assert run.source.folder is not None  # one of the two ends is a local folder
        self._run, self._store, self._folder = run, run.destination, run.source.folder
        self._stored: list[SealedShard] = []  # and not in a ledger yet
        self._lock, self._publishing = threading.Lock(), threading.Lock()
        self._due = 0.0

    def begin(self, identity: DatasetIdentity) -> None:
        patiently, store = self._run.patiently, self._store
        if patiently(lambda: store.read(IDENTITY_FILE)) is None:
            content = self._run.source.read(IDENTITY_FILE) or b""
            patiently(lambda: store.publish({IDENTITY_FILE: content}))
            patiently(lambda: _match(self._run.source, store))  # of two that began at once, one sees the other's

    def put(self, entry: SealedShard, blocks: Iterator[bytes]) -> None:
        self._store.put_shard(entry, self._folder / SHARDS_FOLDER / entry.shard, blocks)
        with self._lock:
            self._stored.append(entry)
        if time.monotonic() >= self._due and self._publishing.acquire(blocking=False):
            try:
                self._publish()
            finally:
                self._publishing.release()

    def flush(self) -> None:
        with self._publishing:
            self._publish()

    def publish(self, files: dict[str, bytes]) -> None:
        self._store.publish(files)

    def _publish(self) -> None:
        """Write the ledgers anew, with the shards stored since. What others wrote into them meanwhile stays."""
        with self._lock:
            entries, self._stored = self._stored, []
        if not entries:
            return
        started = time.monotonic()
        try:
            self._run.patiently(lambda: self._write_ledgers(entries))
        except BaseException:
            with self._lock:
                self._stored += entries
            raise
        now = time.monotonic()
        # A ledger is written as a whole, and may be large: at most a tenth of the time goes into that.
        self._due = now + max(self._store.publish_seconds, 10 * (now - started))
        for entry in entries:
            self._run.events.put(Placed(shard=entry))

    def _write_ledgers(self, entries: list[SealedShard]) -> None:
        files = {}
        for worker in sorted({_worker(entry) for entry in entries}):
            name = f"{LEDGER_FOLDER}/{worker}.jsonl"
            lines, _ = parse_ledger(self._store.read(name) or b"", worker, self._store.where(name))
            by_name = {line.shard: line for line in lines}
            by_name |= {entry.shard: entry for entry in entries if _worker(entry) == worker}
            files[name] = b"".join(map(format_line, sorted(by_name.values(), key=lambda e: (len(e.shard), e.shard))))
        self._store.publish(files, [entry.shard for entry in entries])


class _FolderEnd:
    """A destination that is a local folder, held by this run: written as a capture writes it."""

    def __init__(self, run: _Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._ledgers: dict[str, WorkerLedger] = {}
        self._lock = threading.Lock()
        self._named: set[str] = set()  # shards that this run has put; a ledger takes one line of each
        self._stack = ExitStack()

    def __enter__(self) -> _FolderEnd:
        self._stack.enter_context(lock_dataset(self._folder))
        return self

    def __exit__(self, *exc: object) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._stack.close()

    def begin(self, identity: DatasetIdentity) -> None:
        create_or_match(self._folder, identity)
        rejects = self._folder / REJECTS_FOLDER
        if rejects.is_dir():
            remove_temporaries(rejects)  # a capture writes none there
        for problem in recover(self._folder, identity):
            self._run.events.put(Noticed(message=f"{self._folder}/{problem}"))
        self._named = {entry.shard for entry in read_ledgers(self._folder).entries}

    def put(self, entry: SealedShard, blocks: Iterator[bytes]) -> None:
        path = self._folder / SHARDS_FOLDER / entry.shard
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{entry.shard}")
        where = self._run.source.where(f"{SHARDS_FOLDER}/{entry.shard}")
        try:
            try:
                with open(temporary, "wb") as file:
                    for block in proven(blocks, entry, where):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fsync_folder(path.parent)
            with self._lock:
                if entry.shard not in self._named:
                    self._ledger(_worker(entry)).append(entry)
                    self._named.add(entry.shard)
        except OSError as error:
            cause = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "cannot write"
            raise ShardWriteError(
                f"{path}: {cause} ({error.strerror}). What came before is whole: mend it (space, permissions, limits) "
                f"and run the same command again, which goes on from there"
            ) from error
        self._run.events.put(Placed(shard=entry))

    def flush(self) -> None:
        """Each shard counts from its ledger line on, which put() has written."""

    def publish(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            publish(path, content)

    def _ledger(self, worker: str) -> WorkerLedger:
        if worker not in self._ledgers:
            self._ledgers[worker] = WorkerLedger(self._folder, worker)
        return self._ledgers[worker]


def _check_space(folder: Path, plan: Plan) -> None:
    free = shutil.disk_usage(folder).free
    if plan.num_bytes > free:
        raise EyasError(
            f"{folder}: {plan.num_bytes:,} bytes are to come and the disk has {free:,} left: make room, or give a "
            f"folder on another disk"
        )


def _worker(entry: SealedShard) -> str:
    return entry.shard.rpartition("-")[0]
