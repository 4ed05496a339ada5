"""What a shard says about its tensors, gathered as they are written: a static check never needs the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.shards.gpu_kernels import can_compile_kernels

if TYPE_CHECKING:
    from torch import Tensor

# Columns of tap_statistics.
SUM_NORM, MAX_ABS, ZEROS, NONFINITE = range(4)

_LARGEST = float(np.finfo(np.float32).max)
_CHUNK_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 19}  # bounds the temporaries, on a CPU keeps them in cache


def tap_statistics(features: Tensor) -> Tensor:
    """Per tap: sum of row norms, max abs, count of zeros, count of NaN and Inf.

    features [T, A, H] of any float dtype, on a CPU or a GPU -> float64 [A, 4] there. Row norms are L2 in float32; a row
    that holds a NaN or an Inf is left out of the norms and the maximum. Nothing here waits for a GPU.
    """
    import torch

    if features.is_cuda and can_compile_kernels():
        from eyas.shards.statistics_triton import row_statistics

        norms, peaks, zeros_of_rows, nonfinite = row_statistics(features)  # [T, A] each
        finite = nonfinite == 0
        return torch.stack(
            [
                norms.clamp(max=_LARGEST).where(finite, 0).sum(0, dtype=torch.float64),
                peaks.where(finite, 0).amax(0).double(),
                zeros_of_rows.sum(0).double(),
                nonfinite.sum(0).double(),
            ],
            dim=1,
        )
    num_taps, hidden_size = features.shape[1:]
    total = torch.zeros(num_taps, 4, dtype=torch.float64, device=features.device)  # [A, 4]
    on_cpu = features.device.type == "cpu"
    step = max(1, _CHUNK_ELEMENTS["cpu" if on_cpu else "cuda"] // (num_taps * hidden_size))
    scratch = _Scratch(features[:step]) if on_cpu else None
    for start in range(0, len(features), step):
        rows = features[start : start + step]  # [t, A, H]
        if scratch is not None:
            wide, peaks, zeros = scratch.look(rows)  # [t, A, H], [t, A], [A]
        else:
            wide = rows
            peaks = torch.maximum(rows.amax(-1), -rows.amin(-1)).float()  # [t, A]
            zeros = (rows == 0).sum((0, 2))  # [A]
        norms = torch.linalg.vector_norm(wide, dim=-1, dtype=torch.float32)  # [t, A]
        finite = torch.isfinite(peaks)  # [t, A], a peak is NaN where the row holds one
        total[:, SUM_NORM] += norms.clamp(max=_LARGEST).where(finite, 0).sum(0, dtype=torch.float64)
        total[:, MAX_ABS] = torch.maximum(total[:, MAX_ABS], peaks.where(finite, 0).amax(0).double())
        total[:, ZEROS] += zeros
        if not (on_cpu and bool(finite.all())):
            total[:, NONFINITE] += len(rows) * hidden_size - torch.isfinite(wide).sum((0, 2))
    return total


class _Scratch:
    """What a CPU works in, made once: memory that is new costs more than the work does.

    torch reduces 16-bit floats on a CPU about ten times as slowly as float32, so those are widened. The magnitudes of
    16-bit floats are ordered as their bits without the sign are, infinity and NaN above all: integers are compared at
    twice the speed of float32, and NumPy counts them at four times the speed of torch's sum.
    """

    def __init__(self, rows: Tensor) -> None:
        """rows [t, A, H]: as many as are looked at at once, at most."""
        import torch

        narrow = rows.itemsize == 2
        self._wide = torch.empty(rows.shape, dtype=torch.float32) if narrow else None
        self._bits = torch.empty(rows.shape, dtype=torch.int16) if narrow else None

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [t, A, H] as float32 (good until the next call), each one's largest magnitude, float32 [t, A], NaN where
        it holds one, and the zeros of each tap, [A]."""
        import torch

        num_taps = rows.shape[1]
        if self._wide is None or self._bits is None:
            wide = magnitudes = rows.float()
            peaks = torch.maximum(wide.amax(-1), -wide.amin(-1))
        else:
            wide = self._wide[: len(rows)].copy_(rows)
            magnitudes = torch.bitwise_and(rows.view(torch.int16), 0x7FFF, out=self._bits[: len(rows)])
            peaks = magnitudes.amax(-1).view(rows.dtype).float()
        numbers = magnitudes.numpy()
        if np.count_nonzero(numbers) == numbers.size:
            return wide, peaks, torch.zeros(num_taps)
        zeros = [numbers[:, a].size - np.count_nonzero(numbers[:, a]) for a in range(num_taps)]
        return wide, peaks, torch.tensor(zeros)


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
