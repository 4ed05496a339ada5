"""The cat for one draft: a captured dataset becomes a standard one.

The standard dataset holds exactly the draft's taps in ascending depth, one dtype and codec, and every shard has been
verified. Where a captured shard already is that, it is hard-linked (copied across filesystems) under its own name;
else its samples go, one by one, through a writer, which names shards after this run's workers.

What is done is a set of sample ids, as everywhere: after any kill the same command goes on, whatever the number of
workers, and each sample is there exactly once. The captured dataset is opened for reading only.

Threads, not processes: all that takes time here (reading, copying, casting, xxh3, zstandard) releases the
interpreter's lock, and no orphan can outlive a killed run and go on writing.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from eyas.shards.dataset import Shard
from eyas.shards.errors import ShardError, ShardWriteError
from eyas.shards.identity import create_or_match
from eyas.shards.ledger import SHARDS_FOLDER, SealedShard, WorkerLedger, lock_dataset, read_ledgers, recover
from eyas.shards.rejects import append_reject, read_rejects
from eyas.shards.sample import Sample
from eyas.shards.validate import validate
from eyas.shards.writer import ShardWriter
from eyas.standardize.canaries import carry_canaries
from eyas.standardize.convert import Converter
from eyas.standardize.count import count_tokens
from eyas.standardize.events import Advanced, Event, Failed, Noticed, Planned, Sealed, Summary
from eyas.standardize.place import place
from eyas.standardize.plan import Plan, Request, Task, plan

_POLL_SECONDS = 0.2


def standardize(
    request: Request, *, workers: int, shard_bytes: int, should_stop: Callable[[], bool]
) -> Iterator[Event]:
    """Do it; the last event is the Summary.

    ``should_stop`` is asked often; once true, what is complete is sealed and the run ends early. Each of ``workers``
    threads that writes holds up to two shards of ``shard_bytes`` in memory. Raises EyasError and OSError: what is
    sealed stays, and the same call goes on from there.
    """
    out = request.out
    with lock_dataset(out):
        create_or_match(out, request.identity)
        for problem in recover(out, request.identity):
            yield Noticed(message=f"{out}/{problem}")
        for problem in read_ledgers(request.source).problems:
            if problem.kind in ("torn line", "shard without line", "duplicate sample"):
                yield Noticed(message=f"{request.source}/{problem}")
        summary = Summary()
        while True:
            todo = plan(request, without=summary.failures)
            yield Planned(plan=todo)
            if not todo.tasks:
                break
            if should_stop():
                summary.stopped_early = True
                break
            for event in _Pass(request, todo, workers=workers, shard_bytes=shard_bytes).events(should_stop):
                if isinstance(event, Sealed):
                    summary.num_linked += event.how == "linked"
                    summary.num_copied += event.how == "copied"
                    summary.num_written += event.how == "written"
                elif isinstance(event, Failed):
                    summary.failures[event.shard] = event.reason
                yield event
        if not summary.stopped_early:
            _carry_rejects(request)
            for message in carry_canaries(request):
                yield Noticed(message=message)
            summary.stopped_early = not (
                yield from count_tokens(out, request.identity.target.vocab_size, workers, should_stop)
            )
        _add_up(request, summary)
    yield summary


def _add_up(request: Request, summary: Summary) -> None:
    """Fill in what out holds now, and fail for captured samples that the ledgers alone show to be lost."""
    captured, state = read_ledgers(request.source), read_ledgers(request.out)
    summary.num_samples, summary.num_tokens = state.num_samples, state.num_tokens
    summary.num_bytes, summary.num_shards = state.num_bytes, len(state.entries)
    summary.num_trained_tokens = state.num_trained_tokens
    summary.num_rejected = len(read_rejects(request.source, captured))
    missing = request.identity.prepared.num_samples - state.num_samples - summary.num_rejected
    summary.num_missing = max(missing, 0)
    # Where nothing is missing, whoever removed captured shards had them standardized before.
    for problem in captured.problems if summary.num_missing else ():
        if problem.kind in ("line without shard", "size differs"):
            summary.failures[problem.where.rpartition("/")[2]] = str(problem)


def _carry_rejects(request: Request) -> None:
    """Note in out which samples the capture rejected, and why they are not there."""
    known = read_rejects(request.out)
    for sample_id, reason in read_rejects(request.source).items():
        if known.get(sample_id) != reason:
            append_reject(request.out, "captured", sample_id, reason)


class _Pass:
    """One pass over a plan's tasks by several threads, each with a writer of its own."""

    def __init__(self, request: Request, todo: Plan, *, workers: int, shard_bytes: int) -> None:
        self._request = request
        self._num_workers = min(workers, len(todo.tasks))
        self._shard_bytes = shard_bytes
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in todo.tasks:
            self._tasks.put(task)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._converter = Converter(request.source_identity, request.identity)
        # Linked shards keep their names, so no writer may use a name that a captured shard has.
        self._prefix = f"{socket.gethostname()}-standard"
        while any(task.entry.shard.startswith(f"{self._prefix}-") for task in todo.tasks):
            self._prefix += "-again"
        self._ledgers: dict[str, WorkerLedger] = {}  # of linked shards, by the captured worker's name
        self._ledgers_lock = threading.Lock()

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Do the work. Raises what the first thread to fail raised; the others seal what they have."""
        with ExitStack() as stack:
            stack.callback(self._close_ledgers)
            pool = stack.enter_context(ThreadPoolExecutor(self._num_workers))
            stack.callback(self._stop.set)  # the pool waits for its threads
            running = [pool.submit(self._work, rank) for rank in range(self._num_workers)]
            num_running = self._num_workers
            while num_running:
                if should_stop():
                    self._stop.set()
                with suppress(queue.Empty):
                    event = self._events.get(timeout=_POLL_SECONDS)
                    if event is None:
                        num_running -= 1
                    else:
                        yield event
            for future in running:
                future.result()

    def _work(self, rank: int) -> None:
        try:
            with _Writer(self._request, worker=f"{self._prefix}-{rank}", shard_bytes=self._shard_bytes) as writer:
                while not self._stop.is_set():
                    try:
                        task = self._tasks.get_nowait()
                    except queue.Empty:
                        break
                    try:
                        if task.link:
                            self._link(task.entry)
                        else:
                            self._rewrite(task, writer)
                    except ShardError as error:
                        self._events.put(Failed(shard=task.entry.shard, reason=str(error)))
                self._sealed(writer.close())
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._events.put(None)  # this thread ends, and nothing of it follows

    def _link(self, entry: SealedShard) -> None:
        folder = self._request.out / SHARDS_FOLDER
        started = time.time()
        try:
            how = place(self._source_path(entry), folder, self._request.identity, entry)
            now = time.time()
            entry = replace(entry, seconds=round(now - started, 3), sealed_at=round(now, 3))
            with self._ledgers_lock:
                worker = entry.shard.rpartition("-")[0]
                if worker not in self._ledgers:
                    self._ledgers[worker] = WorkerLedger(self._request.out, worker)
                self._ledgers[worker].append(entry)
        except OSError as error:
            raise ShardWriteError(
                f"{folder / entry.shard}: cannot write ({error.strerror}). What was sealed before is whole: mend it "
                f"(space, permissions, limits) and run the same command again, which goes on from there"
            ) from error
        self._events.put(Sealed(shard=entry, how=how))
        self._events.put(Advanced(num_tokens=entry.num_tokens))

    def _rewrite(self, task: Task, writer: _Writer) -> None:
        path = self._source_path(task.entry)
        try:
            validate(path, self._request.source_identity, task.entry)
        except OSError as error:
            raise ShardError(path, None, f"unreadable ({error.strerror})") from error
        shard = Shard(path, self._request.source_identity, task.entry)
        for n, sample_id in enumerate(shard.sample_ids):
            if self._stop.is_set():
                return  # the rest is in no ledger of out, so the next run does it
            sample = shard.sample(n)
            if sample_id in task.missing:
                converted = self._converter.convert(sample, where=str(path))
                self._sealed(writer.add(converted, shard.metadata.engine))
            self._events.put(Advanced(num_tokens=sample.num_tokens))

    def _sealed(self, entries: list[SealedShard]) -> None:
        for entry in entries:
            self._events.put(Sealed(shard=entry, how="written"))

    def _source_path(self, entry: SealedShard) -> Path:
        return self._request.source / SHARDS_FOLDER / entry.shard

    def _close_ledgers(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()


class _Writer:
    """The shards of one thread.

    A shard's metadata says which engine captured it, so samples of differing engines go into differing shards.
    """

    def __init__(self, request: Request, *, worker: str, shard_bytes: int) -> None:
        self._request = request
        self._worker = worker
        self._shard_bytes = shard_bytes
        self._engine: dict[str, str] = {}
        self._writer: ShardWriter | None = None

    def add(self, sample: Sample, engine: dict[str, str]) -> list[SealedShard]:
        """Take one sample; returns the shards that became durable."""
        closed = self.close() if engine != self._engine else []
        if self._writer is None:
            self._engine = engine
            self._writer = ShardWriter(
                self._request.out,
                identity=self._request.identity,
                worker=self._worker,
                shard_bytes=self._shard_bytes,
                metadata=engine,
                verify=True,
            )
        return closed + self._writer.add(sample)

    def close(self) -> list[SealedShard]:
        """Seal what is left; returns what became durable."""
        writer, self._writer = self._writer, None
        return writer.close() if writer is not None else []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()
