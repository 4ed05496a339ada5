"""The statistics of rows on a GPU: one pass over the captured tensors, where torch needs about ten.

They are computed beside the target's forward, on the same device, so each pass is time that the target lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096  # elements at once
_WARPS = 8


def row_statistics(features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of each tap in ``features`` [T, A, H], floats of any width on a GPU: L2 norm and largest magnitude
    (float32 [T, A]), zeros and elements that are NaN or infinite (int32 [T, A]).

    Norm and magnitude mean nothing where a row holds one that is not finite.
    """
    num_tokens, num_taps, hidden_size = features.shape
    if features.stride(2) != 1:
        features = features.contiguous()
    shape = num_tokens, num_taps
    norms, peaks = (torch.empty(shape, dtype=torch.float32, device=features.device) for _ in range(2))
    zeros, nonfinite = (torch.empty(shape, dtype=torch.int32, device=features.device) for _ in range(2))
    if num_tokens:
        with torch.cuda.device(features.device):
            _summarize[shape](
                features,
                features.stride(0),
                features.stride(1),
                hidden_size,
                norms,
                peaks,
                zeros,
                nonfinite,
                BLOCK=min(_BLOCK, triton.next_power_of_2(hidden_size)),
                num_warps=_WARPS,
            )
    return norms, peaks, zeros, nonfinite


@triton.jit  # type: ignore[untyped-decorator]
def _summarize(features, token_stride, tap_stride, hidden_size, norms, peaks, zeros, nonfinite, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = features + token * token_stride + tap * tap_stride
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    peak = tl.zeros([BLOCK], tl.float32)
    num_zeros = tl.zeros([BLOCK], tl.int32)
    num_finite = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, hidden_size, BLOCK):
        is_there = begin + lanes < hidden_size
        value = tl.load(start + begin + lanes, mask=is_there, other=0.0).to(tl.float32)
        magnitude = tl.abs(value)
        squares += value * value
        peak = tl.maximum(peak, magnitude)
        num_zeros += ((value == 0.0) & is_there).to(tl.int32)
        num_finite += ((magnitude < float("inf")) & is_there).to(tl.int32)  # a NaN is less than nothing
    place = token * tl.num_programs(1) + tap
    tl.store(norms + place, tl.sqrt(tl.sum(squares, 0)))
    tl.store(peaks + place, tl.max(peak, 0))
    tl.store(zeros + place, tl.sum(num_zeros, 0))
    tl.store(nonfinite + place, hidden_size - tl.sum(num_finite, 0))
