"""Reads a dataset: samples by id, shard by shard, or all of them, as torch tensors.

Opening one imports no torch: the ledgers answer how much is there.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.shards.codec import CODECS
from eyas.shards.errors import ShardError
from eyas.shards.identity import DatasetIdentity, read_identity
from eyas.shards.layout import ShardMetadata, check_header, read_header
from eyas.shards.ledger import SHARDS_FOLDER, LedgerState, Problem, SealedShard, read_ledgers
from eyas.shards.sample import Sample, parse_sample_ids
from eyas.shards.validate import check_codec, check_offsets, map_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OPEN_SHARDS = 16  # kept mapped for random access; opening one again costs its header


class Shard:
    """One shard, memory-mapped: what is not touched is not read.

    Opening proves its header, offsets and frames; the bytes of the tensors are proven by validate(). Raises
    ShardError. Tensors of codec raw are views of the mapping (private: writing into them changes no file).
    """

    def __init__(self, path: Path, identity: DatasetIdentity, entry: SealedShard | None = None) -> None:
        header = read_header(path)
        self.path = path
        self.metadata: ShardMetadata = check_header(path, header, identity)
        if entry is not None and (header.num_bytes, self.metadata.sample_ids) != (entry.num_bytes, entry.sample_ids):
            raise ShardError(path, None, "its size or its sample ids are not what its ledger line says")
        self._identity = identity
        self.mapped, self._tensors = map_tensors(path, header)
        self._offsets = check_offsets(path, self._tensors, self.metadata)
        check_codec(path, self._tensors, self._offsets, identity)

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return self.metadata.sample_ids

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 [N+1]: sample n is rows offsets[n]:offsets[n+1]."""
        return self._offsets

    def __len__(self) -> int:
        return len(self.sample_ids)

    def sample(self, n: int, rows: slice | None = None) -> Sample:
        """Sample n (from 0), or a window of its rows (start and stop within it, step 1): only its bytes are read."""
        import torch

        if not 0 <= n < len(self):
            raise IndexError(f"{self.path.name} holds {len(self)} samples, asked for {n}")
        begin, end = self._offsets[n : n + 2].tolist()
        start, stop, step = (rows or slice(None)).indices(end - begin)
        if step != 1:
            raise ValueError(f"a window of rows has step 1, not {step}")
        stop = max(start, stop)
        optional = self._identity.target_statistics
        return Sample(
            sample_id=self.sample_ids[n],
            input_ids=self._narrow("input_ids", torch.int32, begin + start, begin + stop),
            loss_mask=self._narrow("loss_mask", torch.uint8, begin + start, begin + stop),
            features=self._wide("features", n, slice(start, stop)),
            last_hidden=None
            if self._identity.last_hidden is None
            else self._wide("last_hidden", n, slice(start, stop)),
            target_top1=self._narrow("target_top1", torch.int32, begin + start, begin + stop) if optional else None,
            target_lse=self._narrow("target_lse", torch.float32, begin + start, begin + stop) if optional else None,
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(n) for n in range(len(self)))

    def _narrow(self, name: str, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Rows begin:end of the shard's vector ``name``: [end - begin]."""
        import torch

        size = dtype.itemsize
        return torch.from_numpy(self._tensors[name][begin * size : end * size]).view(dtype)

    def _wide(self, name: str, n: int, rows: slice) -> Tensor:
        """Rows of sample n: [rows, W] in the dataset's dtype."""
        import torch

        row_bytes = self._identity.wide_tensors[name] * self._identity.itemsize_bytes
        codec = CODECS[self._identity.codec]
        try:
            content = codec.decode(name, self._tensors, self._offsets, row_bytes, n, rows)  # uint8 [rows, row_bytes]
        except ValueError as error:
            raise ShardError(self.path, name, f"sample {self.sample_ids[n]}: {error}") from error
        dtype: torch.dtype = getattr(torch, self._identity.dtype)
        return torch.from_numpy(content).view(dtype)


def _give_back(mapped: npt.NDArray[np.uint8]) -> None:
    """Drop the pages of a mapping from this process's memory; what is touched again is mapped again."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes), mmap.MADV_DONTNEED)


class Dataset:
    """A dataset folder, opened for reading. Opens no shard before a sample of it is asked for.

    Several threads may read at once.
    """

    def __init__(self, path: Path, identity: DatasetIdentity, ledgers: LedgerState) -> None:
        self.path, self.identity, self.ledgers = path, identity, ledgers
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Read dataset.json and the ledgers. Raises IdentityError.

        What the ledgers say and is not there, or the other way round, is in ``problems`` and left out.
        """
        return cls(Path(path), read_identity(Path(path)), read_ledgers(Path(path)))

    @property
    def num_samples(self) -> int:
        """Distinct samples."""
        return self.ledgers.num_samples

    @property
    def num_tokens(self) -> int:
        return self.ledgers.num_tokens

    @property
    def shards(self) -> list[str]:
        """File names, by worker and sequence number."""
        return [entry.shard for entry in self.ledgers.entries]

    @property
    def problems(self) -> list[Problem]:
        return self.ledgers.problems

    def __len__(self) -> int:
        return self.num_samples

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.ledgers

    def __iter__(self) -> Iterator[Sample]:
        return self.iter_samples()

    def __reduce__(self) -> tuple[object, ...]:
        return Dataset, (self.path, self.identity, self.ledgers)  # a loader's worker process maps shards itself

    def shard(self, index: int) -> Shard:
        """The shard named ``shards[index]``. Raises ShardError."""
        with self._lock:
            shard = self._open.get(index)
            if shard is not None:
                self._open.move_to_end(index)
                return shard
        entry = self.ledgers.entries[index]
        shard = Shard(self.path / SHARDS_FOLDER / entry.shard, self.identity, entry)
        with self._lock:
            self._open[index] = shard
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return shard

    def give_back(self) -> None:
        """Drop what was read of the open shards from this process's memory. Samples that were given out stay good, but
        for what was written into them."""
        with self._lock:
            shards = list(self._open.values())
        for shard in shards:
            _give_back(shard.mapped)

    def iter_shards(self) -> Iterator[Shard]:
        return (self.shard(index) for index in range(len(self.ledgers.entries)))

    def sample_ids(self) -> list[str]:
        """Every sample once, in the order of iter_samples()."""
        ids, shards, places = self._index
        return [f"{sample_id:016x}" for sample_id in ids[np.lexsort((places, shards))].tolist()]

    def iter_samples(self) -> Iterator[Sample]:
        """Every sample once, shard by shard."""
        _, shards, places = self._index
        chosen = np.lexsort((places, shards))
        for shard, n in zip(shards[chosen].tolist(), places[chosen].tolist(), strict=True):
            yield self.shard(shard).sample(n)

    def locate(self, sample_id: str) -> tuple[int, int]:
        """(index of the shard, place in it) of a sample. Raises KeyError."""
        ids, shards, places = self._index
        wanted = parse_sample_ids([sample_id])[0]
        at = int(np.searchsorted(ids, wanted))
        if at == len(ids) or ids[at] != wanted:
            raise KeyError(f"{self.path}: no sample {sample_id}")
        return int(shards[at]), int(places[at])

    def sample(self, sample_id: str) -> Sample:
        """One sample by its id; reads only its bytes. Raises KeyError, ShardError."""
        shard, n = self.locate(sample_id)
        return self.shard(shard).sample(n)

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Distinct ids ascending, with each one's shard and place in it (the first, where it is there twice)."""
        entries = self.ledgers.entries
        counts = [len(entry.sample_ids) for entry in entries]
        stored = self.ledgers.stored_ids
        order = np.argsort(stored, kind="stable")
        ids = self.ledgers.sample_ids()
        first = order[np.searchsorted(stored, ids, sorter=order)]  # of a repeated id, where it stands first
        starts = np.concatenate([[0], np.cumsum(counts)])
        shards = np.searchsorted(starts, first, side="right") - 1
        return ids, shards.astype(np.int32), (first - starts[shards]).astype(np.int32)


def open_dataset(path: str | Path) -> Dataset:
    """Open a dataset folder for reading: ``for sample in open_dataset("kimi-k25"): sample.features``."""
    return Dataset.open(path)
