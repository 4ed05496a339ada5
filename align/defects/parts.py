"""Slots that are part of a layer, by align/pieces.py."""

from __future__ import annotations

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, Kind, as_tap, settled
from eyas.align.defects.strays import deviating
from eyas.align.forward import ReplayTarget
from eyas.align.noise import median_error
from eyas.align.pieces import explain_by_pieces


def find_pieces(ev: Evidence, slot: int, found: list[Diagnosis]) -> list[Diagnosis]:
    """Parts of layers, on all unexplained samples of a slot together; of ragged ones, on the rows that deviate."""
    open_ = [d for d in found if d.slot == slot and (d.ragged or not settled(d))]
    if not open_ or not isinstance(ev.target, ReplayTarget):
        return found
    stored, nearest = [], []
    for d in open_:
        searched = deviating(ev, d) if d.ragged else ev.alive(d.sample, slot)
        index = ev.index[d.match.best] if d.match.best is not None else 0
        nearest.append(median_error(ev.errors(d, index), searched))
        stored.append((ev.ids[d.sample], ev.rows(d.sample, slot), searched))
    piece = explain_by_pieces(ev.target, stored, ev.noise, sorted(nearest)[len(nearest) // 2])
    if piece is None:
        return found
    kinds: dict[str, Kind] = {
        "combination": "part of a layer",
        "intermediate": "normed" if "norm" in piece.text else "part of a layer",
        "partial": "partial sum",
        "some partial": "partial sum",
    }
    defect = Defect(kinds[piece.what], piece.text, certain=piece.what != "some partial" or piece.error < 0.3)
    named = {d.sample for d in open_}
    return [as_tap(d, piece.layer + 1, defect) if d.slot == slot and d.sample in named else d for d in found]
