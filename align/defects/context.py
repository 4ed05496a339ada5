"""Rows that were computed in another context: without the tokens before them, or at other positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis
from eyas.align.noise import median_error, row_errors

if TYPE_CHECKING:
    from torch import Tensor


def find_cut(ev: Evidence, d: Diagnosis, errors: Tensor) -> Defect | None:
    """Rows that are right up to some token and wrong from there on: computed without the tokens before it?"""
    import torch

    assert d.tap is not None
    limit = max(ev.noise.excluded(d.tap), 1e-3)
    wrong = torch.nan_to_num(errors, nan=torch.inf)[1:] > limit
    if len(wrong) < 6 or not bool(wrong.any()):
        return None
    # The split that most rows agree with: right before it, wrong after it.
    right_before = torch.cumsum((~wrong).int(), 0)
    wrong_after = int(wrong.sum()) - torch.cumsum(wrong.int(), 0)
    agree = right_before + wrong_after
    begin = int(agree.argmax()) + 2  # the first wrong token
    if begin >= len(errors) - 2 or float(agree.max()) < 0.85 * len(wrong) or begin < 3:
        return None
    ids = ev.ids[d.sample]
    alone = ev.target.run(ids[begin:])[d.tap]
    rows = ev.rows(d.sample, d.slot)[begin:]
    if median_error(row_errors(rows, alone)) <= limit:
        text = f"rows from token {begin} on were computed without the {begin} tokens before them"
        return Defect("context cut", text)
    return None


def find_drift(ev: Evidence, d: Diagnosis) -> Defect | None:
    """Deviations that begin at rounding and grow along the sample: positions, not weights."""
    assert d.tap is not None
    errors = ev.errors(d, d.tap)
    if len(errors) < 32:
        return None
    quarter = len(errors) // 4
    early, late = median_error(errors[:quarter]), median_error(errors[-quarter - 1 :])
    if early <= ev.explained(d.tap) and late > ev.noise.excluded(d.tap) and late > 4 * early:
        return Defect("drifts with position", "rows are right at the start and ever farther off along the sample")
    return None
