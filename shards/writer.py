"""Writes samples into shards: buffered in memory, sealed by background threads.

A seal is: temporary name, write, fsync, rename, fsync of the folder, then the ledger line, fsynced. A crash at any
instant loses only what was not sealed, and leaves nothing that counts as done.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, start_writeback
from eyas.shards.codec import CODECS, Encoder
from eyas.shards.errors import ShardError, ShardWriteError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.layout import ITEMSIZE_BYTES, TensorSpec, build_header, in_file_order, shard_metadata, tensor_specs
from eyas.shards.ledger import SHARDS_FOLDER, SealedShard, WorkerLedger
from eyas.shards.sample import Sample, sample_id
from eyas.shards.statistics import summarize, tap_statistics
from eyas.shards.validate import validate

if TYPE_CHECKING:
    from torch import Tensor

_WRITE_BYTES = 1 << 20  # hashed and written while in cache
_WRITEBACK_BYTES = 16 << 20  # on their way to the disk while the next are hashed
# One thread hands a file system about 1.5 GB/s, and encodes and writes in turn; two keep up with an H200.
SEALS_AT_ONCE = 2


class ShardWriter:
    """Writes the shards of one worker. Use as a context manager: a clean exit closes, an exception aborts.

    Holds the worker's name exclusively (HeldError otherwise). Memory: the shard that fills, ``seals_at_once`` being
    sealed, and one sample. Codec zstd encodes samples as they come, and lets go of each when it is.

    metadata: strings of the engine (build, tensor-parallel size, host, ...), kept in each shard. verify: each shard is
    read back and validated before it gets its name. lazy: where their statistics are not given, they are computed when
    the shard is sealed and not before, and codec raw reads a sample no earlier than that; for tensors that are mapped
    from files, which then are never in memory twice.
    """

    def __init__(
        self,
        dataset: Path,
        *,
        identity: DatasetIdentity,
        worker: str,
        shard_bytes: int = 1 << 30,
        codec_threads: int = 1,
        metadata: Mapping[str, str],
        verify: bool = False,
        seals_at_once: int = SEALS_AT_ONCE,
        lazy: bool = False,
    ) -> None:
        if shard_bytes < 1 or codec_threads < 1:
            raise ValueError(f"shard_bytes {shard_bytes} and codec_threads {codec_threads} must be at least 1")
        self._identity = identity
        self._shard_bytes = shard_bytes
        self._metadata = dict(metadata)
        self._verify = verify
        self._seals_at_once = seals_at_once
        self._lazy = lazy
        self._folder = dataset / SHARDS_FOLDER
        self._ledger = WorkerLedger(dataset, worker)
        self._codec_pool = ThreadPoolExecutor(codec_threads, thread_name_prefix="eyas-codec")
        self._sealers = ThreadPoolExecutor(seals_at_once, thread_name_prefix="eyas-seal")
        self._sealing: deque[Future[SealedShard]] = deque()
        self._next = self._new_filling()
        self._closed = False

    def add(self, sample: Sample, statistics: Tensor | None = None) -> list[SealedShard]:
        """Take one sample; returns the shards that became durable since the last call.

        The sample's tensors are kept, not copied: do not write into them afterwards. statistics: [A, 4], or [A+1, 4]
        with last_hidden's row last, as tap_statistics gives it; computed here where not given. Raises ValueError for
        a sample that does not fit the dataset's identity, ShardWriteError where an earlier shard could not be written
        (the writer is of no more use then: leave it).
        """
        self._check(sample)
        sealed: list[SealedShard] = []
        num_bytes = sum(tensor.nbytes for tensor in _tensors(sample).values())
        if self._next.sample_ids and self._next.num_bytes + num_bytes > self._shard_bytes:
            sealed += self._seal_next()
        if sample.sample_id in self._next.sample_ids:
            raise ValueError(f"sample {sample.sample_id} is in this shard already")
        totals = None if statistics is None else statistics.cpu()  # [A, 4] or [A+1, 4]
        if totals is None and not self._lazy:
            totals = self._statistics(sample)
        if totals is not None and totals.shape != (len(self._tap_names()), 4):
            raise ValueError(f"statistics {list(totals.shape)}: expected [{len(self._tap_names())}, 4]")
        self._next.add(sample, totals, num_bytes)
        if self._next.num_bytes >= self._shard_bytes:
            sealed += self._seal_next()
        while self._sealing and self._sealing[0].done():
            sealed += self._wait(until=len(self._sealing) - 1)
        return sealed

    def close(self) -> list[SealedShard]:
        """Seal what is left, wait until it is durable, and give the worker name back."""
        if self._closed:
            return []
        try:
            sealed = self._seal_next() if self._next.sample_ids else []
            return sealed + self._wait(until=0)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what is not sealed. Shards that are being sealed are finished first."""
        if self._closed:
            return
        self._closed = True
        self._next = self._new_filling()
        self._sealers.shutdown(wait=True)
        self._codec_pool.shutdown(wait=True, cancel_futures=True)
        self._sealing.clear()
        self._ledger.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    def _check(self, sample: Sample) -> None:
        """Refuse what a shard of this dataset cannot hold."""
        import torch

        identity, num_tokens = self._identity, sample.num_tokens
        dtype = getattr(torch, identity.dtype)
        expected = {
            "input_ids": (torch.int32, (num_tokens,)),
            "loss_mask": (torch.uint8, (num_tokens,)),
            **{name: (dtype, (num_tokens, width)) for name, width in identity.wide_tensors.items()},
        }
        if identity.target_statistics:
            expected["target_top1"] = torch.int32, (num_tokens,)
            expected["target_lse"] = torch.float32, (num_tokens,)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _tensors(sample).items()}
        if found != expected or num_tokens < 1:
            raise ValueError(f"sample {sample.sample_id}: tensors are {found}, this dataset's are {expected}")
        if sample_id(sample.input_ids.numpy(), sample.loss_mask.numpy()) != sample.sample_id:
            raise ValueError(f"sample {sample.sample_id}: the id is not that of its tokens")

    def _statistics(self, sample: Sample) -> Tensor:
        import torch

        hidden_size = self._identity.hidden_size
        rows = [tap_statistics(sample.features.view(sample.num_tokens, -1, hidden_size))]
        if sample.last_hidden is not None:
            rows.append(tap_statistics(sample.last_hidden.unsqueeze(1)))
        return torch.cat(rows)

    def _new_filling(self) -> _Filling:
        codec = CODECS[self._identity.codec]
        return _Filling({name: codec.Encoder(name, self._codec_pool) for name in self._identity.wide_tensors})

    def _seal_next(self) -> list[SealedShard]:
        """Hand the filled shard to a sealing thread, once one is free."""
        sealed = self._wait(until=self._seals_at_once - 1)
        filled, self._next = self._next, self._new_filling()
        before = self._sealing[-1] if self._sealing else None
        self._sealing.append(self._sealers.submit(self._seal, filled, self._ledger.next_seq, before))
        self._ledger.next_seq += 1
        return sealed

    def _wait(self, *, until: int) -> list[SealedShard]:
        """Wait until no more than ``until`` shards are being sealed; returns the ones that became durable."""
        sealed = []
        while len(self._sealing) > until:
            sealed.append(self._sealing[0].result())  # stays where it raises: so does every later call
            self._sealing.popleft()
        return sealed

    def _seal(self, filled: _Filling, seq: int, before: Future[SealedShard] | None) -> SealedShard:
        """Make ``filled`` durable. Its ledger line follows that of the shard ``before``, however long that takes."""
        name = self._ledger.shard_name(seq)
        path, temporary = self._folder / name, self._folder / f"{TEMPORARY_PREFIX}{name}"
        totals = [self._statistics(known) if isinstance(known, Sample) else known for known in filled.statistics]
        stored = filled.stored()
        num_tokens = sum(filled.lengths)
        trained = [int(np.count_nonzero(mask)) for mask in filled.narrow["loss_mask"]]
        statistics = summarize(totals, self._tap_names(), num_tokens, self._identity.hidden_size)
        specs = _specs(tensor_specs(self._identity, len(filled.lengths), num_tokens), stored)
        metadata = shard_metadata(
            self._identity,
            sample_ids=list(filled.sample_ids),
            num_trained_tokens=trained,
            xxh3={tensor: _xxh3(stored[tensor]) for tensor in specs},
            statistics=statistics,
            engine=self._metadata,
            seconds=time.time() - filled.started_at,
        )
        pieces = [np.frombuffer(build_header(metadata, specs), np.uint8)]
        pieces += [piece for tensor in specs for piece in stored[tensor]]
        try:
            xxh3 = _write_new(temporary, pieces)
            sealed_at = time.time()
            shard = SealedShard(
                shard=name,
                num_bytes=sum(piece.size for piece in pieces),
                xxh3=xxh3,
                num_tokens=num_tokens,
                num_trained_tokens=sum(trained),
                sample_ids=tuple(filled.sample_ids),
                statistics=statistics,
                seconds=round(sealed_at - filled.started_at, 3),
                sealed_at=round(sealed_at, 3),
            )
            try:
                if self._verify:
                    validate(temporary, self._identity, shard)
                os.rename(temporary, path)
                fsync_folder(self._folder)
            except (OSError, ShardError):
                temporary.unlink(missing_ok=True)
                raise
            if before is not None:
                wait([before])
            self._ledger.append(shard)
        except OSError as error:
            cause = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "cannot write"
            raise ShardWriteError(
                f"{path}: {cause} ({error.strerror}). What was sealed before is whole: mend it (space, permissions, "
                f"limits) and run the same command again, which goes on from there"
            ) from error
        except ShardError as error:
            raise ShardWriteError(
                f"{path} does not read back as it was written ({error}): the disk or the memory is at fault. What was "
                f"sealed before is whole"
            ) from error
        return shard

    def _tap_names(self) -> list[str]:
        return [str(tap) for tap in self._identity.taps] + ["last_hidden"] * (self._identity.last_hidden is not None)


class _Filling:
    """The shard that is being filled."""

    def __init__(self, encoders: Mapping[str, Encoder]) -> None:
        self._encoders = encoders  # of the wide tensors
        self.narrow: dict[str, list[npt.NDArray[np.uint8]]] = {}  # the others: uint8 [T_n, row_bytes] of each sample
        self.lengths: list[int] = []
        self.statistics: list[Tensor | Sample] = []  # the sample, where they are still to be computed
        self.sample_ids: dict[str, None] = {}  # ordered
        self.num_bytes = 0
        self.started_at = 0.0

    def add(self, sample: Sample, statistics: Tensor | None, num_bytes: int) -> None:
        if not self.sample_ids:
            self.started_at = time.time()
        self.sample_ids[sample.sample_id] = None
        self.lengths.append(sample.num_tokens)
        self.statistics.append(sample if statistics is None else statistics)
        self.num_bytes += num_bytes
        for name, tensor in _tensors(sample).items():
            if name in self._encoders:
                self._encoders[name].add(_bytes(tensor))
            else:
                self.narrow.setdefault(name, []).append(_bytes(tensor))

    def stored(self) -> dict[str, list[npt.NDArray[np.uint8]]]:
        """The bytes of every tensor, in pieces. The wide ones of codec raw are the samples' own memory, and may have
        gaps between their rows."""
        stored = {"offsets": [np.concatenate([[0], np.cumsum(self.lengths)]).astype("<i8").view(np.uint8)]}
        stored |= {name: [np.concatenate(rows).reshape(-1)] for name, rows in self.narrow.items()}
        for encoder in self._encoders.values():
            stored |= encoder.finish()
        return stored


def _tensors(sample: Sample) -> dict[str, Tensor]:
    tensors = {
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
        "features": sample.features,
        "last_hidden": sample.last_hidden,
        "target_top1": sample.target_top1,
        "target_lse": sample.target_lse,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a CPU tensor [T] or [T, W] as uint8 [T, row_bytes]; copied only where a row has gaps in it."""
    import torch

    rows = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    view: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return view


def _specs(
    specs: Mapping[str, TensorSpec], stored: Mapping[str, Sequence[npt.NDArray[np.uint8]]]
) -> dict[str, TensorSpec]:
    """``specs`` in file order, with free sizes as the codec made them."""
    whole = {}
    for name in in_file_order(specs):
        num_bytes = sum(piece.size for piece in stored[name])
        spec = specs[name]
        if -1 in spec.shape:
            spec = TensorSpec(spec.dtype, (num_bytes // ITEMSIZE_BYTES[spec.dtype],))
        assert spec.num_bytes == num_bytes, (name, spec, num_bytes)
        whole[name] = spec
    return whole


def _xxh3(pieces: Sequence[npt.NDArray[np.uint8]]) -> str:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        for block in _blocks(piece):
            digest.update(block)
    return digest.hexdigest()


def _blocks(piece: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    """The bytes of ``piece`` in blocks that stay in cache; rows with gaps between them are copied together for it."""
    if piece.flags.c_contiguous:
        view = memoryview(piece.reshape(-1))  # type: ignore[arg-type]
        yield from (view[start : start + _WRITE_BYTES] for start in range(0, len(view), _WRITE_BYTES))
        return
    step = max(1, _WRITE_BYTES // piece.shape[1])
    block = np.empty((step, piece.shape[1]), np.uint8)
    for start in range(0, len(piece), step):
        rows = piece[start : start + step]
        block[: len(rows)] = rows
        yield memoryview(block[: len(rows)].reshape(-1))  # type: ignore[arg-type]


def _write_new(path: Path, pieces: Sequence[npt.NDArray[np.uint8]]) -> str:
    """Write and fsync a new file; returns its xxh3-64, taken from memory. On an error the file is removed."""
    digest = xxhash.xxh3_64()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        position = flushed = 0
        for piece in pieces:
            for block in _blocks(piece):
                digest.update(block)
                while block:
                    written = os.write(fd, block)
                    position, block = position + written, block[written:]
                if position - flushed >= _WRITEBACK_BYTES:
                    start_writeback(fd, flushed, position - flushed)
                    flushed = position
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return digest.hexdigest()
