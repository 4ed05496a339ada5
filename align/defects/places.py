"""Whole slots of rows from another place or another sample."""

from __future__ import annotations

from dataclasses import replace

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, as_tap, unless_explained
from eyas.align.rows import MIN_RUN


def find_place(ev: Evidence, d: Diagnosis) -> Diagnosis:
    """``d`` with where its rows come from; ``d`` itself where they are not found."""
    found = ev.search(d.sample, d.slot, ev.alive(d.sample, d.slot))
    if found is None:
        return d
    defect: Defect | None = None
    if (shifted := found.shift_from(d.sample)) is not None and shifted[1] >= MIN_RUN:
        defect = Defect("shifted rows", f"row t holds token t{shifted[0]:+d} from row {shifted[1]} on")
    elif (k := found.shift(d.sample)) is not None and k != 0:
        lost = any(defect.kind in ("missing rows", "cut off at the end") for defect in d.defects)
        if k > 1 or (k == 1 and lost):
            text = f"the first {k} row{'s are' if k > 1 else ' is'} missing: row t holds token t{k:+d}"
            defect = Defect("prefix missing", text)
        else:
            text = f"row t holds token t{k:+d}"
            if k < -1:
                text += f", as if {-k} tokens had been put in front"
            defect = Defect("shifted rows", text)
    elif (other := found.other_sample(d.sample)) is not None:
        defect = Defect("rows of another sample", f"the rows are those of sample {ev.name(other)}")
    elif found.share >= 0.7:
        mine = found.sample == d.sample
        if bool(((found.sample >= 0) & ~mine).float().mean() > 0.1):
            whose = ev.name(int(found.sample[(found.sample >= 0) & ~mine].mode().values))
            defect = Defect("rows of another sample", f"part of the rows are those of sample {whose}")
        elif float((mine & (found.token != found.rows)).float().mean()) > 0.1:
            defect = Defect("rows out of order", "the rows are this sample's in another order")
    if defect is None:
        return d
    return as_tap(replace(d, defects=unless_explained(d.defects, defect)), found.tap, defect)
