"""Dataset and draft config: the taps that the engine would feed, by its own reading, against the taps captured."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.align.checks.subject import Subject
from eyas.align.engine import Engine
from eyas.align.readings import ConfigReading, describe_fragments, grouped, read_config
from eyas.align.verdict import Finding
from eyas.taps.conventions.entry import look_up
from eyas.taps.notation import Tap, format_taps

FED = (
    "the draft gets other tensors from the engine than it is trained on: it loads and runs without an error, and few "
    "of its tokens are accepted"
)
_SWITCH = "eagle_config.use_aux_hidden_state"
_SERVING = ("sglang", "vllm", "trtllm")


def check_taps(subject: Subject) -> list[Finding]:
    """One finding: what the engine feeds. Without a draft, what it feeds one that configures nothing."""
    if subject.engine is None:
        return [_every_engine(subject)] if subject.draft is not None else []
    engine, captured = subject.engine, subject.identity.taps
    if engine.system == "transformers":
        return [
            Finding(check="taps", status="unknown", found="transformers feeds no draft, so there is nothing to compare")
        ]
    raw = subject.draft.config.raw if subject.draft is not None else {}
    if engine.system in ("sglang", "vllm") and look_up(raw, _SWITCH) is False:
        return [_switched_off(engine, captured)]
    readings = read_config(raw, engine, subject.facts)
    if not readings:
        return [
            Finding(
                check="taps",
                status="unknown",
                found=f"how {engine} reads layer ids for {subject.facts} is unknown, since no source was read",
                expected=format_taps(captured),
                mend="give a release that was read (docs/alignment.md lists them): --engine SYSTEM@VERSION",
            )
        ]
    if engine.system == "trtllm" and all(reading.place is None for reading in readings):
        return [_in_serving_config(subject, readings)]
    cite = "; ".join(dict.fromkeys(reading.cite for reading in readings))
    wrong = [reading for reading in readings if reading.taps != captured]
    shown = "; ".join(grouped((reading.label, reading.outcome) for reading in readings))
    if not wrong:
        return [Finding(check="taps", status="ok", found=shown, source=cite)]
    if subject.draft is None:
        return [_unconfigured(subject, engine, shown, cite)]
    consequence = "\n".join(grouped((reading.label, _cause(reading, captured)) for reading in wrong))
    certain = len(wrong) == len(readings)
    return [
        Finding(
            check="taps",
            status="mismatch" if certain else "unknown",
            found=shown,
            expected=f"{format_taps(captured)}, which were captured",
            consequence=f"{consequence}\n{FED}" if certain else f"{consequence}\nin the others it is right",
            mend=_mend(subject, engine),
            source=cite,
        )
    ]


def _switched_off(engine: Engine, captured: Sequence[Tap]) -> Finding:
    return Finding(
        check="taps",
        status="mismatch",
        found=f"{_SWITCH} is false",
        expected=f"{format_taps(captured)}, which were captured",
        consequence=f"{engine} captures no taps then, and feeds the draft the target's last hidden state alone",
        mend=f"remove {_SWITCH}, or set it to true",
        source="sglang 0.5.9 to 0.5.23, srt/model_executor; vllm 0.17.0 to 0.32.0, models/llama_eagle3.py",
    )


def _mend(subject: Subject, engine: Engine) -> str:
    lines = [describe_fragments(engine, subject.identity.taps, subject.facts)]
    for other in _SERVING:
        if other != engine.system:
            lines.append(describe_fragments(Engine(other, None), subject.identity.taps, subject.facts))
    return "\n".join(lines)


def _cause(reading: ConfigReading, captured: Sequence[Tap]) -> str:
    """Why this reading is not what was captured, in a few words."""
    taps = reading.taps
    if taps is None:
        why = reading.problem
        ids = reading.stands if isinstance(reading.stands, list) else []
        if len(ids) > len(captured) and isinstance(ids[0], int) and ids[0] < 0:
            why = f"{ids[0]} in front adds a slot that was never captured: {why}"
    elif len(taps) != len(captured):
        why = f"{len(taps)} taps where {len(captured)} were captured"
    else:
        shifts = {a.layer - b.layer for a, b in zip(taps, captured, strict=True) if a.kind == b.kind == "after"}
        comparable = all(a.kind == b.kind for a, b in zip(taps, captured, strict=True))
        if comparable and len(shifts) == 1:
            (shift,) = shifts
            why = f"every tap is {abs(shift)} layer{'s' * (abs(shift) > 1)} too {'early' if shift < 0 else 'late'}"
        else:
            slots = [f"{a} for {b}" for a, b in zip(taps, captured, strict=True) if a != b]
            why = f"it feeds {', '.join(slots)}"
    if reading.place is None:
        missing = (
            f"the ids stand in {reading.ignored}, which it does not look at"
            if reading.ignored
            else "no ids are configured"
        )
        why = f"{missing}: {why}"
    return why


def _unconfigured(subject: Subject, engine: Engine, shown: str, cite: str) -> Finding:
    return Finding(
        check="taps",
        status="warning",
        found=f"{format_taps(subject.identity.taps)} were captured, and without ids {shown}",
        consequence="a draft for this dataset has to say its taps in its config",
        mend=_mend(subject, engine),
        source=cite,
    )


def _in_serving_config(subject: Subject, readings: Sequence[ConfigReading]) -> Finding:
    return Finding(
        check="taps",
        status="unknown",
        found="trtllm takes its ids from its own configuration, which is not kept with the draft",
        expected=format_taps(subject.identity.taps),
        mend=describe_fragments(Engine("trtllm", None), subject.identity.taps, subject.facts),
        source="; ".join(dict.fromkeys(reading.cite for reading in readings)),
    )


def _every_engine(subject: Subject) -> Finding:
    assert subject.draft is not None
    captured = subject.identity.taps
    readings = [
        reading
        for system in ("sglang", "vllm")
        for reading in read_config(subject.draft.config.raw, Engine(system, None), subject.facts)
    ]
    lines = grouped(
        (r.label, r.outcome + ("" if r.taps in (captured, None) else "  <- not what was captured")) for r in readings
    )
    right = sum(reading.taps == captured for reading in readings)
    return Finding(
        check="taps",
        status="ok" if readings and right == len(readings) else "unknown",
        found=f"{format_taps(captured)} captured; {right} of {len(readings)} readings of the draft's config are these",
        consequence="\n".join(lines),
        mend="say which engine will serve it: --engine SYSTEM@VERSION",
    )
