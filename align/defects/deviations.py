"""What is a tap but farther from it than rounding goes: a quantized target, other weights, altered rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eyas.align.defects.agreement import follow_recognized
from eyas.align.defects.context import find_drift
from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, Examination
from eyas.align.forward import ReplayTarget
from eyas.align.weights import MIN_COSINE, QUIET_COSINE, Projection, project, smallest_change
from eyas.taps.match import MAX_ERROR, MIN_MARGIN

MAX_WEIGHT_ERROR = 0.8  # beyond it, rows have nothing left of the tap they are nearest to

OTHER_WEIGHTS = Defect(
    "other weights", "rows are near their tap, and farther from it than rounding goes, growing with depth"
)
ALTERED = Defect(
    "altered rows",
    "rows are near their tap and farther from it than rounding goes, and deeper slots are right: they were changed "
    "after the target computed them",
)


def judge_weights(ev: Evidence, found: list[Diagnosis]) -> Examination:
    """Quantization or other weights, judged over all slots and samples that are near a tap."""
    near = [d for d in found if d.tap is not None and not d.rearranged]
    typical = {  # per slot: a change of weights shows in every sample
        slot: sorted(ratios)[len(ratios) // 2]
        for slot in range(len(ev.slots))
        if (ratios := [_ratio(ev, d) for d in near if d.slot == slot])
    }
    quiet = max(typical.values(), default=0.0) <= 1.0
    projections: list[Projection] = []
    # Where nothing proves the weights, a quantization may hide in what looks like rounding.
    if near and not (quiet and ev.proven) and isinstance(ev.target, ReplayTarget):
        chosen = sorted({d.sample for d in near})[: 1 if quiet else 2]
        stored = [
            (ev.ids[a], {d.tap: ev.rows(a, d.slot) for d in near if d.sample == a and d.tap is not None})
            for a in chosen
        ]
        projections = project(ev.target, stored)
    quantized = next((p for p in projections if p.fits(QUIET_COSINE if quiet else MIN_COSINE)), None)
    done = [_deviation(ev, d, typical[d.slot], quantized, found) if d in near else d for d in found]
    done = follow_recognized(done, len(ev.samples))
    return Examination(
        diagnoses=tuple(done), projections=tuple(projections), proven=ev.proven, unseen=_unseen(ev, done)
    )


def _unseen(ev: Evidence, found: Sequence[Diagnosis]) -> float | None:
    """The change of weights that would stay within rounding, where nothing but rounding was found and nothing proves
    the weights."""
    deepest = max((d.tap for d in found if d.tap is not None), default=0)
    if ev.proven or not all(d.explained for d in found) or not isinstance(ev.target, ReplayTarget):
        return None
    sample = max((d.sample for d in found), key=lambda sample: len(ev.ids[sample]))
    return smallest_change(ev.target, ev.ids[sample], deepest, ev.explained(deepest))


def _deviation(
    ev: Evidence, d: Diagnosis, typical: float, quantized: Projection | None, found: Sequence[Diagnosis]
) -> Diagnosis:
    """``d`` with what its deviation from the tap is, given that of the slot in most samples, in multiples of the
    noise. A reason that is certain stands for rows that could not be decided, too."""
    reason = _reason(ev, d, typical, quantized)
    if reason is None:
        return d
    if reason == OTHER_WEIGHTS and any(right_deeper(ev, other, d) for other in found):
        reason = ALTERED
    kept = tuple(defect for defect in d.defects if defect.kind != "undecided" or not reason.certain)
    return replace(d, defects=(*kept, reason))


def _reason(ev: Evidence, d: Diagnosis, typical: float, quantized: Projection | None) -> Defect | None:
    assert d.tap is not None
    error = d.match.errors[d.tap]
    if quantized is not None and d.tap != 0:
        return Defect("quantized target", quantized.scheme)
    if error <= ev.explained(d.tap) or any(defect.kind == "coarser values" for defect in d.defects):
        return None
    beyond = ev.noise.excluded(d.tap) / max(ev.noise.level[d.tap] * ev.noise.share, 1e-6)
    within = ev.explained(d.tap) / max(ev.noise.level[d.tap] * ev.noise.share, 1e-6)
    if typical > within and (drift := find_drift(ev, d)) is not None:
        return drift
    far = error > ev.noise.excluded(d.tap)
    if typical <= beyond and far:
        # This sample and not the others: another worker's weights, or a sample that is noisier than they are.
        far = error > 2 * ev.noise_of(d.sample).excluded(d.tap) and not ev.target.has_routers
    if far:
        return OTHER_WEIGHTS
    if ev.target.has_routers:
        # Other weights move every token alike; routers leave some alone, or throw as far in a few runs of our own.
        quarter = float(ev.errors(d, d.tap)[1:].nan_to_num(0).quantile(0.25))
        if quarter <= ev.explained(d.tap) or error <= min(ev.noise_of(d.sample).excluded(d.tap), MAX_ERROR / 2):
            return None
    if typical > within or (not ev.target.has_routers and error > ev.noise_of(d.sample).explained(d.tap)):
        text = "rows deviate more than rounding, and less than what only other weights would do"
        return Defect("undecided", text, certain=False)
    return None


def _ratio(ev: Evidence, d: Diagnosis) -> float:
    assert d.tap is not None
    return d.match.errors[d.tap] / max(ev.noise.level[d.tap] * ev.noise.share, 1e-6)


def right_deeper(ev: Evidence, other: Diagnosis, d: Diagnosis) -> bool:
    """Whether ``other`` is a slot of the same sample that is right, at a tap that depends on that of ``d``."""
    declared = ev.declared(d.slot) if d.tap is None else d.tap
    return (
        other.sample == d.sample
        and other.explained
        and other.tap is not None
        and declared is not None
        and other.tap > declared
        and other.match.errors[other.tap] <= ev.explained(other.tap)
        and other.match.errors[other.tap] < 0.5 * d.match.best_error  # what other weights do grows with depth
    )


def is_near(ev: Evidence, d: Diagnosis, tap: int) -> bool:
    """Whether rows are a tap's beyond doubt, whatever their deviation is."""
    match = d.match
    if match.best_error <= MAX_ERROR and match.margin >= MIN_MARGIN:
        return True
    if match.best_error <= ev.noise.excluded(tap):
        return True
    return tap == ev.declared(d.slot) and match.best_error <= MAX_WEIGHT_ERROR
