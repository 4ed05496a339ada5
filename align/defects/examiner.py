"""The order in which hypotheses are tried on every slot of every sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eyas.align.defects.context import find_cut
from eyas.align.defects.damage import find_damage
from eyas.align.defects.deviations import OTHER_WEIGHTS, is_near, judge_weights, right_deeper
from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, Examination, as_tap, settled
from eyas.align.defects.layouts import find_layouts, find_permutation
from eyas.align.defects.outliers import find_outliers
from eyas.align.defects.parts import find_pieces
from eyas.align.defects.places import find_place
from eyas.align.defects.scale import find_scale
from eyas.align.defects.strays import drop_lost_rows, find_strays, undecided
from eyas.align.defects.tokens import find_profile, follows_its_tokens
from eyas.taps.match import match_taps

INDISTINCT = Defect(
    "undecided", "rounding alone moves this tap as far as other taps are from it: which one it is cannot be told",
    certain=False,
)  # fmt: skip
NO_TAP = "no tap, no other row and no part of a layer fits"


def examine(ev: Evidence) -> Examination:
    """Examine every slot of every sample."""
    found = [_match(ev, slot, sample) for sample in range(len(ev.samples)) for slot in range(len(ev.slots))]
    examination = judge_weights(ev, _structures(ev, found))
    usual = {  # slots that most samples have one defect in: what it does to the rest is no news
        slot for slot in range(len(ev.slots))
        if sum(not d.explained for d in examination.of_slot(slot)) > len(ev.samples) / 2
    }  # fmt: skip
    done = [
        find_outliers(ev, d, examination.diagnoses) if d.slot not in usual and _right_at_large(ev, d) else d
        for d in examination.diagnoses
    ]
    return replace(examination, diagnoses=tuple(done))


def _right_at_large(ev: Evidence, d: Diagnosis) -> bool:
    """Whether a diagnosis has nothing certain against it, and most rows are the tap."""
    if d.tap is None or d.rearranged or any(x.certain and x.kind != "coarser values" for x in d.defects):
        return False
    return d.match.errors[d.tap] <= ev.explained(d.tap) or not any(x.kind == "undecided" for x in d.defects)


def _match(ev: Evidence, slot: int, sample: int) -> Diagnosis:
    """The tap within rounding, if there is one, and what the rows show by themselves."""
    defects = find_damage(ev, slot, sample)
    match = match_taps(*ev.pair(sample, slot), ev.target.all_taps)
    if match.best is not None and (lost := drop_lost_rows(ev, slot, sample, match)) is not None:
        defects = (*defects, lost)
        match = match_taps(*ev.pair(sample, slot), ev.target.all_taps)
    fitting = [index for index, error in enumerate(match.errors) if error <= ev.explained(index)]
    tap = min(fitting, key=lambda index: match.errors[index]) if fitting else None
    declared = ev.declared(slot)
    if declared in fitting:
        tap = declared
    elif tap is not None and match.errors[tap] > match.best_error:
        tap = None  # so noisy that anything fits it, and another is nearer
    if tap is not None and ev.explained(tap) >= min(e for n, e in enumerate(match.errors) if n != tap):
        defects = (*defects, INDISTINCT)
    diagnosis = Diagnosis(slot=slot, sample=sample, tap=tap, match=match, defects=defects)
    return diagnosis if tap is None else find_strays(ev, diagnosis)


def _structures(ev: Evidence, found: list[Diagnosis]) -> list[Diagnosis]:
    done = [d if settled(d) else find_scale(ev, d) for d in _noisy(ev, found)]
    done = [d if settled(d) else find_place(ev, d) for d in done]
    done = find_layouts(ev, done)
    for slot in range(len(ev.slots)):
        done = find_pieces(ev, slot, done)
    done = [d if settled(d) else _last_resorts(ev, d, done) for d in done]
    return [undecided(ev, d) if d.ragged and not d.rearranged else d for d in done]


def _noisy(ev: Evidence, found: list[Diagnosis]) -> list[Diagnosis]:
    """Samples that are noisier than the rest, at the tap their slot has in most samples."""
    done = []
    for d in found:
        taps = [other.tap for other in found if other.slot == d.slot and other.tap is not None]
        tap = max(set(taps), key=taps.count) if taps else None
        usual = tap is not None and taps.count(tap) > len(ev.samples) / 2
        if not settled(d) and usual and tap is not None and d.match.best == ev.target.all_taps[tap]:
            noise = ev.noise_of(d.sample)
            room = max(noise.excluded(tap), ev.noise.excluded(tap)) * (2 if ev.target.has_routers else 1)
            d = find_strays(ev, replace(d, tap=tap)) if d.match.best_error <= room else d
        done.append(d)
    return done


def _last_resorts(ev: Evidence, d: Diagnosis, found: Sequence[Diagnosis]) -> Diagnosis:
    """A context that was cut, permuted channels, other tokens; else the nearest tap, if one is near."""
    nearest = None if d.match.best is None else ev.index[d.match.best]
    declared = ev.declared(d.slot)
    for tap in dict.fromkeys(index for index in (declared, nearest) if index is not None):
        errors = ev.errors(d, tap)
        if (cut := find_cut(ev, replace(d, tap=tap), errors)) is not None:
            return as_tap(d, tap, cut)
    if (permuted := find_permutation(ev, d)) is not None:
        tap, text = permuted
        return as_tap(d, tap, Defect("permuted channels", text))
    if nearest is not None:
        alike = [other for other in found if other.slot == d.slot and other.match.best == d.match.best]
        if sum(is_near(ev, other, nearest) for other in alike) > len(ev.samples) / 2:
            return replace(d, tap=nearest)  # and judge_weights says why it is so far
    deeper_right = any(right_deeper(ev, other, d) for other in found)
    if not deeper_right and (followed := follows_its_tokens(ev, d)) is not None:
        return as_tap(d, followed, OTHER_WEIGHTS)
    profile = find_profile(ev, d)
    if profile is not None:
        text = f"channels are those of {ev.target.all_taps[profile]}, rows are of no token that was replayed"
        return as_tap(d, profile, Defect("other tokens", text))
    if any(defect.kind == "missing channels" for defect in d.defects):
        return d
    return replace(d, defects=(*d.defects, Defect("no tap of this target", NO_TAP)))
