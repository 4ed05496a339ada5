"""What can be told from stored rows alone: rows that are missing, dead or damaged, and values on a coarser grid than
their dtype's.

Shapes: T rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
_GRID_ROWS = 64
_GRID_SHARE = 0.999  # of the values that must lie on a grid


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The state of one slot's rows."""

    zero: Tensor  # bool [T]
    nonfinite: Tensor  # bool [T]
    repeated: Tensor  # bool [T]: bit for bit the row before
    dead_channels: Tensor  # bool [H]: zero in every row

    @property
    def alive(self) -> Tensor:
        """bool [T]: rows that hold something to compare."""
        return ~(self.zero | self.nonfinite)

    @property
    def constant(self) -> bool:
        """Every row is the first one."""
        return len(self.zero) > 1 and bool(self.repeated[1:].all()) and not bool(self.zero.all())


def scan_rows(rows: Tensor) -> Rows:
    """Scan one slot's rows [T, H], T at least 1."""
    import torch

    zero = (rows == 0).all(-1)
    repeated = torch.zeros(len(rows), dtype=torch.bool)
    repeated[1:] = (rows[1:] == rows[:-1]).all(-1) & ~zero[1:]
    return Rows(
        zero=zero, nonfinite=~rows.isfinite().all(-1), repeated=repeated, dead_channels=(rows == 0).all(0) & ~zero.all()
    )


def coarser_grid(rows: Tensor) -> str | None:
    """The grid that finite rows [T, H] lie on where it is coarser than their dtype: e.g. "fp8 e4m3"; else None.

    Plain values by their trailing zero bits; scaled ones by their distance from the grid that the largest value of a
    row, or of all rows, would give (int8: 127 steps; fp8 e4m3: 448).
    """
    import torch

    values = rows[:_GRID_ROWS].float()
    values = values[values.abs().amax(-1) > 0]
    if values.numel() < 256:
        return None
    bits = _explicit_bits(values)
    dtype = str(rows.dtype).removeprefix("torch.")
    if bits <= 3:
        return "fp8 e4m3" if bits == 3 else "fp8 e5m2"
    for scope, largest in (("row", values.abs().amax(-1, keepdim=True)), ("tensor", values.abs().amax())):
        steps = (values / (largest / 127)).abs()
        small = steps[(steps > 0.5) & (steps < 16)]  # of larger ones bfloat16 does not keep the steps
        if small.numel() > 64 and float((small - small.round()).abs().mean()) < 0.05:
            return f"int8, one scale per {scope}"
        scaled = (values / (largest / 448)).abs()
        normal = scaled[scaled > 2**-6]
        snapped = normal.to(torch.float8_e4m3fn).float()
        if normal.numel() > 64 and float(((normal - snapped).abs() / normal).mean()) < 6e-3:
            return f"fp8 e4m3, one scale per {scope}"
    if dtype == "float32" and bits <= 10:
        return "bfloat16" if bits <= 7 else "float16 (or TF32)"
    return None


def _explicit_bits(values: Tensor) -> int:
    """Mantissa bits that float32 ``values`` use, the leading one not counted: int, 23 at most."""
    import torch

    pattern = values[values != 0].contiguous().view(torch.int32) & 0x7FFFFF
    for bits in range(24):
        mask = (1 << (23 - bits)) - 1
        if float(((pattern & mask) == 0).float().mean()) >= _GRID_SHARE:
            return bits
    return 23
