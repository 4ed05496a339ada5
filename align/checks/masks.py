"""Loss masks against the target's chat template: whose turns are trained, and whether the mask is shifted.

The template is rendered on a made-up conversation to learn what it puts before an answer (the header) and which token
ends one. In the tokens of a few samples an answer then goes from behind a header to the next such token. What the
template does not show this way, or what is not found in the tokens, is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.align.checks.data import LookedAt
from eyas.align.checks.subject import Subject
from eyas.align.verdict import Finding

_QUESTIONS = ("eyasquestionone", "eyasquestiontwo")
_ANSWERS = ("eyasanswerone", "eyasanswertwo")
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
_MANY = 3  # runs or samples from which on a pattern is one
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Turns:
    """How a template separates turns, in token ids."""

    header: tuple[int, ...]  # what stands before every answer, e.g. <|im_start|>assistant\\n
    end: int  # the first token behind an answer
    prompts_thinking: bool  # whether the default generation prompt leaves thinking to the model

    def answers(self, ids: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
        """[start, end) of each answer in ``ids`` [T], its end token included."""
        size = len(self.header)
        windows = np.lib.stride_tricks.sliding_window_view(ids, size) if len(ids) >= size else np.empty((0, size))
        starts = np.flatnonzero((windows == np.asarray(self.header)).all(axis=1)) + size
        ends = np.flatnonzero(ids == self.end)
        found = []
        for start in starts.tolist():
            later = ends[ends >= start]
            found.append((start, int(later[0]) + 1 if len(later) else len(ids)))
        return found


@dataclass
class _Tally:
    samples: int = 0
    unread: int = 0
    trained: int = 0
    in_answers: int = 0  # tokens of answers, trained or not
    elsewhere: int = 0  # trained tokens two or more away from any answer
    starts: dict[int, int] | None = None  # where runs start, relative to their answer's first own token
    empty_thinking: int = 0
    empty_thinking_trained: int = 0


def check_masks(subject: Subject, looked_at: LookedAt) -> list[Finding]:
    """Whose turns are trained, and from which token on."""
    if subject.target is None:
        return [_unknown("the target's tokenizer is not at hand", "give --target")]
    from eyas.capture.errors import TargetError

    try:
        tokenizer = subject.target.tokenizer
    except TargetError as error:
        return [_unknown(str(error), "give the folder of the target with its tokenizer")]
    turns = learn_turns(tokenizer)
    if turns is None:
        return [_unknown("the target's chat template does not show where answers begin and end", "")]
    tally = _count(turns, tokenizer, looked_at)
    if tally.samples == tally.unread:
        return [
            _unknown(
                f"no header of an answer was found in {tally.samples} samples: they were rendered by another template",
                "",
            )
        ]
    seen = f"{tally.samples - tally.unread} samples looked at"
    return [*_role(tally, seen), *_thinking(turns, tally, seen)]


def learn_turns(tokenizer: Any) -> Turns | None:
    """What the tokenizer's template puts around an answer; None where it has none or does not show it."""
    from jinja2 import TemplateError

    conversation = [
        {"role": role, "content": text}
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, text in (("user", question), ("assistant", answer))
    ]
    try:
        whole = tokenizer.apply_chat_template(conversation, tokenize=False)
        alone = tokenizer.apply_chat_template(conversation[:1], tokenize=False)
        prompt = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, KeyError):
        return None
    if any(whole.count(text) != 1 for text in (*_QUESTIONS, *_ANSWERS)) or _QUESTIONS[0] not in prompt:
        return None
    before = [whole.split(q)[1].split(a)[0] for q, a in zip(_QUESTIONS, _ANSWERS, strict=True)]
    behind_question = alone.split(_QUESTIONS[0])[1]
    generated = prompt.split(_QUESTIONS[0])[1]
    header = _common_start([*before, generated]).removeprefix(behind_question)
    behind = whole.split(_ANSWERS[0])[1].split(_QUESTIONS[1])[0]
    header_ids = tokenizer.encode(header, add_special_tokens=False)
    behind_ids = tokenizer.encode(behind, add_special_tokens=False)
    if not header.strip() or not header_ids or not behind_ids or behind_ids[0] in header_ids:
        return None
    return Turns(
        header=tuple(header_ids),
        end=behind_ids[0],
        prompts_thinking="<think>" in (tokenizer.chat_template or "") and not _EMPTY_THINKING.search(generated),
    )


def _common_start(texts: Sequence[str]) -> str:
    """The longest text that all of ``texts`` begin with."""
    size = 0
    while all(len(text) > size and text[size] == texts[0][size] for text in texts):
        size += 1
    return texts[0][:size]


def _count(turns: Turns, tokenizer: Any, looked_at: LookedAt) -> _Tally:
    tally = _Tally(starts={})
    assert tally.starts is not None
    for ids, mask in looked_at.tokens():
        tally.samples += 1
        answers = turns.answers(ids)
        if not answers:
            tally.unread += 1
            continue
        near = np.zeros(len(ids) + 2, bool)  # token t at t + 1
        for start, end in answers:
            near[start : end + 2] = True
            tally.in_answers += end - start
        trained = mask.astype(bool)
        tally.trained += int(trained.sum())
        tally.elsewhere += int((trained & ~near[1:-1]).sum())
        runs = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0) == 1)
        for start, end in answers:
            own = start + _empty_thinking_tokens(ids[start:end], tokenizer)
            if own > start:
                tally.empty_thinking += 1
                tally.empty_thinking_trained += bool(trained[start:own].any())
                if trained[start:own].any():
                    own = start
            for run in runs[(runs >= start - 1) & (runs < end)][:1].tolist():
                tally.starts[run - own] = tally.starts.get(run - own, 0) + 1
    return tally


def _empty_thinking_tokens(answer: npt.NDArray[np.int32], tokenizer: Any) -> int:
    """How many tokens of an answer are an empty thinking block at its start."""
    text = tokenizer.decode(answer[:12].tolist(), skip_special_tokens=False)
    match = _EMPTY_THINKING.match(text)
    if match is None:
        return 0
    return len(tokenizer.encode(match[0], add_special_tokens=False))


def _role(tally: _Tally, seen: str) -> list[Finding]:
    starts = tally.starts or {}
    runs = sum(starts.values())
    share = tally.elsewhere / max(1, tally.trained)
    if share > 1 - _NEARLY_ALL:
        too = tally.trained - tally.elsewhere > tally.in_answers / 2
        whose = "the prompts are trained too" if too else "the prompts are trained, and the answers are not"
        return [
            Finding(
                check="mask roles",
                status="mismatch",
                found=f"{whose}: {share:.0%} of the trained tokens are in no answer ({seen})",
                expected="the assistant's tokens",
                consequence="the draft learns to write the user's turns, which the target never does when it serves",
                mend="prepare again: eyas prepare masks by the target's own template",
            )
        ]
    for shift, words in ((1, "one token late"), (-1, "one token early")):
        if runs >= _MANY and starts.get(shift, 0) >= _NEARLY_ALL * runs:
            return [
                Finding(
                    check="mask position",
                    status="mismatch",
                    found=f"the mask begins {words} in {starts[shift]} of {runs} answers ({seen})",
                    expected="loss_mask[t] is 1 where token t itself is the assistant's",
                    consequence="the first token of every answer is not learned, and one behind it is"
                    if shift == 1
                    else "the mask marks rows that predict, not tokens: a trainer that shifts it is one row off",
                    mend=f"loss_mask = torch.roll(loss_mask, {-shift}) in each sample, or prepare again",
                )
            ]
    if share > 0:
        return [
            Finding(
                check="mask roles",
                status="warning",
                found=f"{share:.1%} of the trained tokens are in no answer ({seen})",
                expected="the assistant's tokens",
                consequence="a little of what is learned is never asked for",
                mend="prepare again with the target's own template",
            )
        ]
    return [Finding(check="mask roles", status="ok", found=f"the assistant's turns, from their first token ({seen})")]


def _thinking(turns: Turns, tally: _Tally, seen: str) -> list[Finding]:
    if not tally.empty_thinking or not turns.prompts_thinking:
        return []
    trained = tally.empty_thinking_trained
    return [
        Finding(
            check="thinking",
            status="warning",
            found=f"{tally.empty_thinking} answers begin with an empty thinking block"
            + (f", trained in {trained}" if trained else "")
            + f" ({seen})",
            expected="answers as the target gives them: its default prompt leaves the thinking to it",
            consequence="the draft learns answers without thinking, and serves a target that thinks",
            mend="serve with enable_thinking false, or regenerate the answers with thinking (eyas regenerate)",
        )
    ]


def _unknown(found: str, mend: str) -> Finding:
    return Finding(check="mask roles", status="unknown", found=found, mend=mend)
