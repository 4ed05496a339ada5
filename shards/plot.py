"""Two pictures of a dataset: how the norms of each tap are distributed over tokens, and how long samples are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.taps.errors import EyasError

NORM_SAMPLES = 256  # whose every token's norms are drawn, at most
LENGTH_SHARDS = 2048  # whose samples' lengths are drawn, at most


def plot_dataset(dataset: Path, out: Path) -> None:
    """Draw ``dataset`` into ``out`` (PNG, or what else matplotlib tells from the name).

    Reads samples spread evenly over the shards, not everything. Raises EyasError without matplotlib or without
    samples, ShardError for a damaged shard.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EyasError("--plot needs matplotlib, the extra `plot`: pip install 'eyas[plot]'") from error
    if out.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
        raise EyasError(f"--plot {out}: expected a file name that ends in .png, .svg or .pdf")
    data = Dataset.open(dataset)
    if not data.num_samples:
        raise EyasError(f"{dataset} holds no samples yet, so there is nothing to plot")
    lengths, num_shards = _lengths(data)
    norms = _norms(data)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = np.concatenate(list(norms.values()))
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)]  # what a logarithmic axis can show
    if drawn.size:
        bins = np.geomspace(drawn.min() / 1.05, drawn.max() * 1.05, 81)
        for tap, norms_T in norms.items():
            left.hist(norms_T, bins=bins, histtype="step", label=tap)
        left.set_xscale("log")
        left.legend(fontsize="small")
    num_tokens = len(next(iter(norms.values())))
    left.set(xlabel="L2 norm of a token's row", ylabel="tokens", title=f"norms of {num_tokens:,} tokens, per tap")
    right.hist(lengths, bins=60)
    of = "all" if num_shards == len(data.shards) else f"{num_shards:,} of {len(data.shards):,}"
    right.set(xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths):,} samples ({of} shards)")
    figure.suptitle(f"{dataset.name}: {data.num_samples:,} samples, {data.num_tokens:,} tokens")
    figure.savefig(out, dpi=120)


def _lengths(data: Dataset) -> tuple[npt.NDArray[np.int64], int]:
    """Tokens of each sample, int64 [n], in how many shards."""
    chosen = _evenly(len(data.shards), LENGTH_SHARDS)
    return np.concatenate([np.diff(data.shard(index).offsets) for index in chosen]), len(chosen)


def _norms(data: Dataset) -> dict[str, npt.NDArray[np.float32]]:
    """Per tap, and for last_hidden: the norms of every token of some samples, float32 [n]."""
    shards = _evenly(len(data.shards), NORM_SAMPLES)
    norms: dict[str, list[npt.NDArray[np.float32]]] = {}
    for index in shards:
        shard = data.shard(index)
        for n in _evenly(len(shard), max(1, NORM_SAMPLES // len(shards))):
            for tap, rows_TH in _rows(shard.sample(n), data.identity):
                norm_T = torch.linalg.vector_norm(rows_TH, dim=-1, dtype=torch.float32)
                norms.setdefault(tap, []).append(norm_T.numpy())
    return {tap: np.concatenate(parts) for tap, parts in norms.items()}


def _rows(sample: Sample, identity: DatasetIdentity) -> Iterator[tuple[str, Tensor]]:
    features_TAH = sample.features.view(sample.num_tokens, len(identity.taps), identity.hidden_size)
    for slot, tap in enumerate(identity.taps):
        yield str(tap), features_TAH[:, slot]
    if sample.last_hidden is not None:
        yield f"last_hidden ({identity.last_hidden})", sample.last_hidden


def _evenly(size: int, at_most: int) -> list[int]:
    """At most ``at_most`` of the indices below ``size``, spread evenly."""
    return sorted({int(index) for index in np.linspace(0, size - 1, min(size, at_most))})
