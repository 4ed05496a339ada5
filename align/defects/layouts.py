"""Slots or channels that were laid out in another order in memory."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Defect, Diagnosis, as_tap, settled
from eyas.align.noise import median_error, row_errors
from eyas.taps.match import match_taps


def find_layouts(ev: Evidence, found: list[Diagnosis]) -> list[Diagnosis]:
    """Features whose slots were laid out in another order in memory: tap after tap, or channel by channel."""
    for tensor in dict.fromkeys(slot.tensor for slot in ev.slots):
        features = [n for n, slot in enumerate(ev.slots) if slot.tensor == tensor]
        if len(features) > 1:
            found = _layout(ev, features, found)
    return found


def _layout(ev: Evidence, features: Sequence[int], found: list[Diagnosis]) -> list[Diagnosis]:
    import torch

    done = list(found)
    for sample in range(len(ev.samples)):
        bad = [d for d in done if d.sample == sample and d.slot in features and not settled(d)]
        if len(bad) < len(features) - 1 or not bad:
            continue
        slots = [ev.samples[sample].slots[n] for n in features]
        if len({len(slot) for slot in slots}) > 1 or len(slots[0]) != ev.samples[sample].num_tokens:
            continue
        whole = torch.stack(slots, 1)  # [T, A, H]
        num_tokens, num_slots, width = whole.shape
        layouts = {
            "one tap after the other over all tokens ([A, T, H] written where [T, A*H] belongs)": whole.reshape(
                num_slots, num_tokens, width
            ),
            "channel by channel ([T, H, A] written where [T, A*H] belongs)": whole.reshape(
                num_tokens, width, num_slots
            ).permute(2, 0, 1),
        }
        stack = ev.target.taps(ev.ids[sample])
        window = len(ev.ids[sample])
        for text, taken in layouts.items():
            matches = [match_taps(slot[:window], stack, ev.target.all_taps) for slot in taken]
            errors = [min(enumerate(match.errors), key=lambda pair: pair[1]) for match in matches]
            if all(error <= ev.noise.excluded(index) for index, error in errors):
                for n, (index, _) in zip(features, errors, strict=True):
                    at = next(i for i, d in enumerate(done) if (d.sample, d.slot) == (sample, n))
                    done[at] = as_tap(done[at], index, Defect("interleaved slots", text))
                break
    return done


def find_permutation(ev: Evidence, d: Diagnosis) -> tuple[int, str] | None:
    import torch

    rows = ev.rows(d.sample, d.slot)
    alive = ev.alive(d.sample, d.slot).clone()
    alive[0] = False
    if int(alive.sum()) < 16:
        return None
    stack = ev.target.taps(ev.ids[d.sample])
    x = rows[alive].float().to(stack.device)
    declared = ev.declared(d.slot)
    for index in range(len(stack)) if declared is None else [declared]:
        r = stack[index][alive.to(stack.device)].float()
        distance = torch.cdist(x.T.contiguous(), r.T.contiguous())  # [H, H]
        place = distance.argmin(0)  # for each true channel, where it is stored
        if len(set(place.tolist())) < len(place):
            continue
        if median_error(row_errors(x[:, place], r), torch.ones(len(x), dtype=torch.bool)) <= ev.explained(index):
            moved = int((place != torch.arange(len(place), device=place.device)).sum())
            if not moved:  # every channel in its place: what deviates is something else
                continue
            jumps = int((place.diff() != 1).sum())
            text = f"{moved} of {len(place)} channels of {ev.target.all_taps[index]} stand in another place"
            if jumps < len(place) // 2:
                text += f", in {jumps + 1} blocks (tensor-parallel parts joined in another order?)"
            return index, text
    return None
