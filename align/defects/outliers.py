"""Single rows that are no state of their token, in a slot that is otherwise right.

A median does not see them. A row is compared with how far rounding alone throws that very token at that tap (outlier
tokens, sinks and massive activations, are noisy at each run), and it is named only beyond EXCLUDED times that.

Routers make it harder: a token that another kernel sends to other experts is as far off as a damaged row, and may have
been sent there in none of our runs. There a row is named only where a deeper slot of the same token is right, which
would carry whatever the shallower one had; of the deepest slot nothing can be said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, name_rows
from eyas.align.forward import ReplayTarget
from eyas.align.noise import EXCLUDED, STRAY_ERROR

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_ERROR = 1e-3
_TOKEN_RUNS = 4  # of a sample whose rows are in doubt
# A residual stream keeps what was added to it: of 1589 rows that routers threw on tiny random mixtures, the deeper
# deviation was 0.94 times the shallower one or more.
_CARRIED = 0.5


def find_outliers(ev: Evidence, d: Diagnosis, found: Sequence[Diagnosis]) -> Diagnosis:
    """``d`` with its damaged rows; ``d`` itself where every row is within what rounding does to its token."""
    assert d.tap is not None
    errors = ev.errors(d, d.tap)
    if ev.target.has_routers or not isinstance(ev.target, ReplayTarget):
        least = _LEAST_ERROR if isinstance(ev.target, ReplayTarget) else STRAY_ERROR
        rows = errors > max(EXCLUDED * ev.noise.level[d.tap], least)
        rows &= _altered_later(ev, d, found)
    else:
        rows = _beyond_rounding(ev, d, errors)
    if not bool(rows.any()):
        return d
    kept = tuple(defect for defect in d.defects if defect.kind != "undecided")
    return replace(d, defects=(*kept, Defect("damaged rows", name_rows(rows))))


def _beyond_rounding(ev: Evidence, d: Diagnosis, errors: Tensor) -> Tensor:
    """Rows farther from the tap of ``d`` than rounding throws their token, bool [T]."""
    assert d.tap is not None
    rows = errors > max(EXCLUDED * max(ev.noise.level[d.tap], ev.noise.tail[d.tap]), _LEAST_ERROR)
    rows[0] &= bool(errors[0] > STRAY_ERROR)  # the attention sink: most of its row is a few massive activations
    for num_runs in range(1, _TOKEN_RUNS + 1):  # run after run, since most rows are within what the first one does
        if bool(rows.any()):
            rows &= errors > EXCLUDED * ev.token_noise(d.sample, num_runs)[d.tap]
    return rows


def _altered_later(ev: Evidence, d: Diagnosis, found: Sequence[Diagnosis]) -> Tensor:
    """Rows whose deviation is not in the residual stream of a deeper slot of the same sample, bool [T]."""
    import torch

    assert d.tap is not None
    own = _distances(ev, d)
    later = torch.zeros(len(own), dtype=torch.bool)
    for other in found:
        if (
            other.sample == d.sample
            and not other.rearranged
            and other.tap is not None
            and d.tap < other.tap <= ev.target.num_layers
        ):
            later |= _distances(ev, other) < _CARRIED * own
    return later


def _distances(ev: Evidence, d: Diagnosis) -> Tensor:
    """Absolute, of each row from its tap, float32 [T]."""
    assert d.tap is not None
    rows, stack = ev.pair(d.sample, d.slot)
    distances: Tensor = (rows.to(stack.device).float() - stack[d.tap].float()).norm(dim=-1).cpu()
    return distances
