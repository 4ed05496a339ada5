"""From diagnoses to findings: what a user reads, with what follows and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eyas.align.stored import LAST_HIDDEN, Slot, StoredSample, format_slots
from eyas.align.verdict import RECAPTURE, Finding
from eyas.align.weights import QUIET_COSINE
from eyas.taps.notation import EMBED, FINAL, Tap, format_taps

if TYPE_CHECKING:
    from eyas.align.defects.kinds import Defect, Diagnosis, Examination
    from eyas.align.forward import Replayed
    from eyas.align.noise import Noise

# Per kind of defect: what follows, and how to mend it.
_STORIES: dict[str, tuple[str, str]] = {
    "scaled": ("the draft learns inputs of a size that the engine never feeds", RECAPTURE),
    "shifted rows": (
        "every row belongs to another token than input_ids and loss_mask say: the draft learns to predict from the "
        "wrong position",
        "shift the rows back by as many tokens, or " + RECAPTURE,
    ),
    "prefix missing": (
        "states of the prompt's beginning are not there (an engine's prefix cache skips what it computed before), and "
        "what follows may stand at the wrong token",
        "turn prefix caching off for the capture (vLLM: --no-enable-prefix-caching, SGLang: --disable-radix-cache), "
        "and " + RECAPTURE,
    ),
    "cut off at the end": ("the last tokens of the sample have no states", "drop these rows, or " + RECAPTURE),
    "missing rows": ("tokens without states are trained on as if they had some", RECAPTURE),
    "rows of another sample": (
        "tokens are paired with the states of another conversation (requests of one batch mixed up)",
        "key captured states by request, not by place in the batch, and " + RECAPTURE,
    ),
    "rows out of order": ("tokens are paired with states of other tokens", RECAPTURE),
    "other tokens": (
        "the states were computed for other tokens than input_ids (another sample, chat template or tokenizer)",
        RECAPTURE,
    ),
    "partial sum": (
        "a summand is missing: the state was taken before the tensor-parallel ranks were summed (fused all-reduce), "
        "and the engine feeds the whole sum",
        "take the tap after the all-reduce (SGLang: --disable-flashinfer-allreduce-fusion where it exists), or merge "
        "all ranks' parts; then " + RECAPTURE,
    ),
    "part of a layer": (
        "the engine feeds the residual stream after the layer, which is more than this tensor",
        "add what is missing: engines that carry (hidden_states, residual) need their sum; then " + RECAPTURE,
    ),
    "normed": (
        "pre-norm and post-norm are mixed up: the engine feeds the residual stream before any next norm",
        "take the tap before the norm, and " + RECAPTURE,
    ),
    "interleaved slots": (
        "each slot holds parts of several taps",
        "write the features as [T, A*H], the taps of one token back to back",
    ),
    "permuted channels": ("the draft's fc would learn channels in an order the engine does not feed", RECAPTURE),
    "missing channels": ("part of every state is zero (a tensor-parallel part that was not gathered)", RECAPTURE),
    "context cut": (
        "the states do not know the tokens before the cut (a chunk computed without its prefix's cache)",
        RECAPTURE,
    ),
    "drifts with position": (
        "positions or attention differ: RoPE theta or scaling, or the attention window, are not the target's",
        "compare rope_parameters / rope_scaling and sliding_window of what was captured with the target's, and "
        + RECAPTURE,
    ),
    "quantized target": (
        "the draft learns the states of the quantized target, and its acceptance drops where the plain one is served",
        "give the target that was captured (--target), or serve the draft with that quantization",
    ),
    "other weights": (
        "the states come from another revision, fine-tune, adapter or quantization than the target given",
        "give the target that was captured (--target, its revision), or " + RECAPTURE,
    ),
    "altered rows": (
        "what the draft learns from is not what the target computed: noise, clipping, another precision or a part "
        "that is missing",
        RECAPTURE,
    ),
    "coarser values": (
        "states were rounded more coarsely than their dtype, and than what the engine feeds",
        "store the activations as the target computes them (bfloat16), and " + RECAPTURE,
    ),
    "damaged rows": (
        "these rows are no states of their tokens, and the draft learns from them as from any other",
        "leave these samples out of the training (eyas capture takes them again once their shards are removed), and "
        "find what wrote them: memory that was freed or overwritten before it was copied does this",
    ),
    "dead": ("the draft learns from nothing here", RECAPTURE),
    "constant": ("the draft learns from nothing here", RECAPTURE),
    "not finite": ("one NaN or Inf makes the whole loss NaN", "reject these samples, and " + RECAPTURE),
    "no tap of this target": (
        "whatever the draft would learn from these is not what any engine feeds it for this target",
        "give the target that was captured (--target), or " + RECAPTURE,
    ),
    "undecided": ("training on it may work or not", "replay more samples (--replay 32), or compare with the engine"),
}


_SHOWN = 4  # samples whose rows are listed

# Defects whose text says what the slot holds better than a tap could.
_DEVIATIONS = ("quantized target", "other weights", "altered rows", "undecided", "drifts with position")
_NO_WHOLE_TAP = ("partial sum", "part of a layer", "normed", "other tokens")


def examination_findings(
    target: Replayed, slots: Sequence[Slot], samples: Sequence[StoredSample], found: Examination, noise: Noise
) -> list[Finding]:
    """The findings about every slot, then about the weights."""
    findings: list[Finding] = []
    actual = [_majority(found.of_slot(n)) for n in range(len(slots))]
    findings += _tap_findings(target, slots, samples, found, noise)
    findings += _defect_findings(target, slots, samples, actual, found, noise)
    findings += _weights_finding(target, found, noise)
    return findings


def _weights_finding(target: Replayed, found: Examination, noise: Noise) -> list[Finding]:
    """Where no deviation is left to explain: how large a change of weights would have been seen. Whether there is a
    smaller one, states cannot tell; the weights' checksum can."""
    compared = sorted({d.tap for d in found.diagnoses if d.explained and d.tap is not None})
    if not compared or any(not d.explained for d in found.diagnoses):
        return []
    deepest = compared[-1]
    text = (
        f"deviations are rounding. Other weights would be in doubt from {noise.explained(deepest):.2%} and certain "
        f"from {noise.excluded(deepest):.2%} at {target.all_taps[deepest]} on (the detection floor)"
    )
    if found.proven:
        return [Finding(check="replay weights", status="ok", found=text)]
    if found.unseen is not None:
        text += f"; weights that all differ by less than {found.unseen:.1%} of their spread stay below it"
    least = QUIET_COSINE / (1 - QUIET_COSINE**2) ** 0.5 * noise.level[deepest]
    below = [f"{p.scheme} ({p.size:.2%})" for p in found.projections if p.size < least]
    if below:
        text += f", and so do {', '.join(below)}"
    return [
        Finding(
            check="replay weights",
            status="unknown",
            found=text,
            expected="the checksum of the weights that were captured with, which a dataset of eyas capture keeps: it "
            "would be the target's. Without it, a revision or a quantization below the floor cannot be told",
            mend="compare the weight files with those that were captured with (sha256sum), or capture with eyas",
        )
    ]


def _whole_taps(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Those whose rows are a tap, whatever else is wrong with them."""
    return [d for d in diagnoses if d.tap is not None and not any(x.kind in _NO_WHOLE_TAP for x in d.defects)]


def _majority(diagnoses: Sequence[Diagnosis]) -> int | None:
    """The tap most samples agree on."""
    taps = [d.tap for d in _whole_taps(diagnoses)]
    return max(set(taps), key=taps.count) if taps else None


def _tap_findings(
    target: Replayed, slots: Sequence[Slot], samples: Sequence[StoredSample], found: Examination, noise: Noise
) -> list[Finding]:
    """One finding a slot that matches, and one for all slots of the same samples whose tap is another than declared
    (where nothing is declared: than most samples')."""
    every = target.all_taps
    index = {tap: n for n, tap in enumerate(every)}
    expected: list[int | None] = [
        _majority(found.of_slot(n)) if slot.declared is None else index[slot.declared] for n, slot in enumerate(slots)
    ]
    findings = []
    for n, slot in enumerate(slots):
        whole = [d for d in found.of_slot(n) if d.explained and d.tap == expected[n]]
        if whole:
            at = whole[0].tap
            assert at is not None
            text = f"{every[at]}: {_distances(whole, at, noise)}"
            if len(whole) < len(samples):
                text += f", {_samples([d.sample for d in whole], samples)}"
            findings.append(Finding(check=f"replay {slot.name}", status="ok", found=text))
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}  # (slot, tap) of all wrong ones -> samples
    for sample in range(len(samples)):
        whole = _whole_taps([d for d in found.diagnoses if d.sample == sample])
        wrong = tuple((d.slot, d.tap) for d in whole if d.tap is not None and d.tap != expected[d.slot])
        if wrong:
            groups.setdefault(wrong, []).append(sample)
    for wrong, hit in groups.items():
        really = [dict(wrong).get(slot, expected[slot]) for slot in range(len(slots))]
        actual = [None if at is None else every[at] for at in really]
        pretended = [None if at is None else every[at] for at in expected]
        name, why = _relation(pretended, actual, [slot for slot, _ in wrong], target)
        evidence = "; ".join(
            f"{slots[slot].name} is {every[tap]}, "
            + _distances([d for d in found.of_slot(slot) if d.sample in hit], tap, noise)
            for slot, tap in wrong
        )
        there = format_taps([every[tap] for _, tap in wrong])
        meant = format_taps([was for slot, _ in wrong if (was := pretended[slot]) is not None])
        findings.append(
            Finding(
                check=f"replay {format_slots([slots[slot] for slot, _ in wrong])}",
                status="mismatch",
                found=f"{name}: {there}, {_samples(hit, samples)}; {evidence}",
                expected=f"{meant}, as {'declared' if slots[wrong[0][0]].declared else 'in the other samples'}",
                consequence=why,
                mend=_tap_mend(slots, actual, whole=len(hit) == len(samples)),
            )
        )
    return findings


def _samples(hit: Sequence[int], samples: Sequence[StoredSample]) -> str:
    """``in every sample`` or ``in 2 of 8 samples (<names>)``."""
    distinct = sorted(set(hit))
    if len(distinct) == len(samples):
        return "in every sample"
    names = ", ".join(samples[n].name for n in distinct[:3]) + (", ..." if len(distinct) > 3 else "")
    return f"in {len(distinct)} of {len(samples)} samples ({names})"


def _distances(diagnoses: Sequence[Diagnosis], index: int, noise: Noise) -> str:
    """``0.8 % away (rounding alone: 1.1 %), next after:4 at 24 %``, medians over samples."""
    errors = sorted(d.match.errors[index] for d in diagnoses)
    runner_up = [
        (d.match.runner_up, d.match.runner_up_error)
        if d.match.best_error == d.match.errors[index]
        else (d.match.best, d.match.best_error)
        for d in diagnoses
    ]
    runner_up.sort(key=lambda pair: pair[1])
    text = f"{errors[len(errors) // 2]:.2%} away (rounding explains {noise.explained(index):.2%})"
    tap, error = runner_up[len(runner_up) // 2]
    return f"{text}, next {tap} at {error:.0%}" if tap is not None else text


def _relation(
    pretended: Sequence[Tap | None], actual: Sequence[Tap | None], wrong: Sequence[int], target: Replayed
) -> tuple[str, str]:
    """The name of how the taps of slots ``wrong`` differ from what they pretend to be, and what follows."""
    order = {tap: n for n, tap in enumerate(target.all_taps)}
    declared = [pretended[n] for n in wrong]
    taken = [actual[n] for n in wrong]
    steps = {order[a] - order[d] for d, a in zip(declared, taken, strict=True) if d is not None and a is not None}
    last = order[FINAL] - 1
    if sorted(taken, key=str) == sorted(declared, key=str):
        return "swapped order", (
            "the taps are all there, in another order than declared: engines concatenate in ascending depth, so the "
            "draft's fc would get each tap on another's columns"
        )
    if all({order[d], order[a]} == {last, last + 1} for d, a in zip(declared, taken, strict=True)
           if d is not None and a is not None):  # fmt: skip
        return "pre-norm and post-norm mixed up", (
            "after:{L-1} is before the target's final norm and final is after it: who trains or serves with the wrong "
            "one applies the norm twice or not at all"
        )
    if any(a == EMBED and d != EMBED for d, a in zip(declared, taken, strict=True)):
        name = "embedding where a layer was meant"
        if steps == {-1}:
            name += ", off by one"
        return name, (
            "an embedding knows nothing of the context: the draft loses one of its taps (a -1 or a 0 in front of the "
            "layer ids does this)"
        )
    if len(steps) == 1 and abs(next(iter(steps))) == 1:
        late = next(iter(steps)) == 1
        return f"off by one, one layer {'late' if late else 'early'}", (
            f"layer ids were read in another convention than was meant (id k as after:{'k' if late else 'k-1'} instead "
            f"of after:{'k-1' if late else 'k'}): a draft trained on this is fed other layers by the engine"
        )
    if len(set(taken)) < len(taken) or any(
        a in [actual[n] for n in range(len(actual)) if n not in wrong] for a in taken
    ):
        return "the same tap twice", "the draft gets one tap less than it has inputs for"
    return "another layer", "the draft would be trained on other layers than the engine feeds it"


def _tap_mend(slots: Sequence[Slot], actual: Sequence[Tap | None], *, whole: bool) -> str:
    features = [tap for slot, tap in zip(slots, actual, strict=True) if slot.name != LAST_HIDDEN]
    text = "capture again with the taps that are meant (eyas capture --taps ...)"
    if not whole:
        return f"these samples' shards come from another configuration than the rest: remove them and {text}"
    taps = [tap for tap in features if tap is not None]
    if len(taps) == len(features) and len(set(taps)) == len(taps):
        if taps == sorted(taps):
            return (
                f"what is here is {format_taps(taps)}: train and serve with these taps and say so in dataset.json, or "
                f"{text}"
            )
        return f"what is here is {format_taps(taps)}: put the slots in ascending depth, or {text}"
    return text


def _defect_findings(
    target: Replayed,
    slots: Sequence[Slot],
    samples: Sequence[StoredSample],
    actual: Sequence[int | None],
    found: Examination,
    noise: Noise,
) -> list[Finding]:
    """Equal defects of several slots are one finding."""
    by_defect: dict[tuple[str, str], dict[int, list[Diagnosis]]] = {}
    for d in found.diagnoses:
        for defect in d.defects:
            by_defect.setdefault((defect.kind, _key(defect)), {}).setdefault(d.slot, []).append(d)
    findings = []
    for (kind, _), per_slot in by_defect.items():
        concerned = [d for group in per_slot.values() for d in group]
        defects = list(dict.fromkeys(defect for d in concerned for defect in d.defects if defect.kind == kind))
        where = _samples([d.sample for d in concerned], samples)
        taps = [target.all_taps[tap] for n in per_slot if slots[n].declared is None and (tap := actual[n]) is not None]
        of = f" (of {format_taps(taps)})" if taps else ""
        text = defects[0].text + of + (f" (and {len(defects) - 1} alike)" if len(defects) > 1 else "")
        if kind == "damaged rows":
            text = f"{_by_sample(kind, concerned, samples)} are no states of their tokens, as far as rounding goes"
        consequence, mend = _STORIES[kind]
        certain = any(defect.certain for defect in defects)
        status = "mismatch" if certain and kind != "undecided" else "warning" if kind == "coarser values" else "unknown"
        expected = _expected(kind, [slots[n] for n in per_slot], concerned, target, noise)
        findings.append(
            Finding(
                check=f"replay {format_slots([slots[n] for n in per_slot])}",
                status=status,  # type: ignore[arg-type]
                found=f"{kind}: {text}, {where}{_numbers(concerned, found, kind)}",
                expected=expected,
                consequence=consequence,
                mend=mend,
            )
        )
    return findings


def _by_sample(kind: str, concerned: Sequence[Diagnosis], samples: Sequence[StoredSample]) -> str:
    """``row 5 of 40 of <sample>; row 7 of 33 of <sample> and 2 more``: which rows of which sample."""
    texts = dict.fromkeys(
        f"{defect.text} of sample {samples[d.sample].name}"
        for d in concerned for defect in d.defects if defect.kind == kind
    )  # fmt: skip
    shown = list(texts)[:_SHOWN]
    return "; ".join(shown) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def _key(defect: Defect) -> str:
    """What must be equal for two samples' defects to be reported as one: texts that name rows or samples need not."""
    return "" if defect.kind not in ("partial sum", "part of a layer", "normed") else defect.text


def _expected(kind: str, slots: Sequence[Slot], concerned: Sequence[Diagnosis], target: Replayed, noise: Noise) -> str:
    if kind in _DEVIATIONS:
        indices = sorted({d.tap for d in concerned if d.tap is not None})
        if indices:
            explained = max(noise.explained(index) for index in indices)
            floor = max(noise.excluded(index) for index in indices)
            return (
                f"at most {explained:.2%}, what rounding explains. Other weights are certain from {floor:.2%} on (the "
                f"detection floor); between the two only quantizations of known kinds are"
            )
    declared = [str(slot.declared) for slot in slots if slot.declared is not None]
    return f"whole rows of {', '.join(declared)}, one for each token" if declared else "whole rows of one tap"


def _numbers(concerned: Sequence[Diagnosis], found: Examination, kind: str) -> str:
    if kind == "quantized target":
        best = found.projections[0]
        return f" (deviation {best.scale:.2f} times that of the scheme, cosine {best.cosine:.2f})"
    if kind in _DEVIATIONS:
        errors = sorted(d.match.errors[d.tap] for d in concerned if d.tap is not None)
        return f" ({errors[0]:.2%} to {errors[-1]:.2%} away)" if errors else ""
    if kind == "no tap of this target":
        nearest = min(concerned, key=lambda d: d.match.best_error)
        return f" (nearest {nearest.match.best} at {nearest.match.best_error:.0%})"
    return ""
