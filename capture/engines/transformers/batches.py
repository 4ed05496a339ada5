"""Which samples go through the target together, and the padded token ids of a batch.

Samples of about the same length are put together, padded on the right, and run without an attention mask: in a causal
model no real token sees what comes after it, so the padding changes nothing, and attention takes its fast causal
path. The padding's own rows are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.shards.sample import TokenSample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of the prepared samples that are run together, longest first."""

    rows: npt.NDArray[np.int64]  # [B]
    lengths: npt.NDArray[np.int64]  # [B], descending


def plan_batches(
    rows: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    *,
    batch_tokens: int,
    never_across: int | None = None,
) -> list[Batch]:
    """Split ``rows`` [R] with ``lengths`` [R] into batches of at most ``batch_tokens`` of padded area.

    A longer row is a batch of its own. ``never_across``: rows of at most this length are never padded beyond it, for
    targets that treat a sequence by its length (``length_boundary``). The same arguments give the same batches on
    every rank. The largest batch comes first, so that memory runs short at once or not at all; the rest are shuffled,
    so that a capture which ends early holds samples of every length and its rate foretells what is left.
    """
    order = np.lexsort((rows, -lengths))
    rows, lengths = rows[order], lengths[order]
    boundary = len(rows) if never_across is None else int(np.searchsorted(-lengths, -never_across))
    batches = []
    start = 0
    while start < len(rows):
        stop = min(start + max(1, batch_tokens // max(1, int(lengths[start]))), len(rows))
        if start < boundary < stop:
            stop = boundary
        batches.append(Batch(rows=rows[start:stop], lengths=lengths[start:stop]))
        start = stop
    if len(batches) > 2:
        largest = max(range(len(batches)), key=lambda b: len(batches[b].rows) * int(batches[b].lengths[0]))
        batches[0], batches[largest] = batches[largest], batches[0]
        shuffled = np.random.default_rng(0).permutation(len(batches) - 1) + 1
        batches = [batches[0], *(batches[b] for b in shuffled)]
    return batches


def length_boundary(text_config: Any) -> int | None:
    """The length above which the target treats *every* token of a sequence differently, None where there is none.

    LongRoPE (Phi-3 and others) takes its long factors for a whole batch as soon as its longest sequence exceeds
    ``original_max_position_embeddings`` (transformers, modeling_rope_utils.py, ``longrope_frequency_update``).
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    boundaries = [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope" and "original_max_position_embeddings" in kind
    ]
    return int(min(boundaries)) if boundaries else None


def pad(samples: Sequence[TokenSample]) -> Tensor:
    """The samples' ids padded on the right to the longest: int64 [B, T], on the CPU.

    With a sample's own last id: any would do in exact arithmetic, but attention multiplies values that it masks by 0,
    and an id that the target gives NaN or Inf for would turn the whole sample into NaN.
    """
    import torch

    padded = np.empty((len(samples), max(sample.num_tokens for sample in samples)), dtype=np.int64)
    for n, sample in enumerate(samples):
        padded[n, : sample.num_tokens] = sample.input_ids
        padded[n, sample.num_tokens :] = sample.input_ids[-1]
    return torch.from_numpy(padded)


def real_rows(lengths: Sequence[int], members: Sequence[int], width: int) -> npt.NDArray[np.int64]:
    """Where the real tokens of samples ``members`` stand in a flattened [B * width] batch, back to back: [sum T]."""
    if not len(members):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(n * width, n * width + lengths[n], dtype=np.int64) for n in members])
