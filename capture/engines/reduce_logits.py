"""What target statistics keep of a row of logits: the largest, where it stands, and the logsumexp.

Shapes: K rows, V logits of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.shards.gpu_kernels import can_compile_kernels

if TYPE_CHECKING:
    from torch import Tensor

# Rows of a matrix product come in tiles of at most this many: a product of 2093 rows takes as long as one of 2176.
_ROW_TILE = 256


def rows_at_once(most_logits: int, num_columns: int) -> int:
    """As many rows of ``num_columns`` logits as make no more than ``most_logits``, at least one; whole tiles of them
    where there are that many."""
    rows = max(1, most_logits // max(1, num_columns))
    return rows if rows < _ROW_TILE else rows // _ROW_TILE * _ROW_TILE


def reduce_logits(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest (float32 [K]), its column (int64 [K], the first among equals) and logsumexp in float32 (float32 [K]) of
    ``logits`` [K, V], floats of any width.

    A NaN or an infinity in a row gives a logsumexp that is not finite.
    """
    if logits.is_cuda and can_compile_kernels():
        from eyas.capture.engines.reduce_logits_triton import reduce_logits_triton

        return reduce_logits_triton(logits)
    wide = logits.float()
    column = wide.argmax(-1)  # [K]
    return wide.gather(-1, column.unsqueeze(1))[:, 0], column, wide.logsumexp(-1)
