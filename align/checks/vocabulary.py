"""The draft's vocabulary: d2t offsets, t2d, and the rows of lm_head.

d2t is int64 [D] and holds offsets: draft id i stands for target id i + d2t[i]. Both engines compute it that way (vLLM
0.32.0, model_executor/models/llama_eagle3.py ``compute_logits``; SGLang 0.5.23, srt/models/llama_eagle3.py
``load_weights``). Trainers take the head's rows in ascending order of target ids, so the map ascends strictly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.align.checks.releases import over_releases
from eyas.align.checks.subject import Subject
from eyas.align.draft import Draft
from eyas.align.loaders.base import Loading
from eyas.align.verdict import Finding

_SOURCE = "vllm 0.32.0, model_executor/models/llama_eagle3.py; sglang 0.5.23, srt/models/llama_eagle3.py"
_OTHER_TOKENS = "every proposal is translated into another token than the draft meant: almost none is accepted"
_RECOMPUTE = "d2t = t2d.nonzero().squeeze(1) - torch.arange(draft_vocab_size), int64"


def check_vocabulary(subject: Subject) -> list[Finding]:
    """lm_head, d2t and t2d of a checkpoint. Nothing for a folder that holds a config alone."""
    draft = subject.draft
    if draft is None or not draft.tensors:
        return []
    return [*_head_rows(draft), *_d2t(draft), *over_releases(subject, _full_vocabulary)]


def _head_rows(draft: Draft) -> list[Finding]:
    head, config = draft.find("lm_head.weight"), draft.config
    if head is None:
        return []
    wanted = config.draft_vocab_size or config.vocab_size
    if head.shape == (wanted, config.hidden_size):
        return [Finding(check="draft lm_head rows", status="ok", found=f"{wanted}")]
    rows = head.shape[0]
    return [
        Finding(
            check="draft lm_head rows",
            status="mismatch",
            found=f"lm_head.weight {list(head.shape)}",
            expected=f"[{wanted}, {config.hidden_size}], draft vocabulary by hidden size",
            consequence="the engine refuses the draft, or reads rows of other tokens",
            mend=f'"draft_vocab_size": {rows}'
            if len(head.shape) == 2 and head.shape[1] == config.hidden_size
            else "save the head as [draft_vocab_size, hidden_size]",
        )
    ]


def _d2t(draft: Draft) -> list[Finding]:
    config, d2t = draft.config, draft.d2t
    size = config.draft_vocab_size or config.vocab_size
    if size > config.vocab_size:
        return [
            _mismatch(
                "draft d2t",
                f"draft_vocab_size {size} of a vocabulary of {config.vocab_size}",
                "at most the target's",
                "draft ids stand for no token",
                f'"draft_vocab_size": {config.vocab_size} or fewer',
            )
        ]
    if d2t is None:
        if size == config.vocab_size:
            return [Finding(check="draft d2t", status="ok", found="none, as the draft has the target's vocabulary")]
        return [
            _mismatch(
                "draft d2t",
                f"none, and draft_vocab_size {size} of {config.vocab_size}",
                f"int64 [{size}], target id = i + d2t[i]",
                f"engines take draft id i for target id i without it: {_OTHER_TOKENS}",
                _RECOMPUTE if draft.t2d is not None else "save d2t with the checkpoint, from the run that trained it",
            )
        ]
    if d2t.ndim != 1 or len(d2t) != size:
        return [
            _mismatch(
                "draft d2t",
                f"shape {list(d2t.shape)}",
                f"[{size}], one offset for each draft id",
                "the engine refuses the draft",
                f'"draft_vocab_size": {len(d2t)}' if d2t.ndim == 1 else _RECOMPUTE,
            )
        ]
    if d2t.dtype.kind not in "iu":
        return [_mismatch("draft d2t", f"dtype {d2t.dtype}", "int64", "offsets are cast, and may round", _RECOMPUTE)]
    findings = [_values(draft, d2t.astype(np.int64), size), *_t2d(draft, d2t.astype(np.int64), size)]
    if d2t.dtype != np.int64 and findings[0].status == "ok":
        findings[0] = Finding(
            check="draft d2t",
            status="warning",
            found=f"right, but {d2t.dtype}",
            expected="int64",
            consequence="engines that convert it serve it; others may not",
            mend="d2t = d2t.long()",
        )
    return findings


def _values(draft: Draft, d2t: npt.NDArray[np.int64], size: int) -> Finding:
    vocab = draft.config.vocab_size
    index = np.arange(size)
    targets = index + d2t
    chosen = _chosen(draft)
    in_range = bool(((targets >= 0) & (targets < vocab)).all())
    ascending = bool((np.diff(targets) > 0).all())
    if chosen is not None and len(chosen) == size and np.array_equal(targets, chosen):
        return Finding(check="draft d2t", status="ok", found=f"{size} offsets into {vocab} ids", source=_SOURCE)
    if np.array_equal(d2t, index) and size > 1:
        return _mismatch(
            "draft d2t",
            "d2t[i] = i, the draft ids themselves (an arange)",
            "offsets: target id = i + d2t[i]",
            f"draft id i stands for 2i: {_OTHER_TOKENS}",
            "d2t = torch.zeros(draft_vocab_size, dtype=torch.long) if the draft has the first ids, else " + _RECOMPUTE,
        )
    absolute = bool(((d2t >= 0) & (d2t < vocab)).all() and (np.diff(d2t) > 0).all())
    if absolute and (not in_range or (chosen is not None and np.array_equal(d2t, chosen))):
        return _mismatch(
            "draft d2t",
            "d2t[i] is the target id itself",
            "offsets: target id = i + d2t[i]",
            f"engines add i to it: {_OTHER_TOKENS}",
            "d2t = d2t - torch.arange(draft_vocab_size)",
        )
    if not in_range:
        first = int(np.flatnonzero((targets < 0) | (targets >= vocab))[0])
        return _mismatch(
            "draft d2t",
            f"draft id {first} stands for {targets[first]}",
            f"target ids 0 to {vocab - 1}",
            "the engine indexes outside the vocabulary: it fails, or proposes garbage",
            _RECOMPUTE,
        )
    if not ascending:
        repeated = size - len(np.unique(targets))
        return _mismatch(
            "draft d2t",
            f"{repeated} draft ids stand for a target id that another has" if repeated else "target ids do not ascend",
            "strictly ascending target ids, in the order of the head's rows",
            f"rows of lm_head are read as other tokens than they were taken for: {_OTHER_TOKENS}",
            _RECOMPUTE,
        )
    if chosen is not None:
        return _mismatch(
            "draft d2t",
            f"{len(np.setdiff1d(targets, chosen))} of its {size} target ids are not chosen in t2d",
            "the ids that t2d marks, in ascending order",
            f"the draft was trained with one vocabulary and is served with another: {_OTHER_TOKENS}",
            _RECOMPUTE + ", from the run that trained the head",
        )
    if absolute and size > 8:
        return Finding(
            check="draft d2t",
            status="unknown",
            found="no two of its target ids are neighbours, so these may be target ids rather than offsets",
            expected="offsets: target id = i + d2t[i]",
            mend="save t2d with the checkpoint, which decides it",
        )
    if not d2t.any() and size < vocab:
        return Finding(
            check="draft d2t",
            status="warning",
            found=f"all zeros: the draft's vocabulary is the target's first {size} ids",
            expected="the most frequent ids of the training data, usually",
            consequence="right if that is what was trained; zeros are also what a map that was never filled holds",
            mend=_RECOMPUTE + ", from the run that trained the head",
        )
    return Finding(check="draft d2t", status="ok", found=f"{size} offsets into {vocab} ids", source=_SOURCE)


def _chosen(draft: Draft) -> npt.NDArray[np.int64] | None:
    """The target ids that t2d marks, ascending: int64 [n]."""
    t2d: npt.NDArray[Any] | None = draft.t2d
    return None if t2d is None or t2d.ndim != 1 else np.flatnonzero(t2d).astype(np.int64)


def _t2d(draft: Draft, d2t: npt.NDArray[np.int64], size: int) -> list[Finding]:
    t2d, chosen = draft.t2d, _chosen(draft)
    if t2d is None:
        return []
    if chosen is None or t2d.shape != (draft.config.vocab_size,):
        return [
            _mismatch(
                "draft t2d",
                f"shape {list(t2d.shape)}",
                f"[{draft.config.vocab_size}], one mark for each target id",
                "trainers refuse the map",
                "t2d = torch.zeros(vocab_size, dtype=torch.bool); t2d[torch.arange(len(d2t)) + d2t] = True",
            )
        ]
    if len(chosen) != size:
        return [
            _mismatch(
                "draft t2d",
                f"marks {len(chosen)} ids",
                f"{size}, the draft's vocabulary",
                "the head that a trainer takes with it has another number of rows",
                "t2d = torch.zeros(vocab_size, dtype=torch.bool); t2d[torch.arange(len(d2t)) + d2t] = True",
            )
        ]
    return [Finding(check="draft t2d", status="ok", found=f"marks {size} of {len(t2d)} ids")]


def _full_vocabulary(loading: Loading, draft: Draft) -> list[Finding]:
    config = draft.config
    size = config.draft_vocab_size or config.vocab_size
    if draft.d2t is None or size != config.vocab_size or loading.loader.full_vocab_d2t == "used":
        return []
    return [
        Finding(
            check="draft d2t name",
            status="mismatch",
            found="a d2t, and the draft has the target's vocabulary",
            expected="none",
            consequence=f"{loading.loader.label} has no place for it then and refuses the draft",
            mend="remove d2t and t2d from the checkpoint",
            source=loading.loader.cite,
        )
    ]


def _mismatch(check: str, found: str, expected: str, consequence: str, mend: str) -> Finding:
    return Finding(
        check=check,
        status="mismatch",
        found=found,
        expected=expected,
        consequence=consequence,
        mend=mend,
        source=_SOURCE,
    )
