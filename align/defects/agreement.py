"""One cause for slots and samples that show it less clearly than others do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eyas.align.defects.kinds import Defect, Diagnosis, Kind, unless_explained

# What is said of rows for want of a better reason.
_DEVIATIONS: tuple[Kind, ...] = ("other weights", "altered rows", "undecided")
# What drives other slots of the sample beyond recognition, the likeliest first.
_CAUSES: tuple[Kind, ...] = (
    "context cut", "shifted rows", "prefix missing", "rows of another sample", "interleaved slots", "other weights",
    "other tokens",
)  # fmt: skip


def follow_recognized(found: Sequence[Diagnosis], num_samples: int) -> list[Diagnosis]:
    """Slots of which nothing is left follow what can be recognized: the other slots of their sample, since other
    weights and other tokens show at shallow taps what they are and drive deep ones beyond recognition; or their slot
    in most other samples."""
    weak = ("no tap of this target", "other tokens")
    of_sample: dict[int, Defect] = {}
    for kind in _CAUSES:
        for d in found:
            for defect in d.defects:
                if defect.kind == kind:
                    of_sample.setdefault(d.sample, defect)
    of_slot: dict[int, Defect] = {}
    for slot in {d.slot for d in found}:
        strong = [x for d in found if d.slot == slot for x in d.defects if x.kind not in weak]
        kinds = [x.kind for x in strong]
        usual = max(kinds, key=kinds.count, default=None)
        if usual is not None and kinds.count(usual) > num_samples / 2:
            of_slot[slot] = next(x for x in strong if x.kind == usual)

    def followed(d: Diagnosis, defect: Defect) -> Defect:
        in_sample, in_slot = of_sample.get(d.sample), of_slot.get(d.slot)
        if defect.kind in _DEVIATIONS:
            if in_sample is not None and in_sample.kind not in (*_DEVIATIONS, *weak):
                return in_sample
            return in_slot or defect
        if defect.kind not in weak:
            return defect
        if in_sample is None or in_sample.kind == "other tokens":
            return in_slot or in_sample or defect
        return in_sample

    done = []
    for d in found:
        defects = tuple(dict.fromkeys(followed(d, defect) for defect in d.defects))
        for defect in defects:
            defects = unless_explained(defects, defect)
        # A tap that was read off a channel profile is not one that other weights leave to be read.
        done.append(d if defects == d.defects else replace(d, tap=None, defects=defects))
    return done
