"""Datasets on disk. For readers::

from eyas.shards import open_dataset

dataset = open_dataset("kimi-k25")
for sample in dataset:
    sample.features  # [T, A*H]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.shards.dataset import Dataset, Shard, open_dataset
    from eyas.shards.sample import Sample

__all__ = ["Dataset", "Sample", "Shard", "open_dataset"]


def __getattr__(name: str) -> Any:
    if name in ("Dataset", "Shard", "open_dataset"):  # on demand: a ledger's reader needs no codec
        from eyas.shards import dataset

        return getattr(dataset, name)
    if name == "Sample":
        from eyas.shards.sample import Sample

        return Sample
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
