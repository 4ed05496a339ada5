"""Rows that are a tap but for a factor."""

from __future__ import annotations

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, as_tap
from eyas.align.noise import row_errors

SCALED_SHARE = 0.8  # of the rows that a scale must explain


def find_scale(ev: Evidence, d: Diagnosis) -> Diagnosis:
    """``d`` as a tap times one factor on all rows, or one a row; ``d`` itself where no factor makes it one."""
    rows, stack = ev.rows(d.sample, d.slot), ev.target.taps(ev.ids[d.sample])
    alive = ev.alive(d.sample, d.slot)
    alive[0] = False
    if int(alive.sum()) < 3:
        return d
    x = rows[alive].float().to(stack.device)
    best: tuple[float, int, str] | None = None
    for index in range(len(stack)):
        r = stack[index][alive.to(stack.device)].float()
        factors = (x * r).sum(-1) / (r * r).sum(-1).clamp_min(1e-30)  # [R]
        factor = float(factors.median())
        # Not the median: half of the rows being right is another defect.
        one = float(row_errors(x, factor * r).quantile(SCALED_SHARE))
        each = float(row_errors(x, factors[:, None] * r).quantile(SCALED_SHARE))
        limit = max(ev.noise.excluded(index), 1e-4)
        if one <= limit and abs(factor - 1) > 3 * max(one, ev.explained(index)):
            text = f"{ev.target.all_taps[index]} times {factor:.3g}"
            best = min(best or (one / limit, index, text), (one / limit, index, text))
        elif each <= limit and one > 2 * limit:
            text = f"{ev.target.all_taps[index]} with each row scaled on its own (a norm without weights?)"
            best = min(best or (1 + each / limit, index, text), (1 + each / limit, index, text))
    return d if best is None else as_tap(d, best[1], Defect("scaled", best[2]))
