"""Rotary embeddings: what the draft's config says, what the engine reads of it, and what the target has.

transformers before 5 keeps ``rope_theta`` and ``rope_scaling``, from 5 on ``rope_parameters`` (which reads the old keys
too). A config written by one and read by an engine that is built on the other loses what it says, in silence.
"""

from __future__ import annotations

from eyas.align.checks.releases import over_releases
from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft, DraftError, Rope, declared_rope
from eyas.align.draft.config import legacy_rope
from eyas.align.loaders.base import Loading
from eyas.align.verdict import Finding

_DEFAULT_THETA = 10000.0  # of LlamaConfig and Qwen3Config in transformers 4.57.1 and 5.24.0


def check_rope(subject: Subject) -> list[Finding]:
    """What the engine reads, and whether draft and target agree."""
    if subject.draft is None:
        return []
    try:
        declared = subject.draft.config.rope
    except DraftError as error:
        return [
            Finding(
                check="rope",
                status="mismatch",
                found=str(error),
                expected="one of the two places, or the same in both",
                consequence="which one counts depends on the engine's release of transformers",
                mend="keep what the draft was trained with, and remove the other",
            )
        ]
    return [
        *over_releases(subject, lambda loading, draft: [_read(loading, draft, declared)]),
        *_against_target(subject, declared),
    ]


def _read(loading: Loading, draft: Draft, declared: Rope) -> Finding:
    loader = loading.loader
    read = declared if loader.reads_rope_parameters else legacy_rope(draft.config.layer)
    if _filled(read) == _filled(declared):
        return Finding(check="rope", status="ok", found=str(_filled(read)), source=loader.cite)
    keys = [f'"rope_theta": {declared.theta or _DEFAULT_THETA:g}']
    if declared.scaling is not None:
        keys.append(f'"rope_scaling": {_json(declared)}')
    if loader.reads_rope_parameters is None:
        return Finding(
            check="rope",
            status="unknown",
            found=f"whether {loader.label} reads rope_parameters was not read",
            expected=f"{_filled(declared)}, as it says",
            mend=", ".join(keys),
            source=loader.cite,
        )
    return Finding(
        check="rope",
        status="mismatch",
        found=f"{loader.label} reads {_filled(read)}",
        expected=f"{_filled(declared)}, as rope_parameters says",
        consequence="the draft's positions are rotated otherwise than in training: acceptance falls with the position",
        mend=", ".join(keys),
        source=f"{loader.label}, srt/models/llama.py" if loader.system == "sglang" else loader.cite,
    )


def _against_target(subject: Subject, declared: Rope) -> list[Finding]:
    if subject.target is None:
        return []
    try:
        target = declared_rope(subject.target.text)
    except DraftError as error:
        return [
            Finding(
                check="rope of the target", status="unknown", found=f"the target's config contradicts itself: {error}"
            )
        ]
    ours, theirs = _filled(declared), _filled(target)
    if ours == theirs:
        return [Finding(check="rope of the target", status="ok", found=f"the draft's too: {theirs}")]
    lost = ours.theta == theirs.theta and ours.scaling is None
    return [
        Finding(
            check="rope of the target",
            status="warning",
            found=f"the draft has {ours}" + (": the scaling was dropped" if lost else ""),
            expected=f"{theirs}, the target's, unless the draft was trained otherwise",
            consequence="if it was trained with the target's, its positions are wrong when served",
            mend=f'"rope_theta": {theirs.theta:g}, "rope_scaling": {_json(theirs)}',
        )
    ]


def _filled(rope: Rope) -> Rope:
    return Rope(theta=_DEFAULT_THETA if rope.theta is None else rope.theta, scaling=rope.scaling)


def _json(rope: Rope) -> str:
    import json

    return json.dumps(rope.scaling)
