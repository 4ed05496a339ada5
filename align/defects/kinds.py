"""What an examination says: kinds of defects, and a diagnosis for each slot of each sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from eyas.align.weights import Projection
from eyas.taps.match import Match

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal[
    "scaled", "shifted rows", "prefix missing", "cut off at the end", "rows of another sample", "rows out of order",
    "partial sum", "part of a layer", "normed", "interleaved slots", "permuted channels", "missing channels",
    "context cut", "drifts with position", "quantized target", "other weights", "altered rows", "coarser values",
    "dead", "constant", "not finite", "missing rows", "damaged rows", "other tokens", "no tap of this target",
    "undecided",
]  # fmt: skip

_SHOWN = 6  # rows that are listed one by one


@dataclass(frozen=True)
class Defect:
    """What is wrong, in a form that is equal for equal defects of several slots and samples."""

    kind: Kind
    text: str  # what was found, without the numbers of one sample
    certain: bool = True


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One slot of one sample. ``tap`` is the index in Replayed.all_taps of what it is, None where it is none."""

    slot: int
    sample: int
    tap: int | None
    match: Match  # of the rows as they stand
    defects: tuple[Defect, ...]
    rearranged: bool = False  # ``tap`` comes from a hypothesis, and the rows as they stand are not it
    ragged: bool = False  # most rows are ``tap``, and too many deviate from it

    @property
    def explained(self) -> bool:
        """A tap within rounding, with nothing worse about it than a warning."""
        return self.tap is not None and not any(defect.certain or defect.kind == "undecided" for defect in self.defects)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Everything that was found, and what it was measured in."""

    diagnoses: tuple[Diagnosis, ...]
    projections: tuple[Projection, ...]  # on quantization schemes, best first; empty where nothing called for them
    proven: bool  # that the weights are those that were captured with
    unseen: float | None = None  # a change of all weights, relative to their spread, up to which none would be seen

    def of_slot(self, slot: int) -> list[Diagnosis]:
        return [diagnosis for diagnosis in self.diagnoses if diagnosis.slot == slot]


def as_tap(d: Diagnosis, tap: int, defect: Defect) -> Diagnosis:
    """``d`` with its rows found to be ``tap`` after all, but for ``defect``."""
    return replace(d, tap=tap, defects=(*d.defects, defect), rearranged=True)


def settled(d: Diagnosis) -> bool:
    """Explained by a tap or a hypothesis, or with nothing in it to explain."""
    return d.tap is not None or not d.match.num_tokens or any(x.kind in ("dead", "constant") for x in d.defects)


def unless_explained(defects: tuple[Defect, ...], by: Defect) -> tuple[Defect, ...]:
    """Rows missing at the end follow from rows cut at the beginning."""
    if by.kind not in ("prefix missing", "shifted rows"):
        return defects
    return tuple(defect for defect in defects if defect.kind not in ("missing rows", "cut off at the end"))


def name_rows(flags: Tensor, what: str = "rows") -> str:
    """Where flags [N] are set, in words that are short: "rows 0 to 31 of 64" or "rows 3, 17 of 64"."""
    import torch

    places = torch.nonzero(flags).flatten().tolist()
    if len(places) == len(flags):
        return f"all {what}"
    if len(places) > 1 and places[-1] - places[0] == len(places) - 1:
        return f"{what} {places[0]} to {places[-1]} of {len(flags)}"
    if len(places) == 1:
        return f"{what.removesuffix('s')} {places[0]} of {len(flags)}"
    shown = ", ".join(str(place) for place in places[:_SHOWN])
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return f"{what} {shown}{more} of {len(flags)}"
