"""Rows of a matched slot that are not their token's: moved, lost at an end, or deviating."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eyas.align.defects.context import find_cut
from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, Kind, as_tap, name_rows, unless_explained
from eyas.align.noise import EXPLAINED, STRAY_ERROR, median_error
from eyas.align.rows import MIN_RUN
from eyas.taps.match import Match

if TYPE_CHECKING:
    from torch import Tensor

LOST_ERROR = 0.8  # of a row that has nothing of its tap


def find_strays(ev: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Single rows of a matched slot that are not their token's."""
    assert diagnosis.tap is not None
    sample, slot, tap = diagnosis.sample, diagnosis.slot, diagnosis.tap
    errors = ev.errors(diagnosis, tap)
    stray = errors > STRAY_ERROR
    stray[0] = False
    if int(stray.sum()) > 2 * ev.noise.strays[tap] * len(stray):
        said = any(defect.kind in ("shifted rows", "rows of another sample") for defect in diagnosis.defects)
        if not said and (moved := find_moved(ev, sample, slot, tap, stray)) is not None:
            return replace(diagnosis, defects=(*unless_explained(diagnosis.defects, moved), moved))
        if (cut := find_cut(ev, diagnosis, errors)) is not None:
            return as_tap(diagnosis, tap, cut)
    return _ragged(ev, diagnosis)


def drop_lost_rows(ev: Evidence, slot: int, sample: int, match: Match) -> Defect | None:
    """Rows at an end of a sample that are not its own, while the rest are: compared no more from here on."""
    import torch

    assert match.best is not None
    tap = ev.index[match.best]
    probe = Diagnosis(slot=slot, sample=sample, tap=tap, match=match, defects=())
    errors = ev.errors(probe, tap)
    run = _run_at_an_end(errors)
    if run is None:
        return None
    rows = torch.zeros(len(errors), dtype=torch.bool)
    rows[run] = True
    if not median_error(errors, ~rows) <= ev.explained(tap) or find_cut(ev, probe, errors) is not None:
        return None
    defect = find_moved(ev, sample, slot, tap, rows)
    if defect is None:
        kind: Kind = "prefix missing" if run.start <= 1 else "cut off at the end"
        defect = Defect(kind, f"{name_rows(rows)} are no token's states")
    ev.drop(sample, slot, rows)
    return defect


def find_moved(ev: Evidence, sample: int, slot: int, tap: int, stray: Tensor) -> Defect | None:
    """Where rows that are not their token's come from, if they are found."""
    found = ev.search(sample, slot, stray, taps=[tap])
    if found is None or found.share < 0.5:
        return None
    hit = found.sample >= 0
    if ev.target.has_routers and int(hit.sum()) < MIN_RUN:
        return None  # a token that was sent elsewhere may come to be like another
    others = hit & (found.sample != sample)
    if int(others.sum()) >= 0.5 * int(hit.sum()):
        whose = ev.name(int(found.sample[others].mode().values))
        return Defect("rows of another sample", f"{name_rows(stray)} are those of sample {whose}")
    k = found.shift(sample)
    if k is not None and k != 0 and len(found.rows) >= MIN_RUN:
        first = int(stray.nonzero()[0])
        where = f"row t holds token t{k:+d} from row {first} on"
        return Defect("shifted rows", where if bool(stray[first:].all()) else f"{name_rows(stray)} hold token t{k:+d}")
    return Defect("rows out of order", f"{name_rows(stray)} are other rows of the same sample")


def _ragged(ev: Evidence, d: Diagnosis) -> Diagnosis:
    allowed = 0.2 if ev.target.has_routers else 0.1
    off = deviating(ev, d)
    if float(off.float().mean()) <= allowed or int(off.sum()) < MIN_RUN:
        return d
    # A second look, by the sample's own noise.
    allowed += 3 * ev.noise_of(d.sample).strays[d.tap or 0] if ev.target.has_routers else 0
    return replace(d, ragged=float(deviating(ev, d).float().mean()) > allowed)


def deviating(ev: Evidence, d: Diagnosis) -> Tensor:
    """Rows of a matched slot that deviate more than rounding, bool [T]."""
    assert d.tap is not None
    tail = max(noise.tail[d.tap] for noise in (ev.noise, ev.own_noise.get(d.sample, ev.noise)))
    off = ev.errors(d, d.tap) > max(ev.noise.excluded(d.tap), EXPLAINED * tail, 1e-3)
    off[0] = False
    return off


def undecided(ev: Evidence, d: Diagnosis) -> Diagnosis:
    """``d``, of which some rows deviate and nothing says why. Under routers that is said of none: they may have thrown
    these rows."""
    if ev.target.has_routers:
        return d
    off = deviating(ev, d)
    text = f"{name_rows(off)} deviate from {ev.target.all_taps[d.tap or 0]} more than rounding, and the rest do not"
    return replace(d, defects=(*d.defects, Defect("undecided", text, certain=False)))


def _run_at_an_end(errors: Tensor) -> slice | None:
    """Rows at the beginning or the end, not more than half, that have nothing of their tap."""
    lost = (errors > LOST_ERROR).tolist()
    first, last = 1, len(lost)  # row 0, the attention sink, decides nothing
    while first < len(lost) and lost[first]:
        first += 1
    while last > first and lost[last - 1]:
        last -= 1
    for run in (slice(last, len(lost)), slice(1, first)):
        if MIN_RUN <= run.stop - run.start <= len(lost) / 2:
            while run.start == last > 1 and errors[run.start - 1] > STRAY_ERROR:  # a row that is half like its own
                last -= 1
                run = slice(last, run.stop)
            return slice(0, run.stop) if run.start == 1 and lost[0] else run
    return None
