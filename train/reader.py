"""Reads batches ahead of the training thread, which only ever waits on a queue.

    planner thread    takes the next batch's samples and a free staging buffer, hands each sample to the pool
    pool threads      copy (codec raw) or decode (zstd) a sample's rows from the mapped shard into the buffer
    transfer thread   batches in order: waits for its samples, copies the buffer to the device on a stream of its own,
                      gives the buffer back

Staging buffers are pinned on CUDA and reused: pinning costs more than the copy. Everything that is slow here (page
faults, memcpy, zstandard, waiting for an event) runs without the interpreter's lock.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.shards.dataset import Dataset, Shard
from eyas.shards.ledger import SHARDS_FOLDER
from eyas.train.batches import Batch
from eyas.train.samples import SampleTable
from eyas.train.ttt import ROW_MULTIPLE, loss_rows

Tag = TypeVar("Tag")

_BUFFERS = 4  # batches that are being filled or copied
_READY = 2  # batches that wait on the device
_MAPPED_SHARDS = 4096  # a mapping costs an address range and holds no file descriptor


def default_threads() -> int:
    """One a core that this rank has, at most 8: a thread copies about 4 GB/s and decodes 1 GB/s."""
    return max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@dataclass(frozen=True)
class Job(Generic[Tag]):
    """A batch to read: its samples (indexes into the table), and what the reader gives back beside the batch."""

    samples: npt.NDArray[np.int64]  # [n]
    tag: Tag


@dataclass(frozen=True)
class ReadBatch(Generic[Tag]):
    """A batch on the device, and what of it is known on the host."""

    tag: Tag
    batch: Batch
    rows: Tensor  # int64 [R], target rows that carry loss (train/ttt.py, loss_rows)
    num_rows: tuple[int, ...]  # [K], how many of them have a draft row at each TTT step


class _Buffer:
    """Room for one batch in host memory, seen by torch and as bytes by the threads that fill it."""

    def __init__(self, dataset: Dataset, num_rows: int, *, pinned: bool) -> None:
        identity = dataset.identity
        wide = getattr(torch, identity.dtype)

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, pin_memory=pinned)

        self.input_ids = room(torch.int64)
        self.loss_mask = room(torch.bool)
        self.document = room(torch.int32)
        self.position = room(torch.int64)
        self.features = room(wide, identity.features_width)
        self.last_hidden = room(wide, identity.hidden_size)
        self.target_top1 = room(torch.int64) if identity.target_statistics else None
        self.target_lse = room(torch.float32) if identity.target_statistics else None

    def put(self, shard: Shard, place: int, document: int, begin: int, end: int) -> None:
        """Rows begin:end: the first rows of a sample."""
        sample = shard.sample(place, slice(0, end - begin))
        assert sample.last_hidden is not None
        _copy(self.features[begin:end], sample.features)
        _copy(self.last_hidden[begin:end], sample.last_hidden)
        self.input_ids.numpy()[begin:end] = sample.input_ids.numpy()
        self.loss_mask.numpy()[begin:end] = sample.loss_mask.numpy() != 0
        self.document.numpy()[begin:end] = document
        self.position.numpy()[begin:end] = np.arange(end - begin)
        if self.target_top1 is not None and self.target_lse is not None:
            assert sample.target_top1 is not None
            assert sample.target_lse is not None
            self.target_top1.numpy()[begin:end] = sample.target_top1.numpy()
            self.target_lse.numpy()[begin:end] = sample.target_lse.numpy()

    def pad(self, begin: int) -> None:
        """All rows from ``begin`` on become padding."""
        for tensor in (self.input_ids, self.loss_mask, self.position, self.features, self.last_hidden):
            tensor[begin:].zero_()
        self.document[begin:] = -1
        if self.target_top1 is not None and self.target_lse is not None:
            self.target_top1[begin:] = -1
            self.target_lse[begin:] = float("nan")


class BatchReader(Generic[Tag]):
    """Iterates over ReadBatch in the order of ``jobs``; a context that ends its threads.

    ``num_rows``: rows of a batch at most; a longer sample is cut to its first so many. ``fixed``: every batch has
    exactly so many rows, the last of them padding. Features and last hidden states come in ``dtype`` on ``device``.
    Iterating raises what reading raised (ShardError for a damaged shard).
    """

    def __init__(
        self,
        dataset: Dataset,
        table: SampleTable,
        jobs: Iterable[Job[Tag]],
        *,
        num_rows: int,
        fixed: bool,
        device: torch.device,
        dtype: torch.dtype,
        num_steps: int,
        threads: int,
    ) -> None:
        self.wait_seconds = 0.0  # that the training thread spent in next(), in all
        self._dataset, self._table, self._jobs = dataset, table, iter(jobs)
        self._num_rows, self._fixed = num_rows, fixed
        self._device, self._dtype, self._num_steps = device, dtype, num_steps
        self._closed = threading.Event()
        self._buffers: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put(None)  # made when first needed
        self._ready_permits = threading.Semaphore(_READY)
        self._batches: queue.SimpleQueue[Future[ReadBatch[Tag] | None]] = queue.SimpleQueue()
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._shards_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="eyas-read")
        self._transfer = self._one_thread("eyas-transfer")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._planner = self._one_thread("eyas-plan")
        # At the end of the jobs, or with what was raised, the planner's own future is the last one in the queue.
        self._planner.submit(self._plan).add_done_callback(self._batches.put)

    def __enter__(self) -> BatchReader[Tag]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ReadBatch[Tag]]:
        return self

    def __next__(self) -> ReadBatch[Tag]:
        started = time.perf_counter()
        future = self._batches.get()
        item = future.result()
        self.wait_seconds += time.perf_counter() - started
        if item is None:
            self._batches.put(future)  # so that asking again gives the same answer
            raise StopIteration
        self._ready_permits.release()
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for value in (item.rows, *vars(item.batch).values()):
                if isinstance(value, Tensor):
                    value.record_stream(stream)  # its memory is not another copy's before this stream is done with it
        return item

    def close(self) -> None:
        """End the threads; what was read ahead is dropped."""
        self._closed.set()
        self._buffers.put(None)
        self._ready_permits.release(_BUFFERS + _READY)
        for pool in (self._planner, self._transfer, self._pool):
            pool.shutdown()

    def _one_thread(self, name: str) -> ThreadPoolExecutor:
        """Of this rank's GPU: a thread begins on the first one, and would take memory there."""
        if self._device.type != "cuda":
            return ThreadPoolExecutor(1, name)
        return ThreadPoolExecutor(1, name, initializer=torch.cuda.set_device, initargs=(self._device,))

    def _plan(self) -> ReadBatch[Tag] | None:
        for job in self._jobs:
            buffer = self._buffers.get()
            if self._closed.is_set():
                return None
            self._start(job, buffer or _Buffer(self._dataset, self._num_rows, pinned=self._device.type == "cuda"))
        return None

    def _start(self, job: Job[Tag], buffer: _Buffer) -> None:
        """Hand each sample of ``job`` to the pool, and the whole to the transfer thread."""
        lengths = np.minimum(self._table.lengths[job.samples], self._num_rows)  # [n]
        ends = np.cumsum(lengths)
        places = zip(job.samples.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True)
        parts = [
            self._pool.submit(self._read, buffer, sample, document, begin, end)
            for document, (sample, begin, end) in enumerate(places)
        ]
        num_tokens = int(ends[-1])
        assert num_tokens <= self._num_rows
        if self._fixed:
            buffer.pad(num_tokens)
        self._batches.put(self._transfer.submit(self._deliver, job.tag, buffer, num_tokens, parts))

    def _read(self, buffer: _Buffer, sample: int, document: int, begin: int, end: int) -> None:
        if not self._closed.is_set():
            shard = self._shard(int(self._table.shards[sample]))
            buffer.put(shard, int(self._table.places[sample]), document, begin, end)

    def _shard(self, index: int) -> Shard:
        with self._shards_lock:
            if index in self._shards:
                self._shards.move_to_end(index)
                return self._shards[index]
        entry = self._dataset.ledgers.entries[index]
        # Outside the lock: two threads may both open it, which costs a header.
        shard = Shard(self._dataset.path / SHARDS_FOLDER / entry.shard, self._dataset.identity, entry)
        with self._shards_lock:
            self._shards[index] = shard
            while len(self._shards) > _MAPPED_SHARDS:
                self._shards.popitem(last=False)
        return shard

    def _deliver(self, tag: Tag, buffer: _Buffer, num_tokens: int, parts: list[Future[None]]) -> ReadBatch[Tag] | None:
        """The batch on the device; the buffer is free afterwards. None once the reader is closed."""
        for part in parts:
            part.result()
        self._ready_permits.acquire()
        if self._closed.is_set():
            return None
        num_rows = self._num_rows if self._fixed else num_tokens
        multiple = ROW_MULTIPLE if self._device.type == "cuda" else 1
        rows = loss_rows(buffer.loss_mask[:num_rows], buffer.document[:num_rows], multiple=multiple)  # [R]
        position = buffer.position[rows[rows >= 0]]
        counts = tuple(int((position > k).sum()) for k in range(self._num_steps))

        def move(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            moved = tensor[:num_rows].to(self._device, non_blocking=True, copy=True)
            return moved if dtype is None else moved.to(dtype)

        with torch.cuda.stream(self._stream):  # None: does nothing
            batch = Batch(
                input_ids=move(buffer.input_ids),
                loss_mask=move(buffer.loss_mask),
                document=move(buffer.document),
                position=move(buffer.position),
                features=move(buffer.features, self._dtype),
                last_hidden=move(buffer.last_hidden, self._dtype),
                target_top1=None if buffer.target_top1 is None else move(buffer.target_top1),
                target_lse=None if buffer.target_lse is None else move(buffer.target_lse),
                num_tokens=num_tokens,
            )
            moved_rows = rows.to(self._device)
        if self._stream is not None:
            self._stream.synchronize()  # in this thread, without the interpreter's lock
        self._buffers.put(buffer)
        return ReadBatch(tag, batch, moved_rows, counts)


def _copy(target: Tensor, source: Tensor) -> None:
    """Bytes, by numpy: without the interpreter lock, and without a team of torch threads for each of ours."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
