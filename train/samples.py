"""The samples of a dataset as arrays: where each one is and how long. 1.4 M samples take 40 MB.

Lengths stand in the shards, not in the ledgers, so the first start of a run opens each shard's header once and keeps
the result in the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.dataset import Dataset
from eyas.shards.layout import check_header, read_header
from eyas.shards.ledger import SHARDS_FOLDER

SAMPLES_FILE = "samples.safetensors"
_THREADS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTable:
    """N distinct samples in ascending order of their ids, so that no order of shards or workers shows in it."""

    ids: npt.NDArray[np.uint64]  # [N] ascending
    shards: npt.NDArray[np.int32]  # [N] index into Dataset.shards
    places: npt.NDArray[np.int32]  # [N] within the shard
    lengths: npt.NDArray[np.int32]  # [N] tokens

    def __len__(self) -> int:
        return len(self.ids)

    def save(self, path: Path) -> None:
        """Write ``path`` in one step."""
        from safetensors.numpy import save

        publish(path, save({name: getattr(self, name) for name in _COLUMNS}))

    @classmethod
    def load(cls, path: Path) -> SampleTable:
        """Read what save() wrote."""
        from safetensors.numpy import load_file

        return cls(**load_file(path))


_COLUMNS = ("ids", "shards", "places", "lengths")


def read_samples(dataset: Dataset) -> SampleTable:
    """Read every shard's header. A sample that is there twice counts where it stands first. Raises ShardError."""
    entries = dataset.ledgers.entries
    ids, first = np.unique(dataset.ledgers.stored_ids, return_index=True)
    starts = np.concatenate([[0], np.cumsum([len(entry.sample_ids) for entry in entries])])
    shards = np.searchsorted(starts, first, side="right") - 1
    lengths = np.concatenate([np.zeros(0, np.int64), *_lengths(dataset)])
    return SampleTable(
        ids=ids,
        shards=shards.astype(np.int32),
        places=(first - starts[shards]).astype(np.int32),
        lengths=lengths[first].astype(np.int32),
    )


def _lengths(dataset: Dataset) -> Iterator[npt.NDArray[np.int64]]:
    """Per shard, the tokens of its samples: int64 [n]."""

    def read(name: str) -> npt.NDArray[np.int64]:
        path = dataset.path / SHARDS_FOLDER / name
        header = read_header(path)
        num_samples = len(check_header(path, header, dataset.identity).sample_ids)
        begin = header.tensors["offsets"].begin
        return np.diff(np.fromfile(path, dtype="<i8", count=num_samples + 1, offset=begin))

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(read, dataset.shards)
