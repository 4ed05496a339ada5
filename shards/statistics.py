"""What a shard says about its tensors, gathered as they are written: a static check never needs the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Columns of tap_statistics.
SUM_NORM, MAX_ABS, ZEROS, NONFINITE = range(4)

_CHUNK_ELEMENTS = 1 << 24  # bounds the temporaries


def tap_statistics(features: Tensor) -> Tensor:
    """Per tap: sum of row norms, max abs, count of zeros, count of NaN and Inf.

    features [T, A, H] of any float dtype, on any device -> float64 [A, 4] there. Row norms are L2 in float32; a row
    that holds a NaN or an Inf is left out of the norms and the maximum. Nothing here waits for the device.
    """
    import torch

    num_taps, hidden_size = features.shape[1:]
    total = torch.zeros(num_taps, 4, dtype=torch.float64, device=features.device)  # [A, 4]
    largest = torch.finfo(torch.float32).max
    step = max(1, _CHUNK_ELEMENTS // (num_taps * hidden_size))
    for start in range(0, len(features), step):
        rows = features[start : start + step]  # [t, A, H]
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)  # [t, A]
        peaks = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32)  # [t, A]
        finite = torch.isfinite(peaks)  # [t, A]
        total[:, SUM_NORM] += norms.clamp(max=largest).where(finite, 0).sum(0, dtype=torch.float64)
        total[:, MAX_ABS] = torch.maximum(total[:, MAX_ABS], peaks.where(finite, 0).amax(0).double())
        total[:, ZEROS] += (rows == 0).sum((0, 2))
        total[:, NONFINITE] += len(rows) * hidden_size - torch.isfinite(rows).sum((0, 2))
    return total


def summarize(totals: Sequence[Tensor], names: Sequence[str], num_tokens: int, hidden_size: int) -> dict[str, Any]:
    """The statistics of a shard, as its ledger line and its metadata hold them.

    totals: [A, 4] of each sample, on the CPU; names: A of them; num_tokens: of all samples together.
    """
    import torch

    stack = torch.stack([total.double() for total in totals])  # [N, A, 4]
    sums, peaks = stack.sum(0), stack[:, :, MAX_ABS].amax(0)
    return {
        name: {
            "mean_norm": _round(float(sums[a, SUM_NORM]) / num_tokens),
            "max_abs": _round(float(peaks[a])),
            "zeros": _round(float(sums[a, ZEROS]) / (num_tokens * hidden_size)),
            "nonfinite": int(sums[a, NONFINITE]),
        }
        for a, name in enumerate(names)
    }


def _round(value: float) -> float:
    return float(f"{value:.6g}")  # a ledger line holds a dozen of these, and is read 120 000 times
