"""What stored rows show by themselves: damage, before anything is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Kind, name_rows
from eyas.align.storage import coarser_grid, scan_rows

if TYPE_CHECKING:
    from torch import Tensor


def find_damage(ev: Evidence, slot: int, sample: int) -> tuple[Defect, ...]:
    """The defects of one slot of one sample."""
    stored = ev.samples[sample]
    rows = stored.slots[slot]
    defects: list[Defect] = []
    if len(rows) != stored.num_tokens:
        defects.append(Defect("missing rows", f"the files hold {len(rows)} rows for {stored.num_tokens} tokens"))
    if not len(rows):
        return tuple(defects)
    scan = scan_rows(rows)
    if bool(scan.zero.all()):
        return (*defects, Defect("dead", "every row is zero"))
    if scan.constant:
        return (*defects, Defect("constant", "every row is the same"))
    if bool(scan.nonfinite.any()):
        defects.append(Defect("not finite", f"{name_rows(scan.nonfinite)} hold NaN or Inf"))
    if bool(scan.zero.any()):
        first, last = bool(scan.zero[0]), bool(scan.zero[-1])
        kind: Kind = "prefix missing" if first else "cut off at the end" if last else "missing rows"
        defects.append(Defect(kind, f"{name_rows(scan.zero)} are zero"))
    repeated = scan.repeated & _other_token(stored.input_ids, len(rows))
    for row in (scan.repeated & ~repeated).nonzero().flatten().tolist():  # a copy of a copy
        repeated[row] = repeated[row - 1]
    if bool(repeated.any()):
        defects.append(Defect("missing rows", f"{name_rows(repeated)} are copies of the row before"))
        ev.drop(sample, slot, repeated[: len(ev.ids[sample])])
    if float(scan.dead_channels.float().mean()) > 0.01:
        defects.append(Defect("missing channels", f"{name_rows(scan.dead_channels, 'channels')} are zero in every row"))
    grid = coarser_grid(rows[scan.alive])
    # Halved mantissas of float32 cost nothing, and say something only where float32 was computed; eight bits are
    # half of what the engine feeds.
    if grid is not None and ("8" in grid or ev.compute_dtype == "float32"):
        stored_as = str(rows.dtype).removeprefix("torch.")
        defects.append(Defect("coarser values", f"{grid} values stored as {stored_as}", certain="8" in grid))
    return tuple(defects)


def _other_token(ids: Tensor, num_rows: int) -> Tensor:
    """Rows whose token is not the one before, bool [num_rows]: states of a repeated token may be equal."""
    import torch

    other = torch.zeros(num_rows, dtype=torch.bool)
    stop = min(num_rows, len(ids))
    other[1:stop] = ids[1:stop] != ids[: stop - 1]
    return other
