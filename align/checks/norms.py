"""Switches of the draft's forward: what it was trained with, against what the engine computes.

How it was trained is told by its tensors (input_norm.*, fc_norm.*), by the format of its trainer, or by the key,
wherever it stands in the config. The engine reads its own keys, with its own defaults.
"""

from __future__ import annotations

from eyas.align.checks.releases import over_releases
from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft
from eyas.align.loaders import trainer_of
from eyas.align.loaders.base import FLAGS, Loading, load
from eyas.align.verdict import Finding

_TENSORS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
_MEANS = {
    "norm_before_residual": "the residual is taken after hidden_norm rather than before it",
    "norm_before_fc": "one norm over the concatenated taps before fc",
    "fc_norm": "a norm for each tap before fc",
    "norm_output": "the hidden state that goes into the next step is the normed one",
}


def check_norms(subject: Subject) -> list[Finding]:
    """One finding for each switch."""
    return over_releases(subject, lambda loading, draft: [_check(flag, loading, draft) for flag in FLAGS])


def _check(flag: str, loading: Loading, draft: Draft) -> Finding:
    trained, why = _trained(flag, draft)
    served, loader = loading.flags[flag], loading.loader
    name = flag
    if trained is None:
        found = f"{'on' if served else 'off'}, as the draft's config says nothing of it"
        return Finding(check=name, status="unknown" if served else "ok", found=found, source=loader.cite)
    if trained == served:
        return Finding(check=name, status="ok", found=f"{'on' if served else 'off'} ({why})", source=loader.cite)
    places = loader.flags[flag].places
    if places:
        mend = _fragment(places[-1] if draft.config.is_speculators else places[0], trained)
        if draft.config.is_speculators and loader.view(draft.config).get(flag) is None:
            mend = f"serve with a release that passes {flag} on from this format: vllm 0.32.0"
    else:
        mend = f"{loader.label} has no such switch: serve with an engine that does (vllm 0.32.0 has all four)"
        if trained:
            mend += f", or train with {flag} off"
    return Finding(
        check=name,
        status="mismatch",
        found=f"{loader.label} computes with it {'on' if served else 'off'}",
        expected=f"{'on' if trained else 'off'}: {why}",
        consequence=f"{_MEANS[flag]}: the draft computes something else in the engine than in training",
        mend=mend,
        source=loader.cite,
    )


def _trained(flag: str, draft: Draft) -> tuple[bool | None, str]:
    """Whether the draft was trained with ``flag``, and what says so; None where nothing does."""
    part = _TENSORS.get(flag)
    if part is not None and draft.tensors:
        names = [name for name in draft.tensors if name.startswith((part, f"model.{part}", _legacy(flag)))]
        return bool(names), f"the checkpoint has {names[0]}" if names else f"the checkpoint has no {part}*"
    trainer = trainer_of(draft)
    if trainer is not None:
        said = draft.config.raw.get(flag)
        how = (
            f"{flag} is {str(said).lower()}"
            if said is not None
            else f"{trainer.label} takes a missing {flag} for false"
        )
        return load(trainer, draft).flags[flag], how
    declared = draft.config.declared(flag)
    if declared is None:
        return None, ""
    place, value = declared
    return bool(value), f"{place} is {str(value).lower()}"


def _legacy(flag: str) -> str:
    return "aux_norm_" if flag == "fc_norm" else "input_norm."


def _fragment(place: str, value: bool) -> str:
    text = "true" if value else "false"
    outer, dot, inner = place.rpartition(".")
    return f'"{outer}": {{"{inner}": {text}}}' if dot else f'"{inner}": {text}'
