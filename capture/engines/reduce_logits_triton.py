"""reduce_logits on a GPU: one pass over the logits in their own dtype.

torch needs three passes and a float32 copy of the logits for the same. A program takes a row; each of its lanes keeps
its own largest and its own sum of exp(logit - largest), as online softmax does (Milakov & Gimelshein,
arXiv:1805.02867), and the lanes are joined at the row's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096  # logits at once
_WARPS = 8


def reduce_logits_triton(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """reduce_logits of ``logits`` [K, V] on a GPU, whose rows may have gaps between them."""
    num_rows, num_columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    largest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    column = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        with torch.cuda.device(logits.device):
            _reduce[(num_rows,)](
                logits, logits.stride(0), num_columns, largest, column, lse, BLOCK=_BLOCK, num_warps=_WARPS
            )
    return largest, column, lse


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(logits, row_stride, num_columns, largest_out, column_out, lse_out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    lanes = tl.arange(0, BLOCK)
    # Finite, so that a logit of minus infinity is at minus infinity from it and adds exp(-inf) = 0.
    largest = tl.full([BLOCK], -3.4e38, tl.float32)
    column = tl.full([BLOCK], 0, tl.int32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for begin in range(0, num_columns, BLOCK):
        at = begin + lanes
        logit = tl.load(start + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        is_larger = logit > largest
        # Of exp(old - new largest) and exp(logit - new largest) one is 1: this is the other.
        factor = tl.exp(-tl.abs(logit - largest))
        total = tl.where(is_larger, total * factor + 1.0, total + factor)
        largest = tl.where(is_larger, logit, largest)
        column = tl.where(is_larger, at, column)
    best = tl.max(largest, 0)
    first = tl.min(tl.where(largest == best, column, num_columns), 0)
    tl.store(largest_out + row, best)
    tl.store(column_out + row, first.to(tl.int64))
    tl.store(lse_out + row, best + tl.log(tl.sum(total * tl.exp(largest - best), 0)))
