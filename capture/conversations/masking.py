"""Which tokens of a conversation are the assistant's own, and trained.

An answer is trained where three things hold, and left out and counted where one does not:

1. The template says where it stands: by {% generation %}, or because what it renders before the answer (with the
   generation prompt) is a beginning of the whole text, and so is what it renders up to the answer's end. A template
   that rewrites an earlier answer (drops its thinking, merges it with another) fails here: the target would never have
   generated that text in that place.
2. The text there is the message's own. What the template puts before it (an empty thinking block, a channel's header)
   is not; white space is, and so is the markup around the message's own thinking and tool calls.
3. The tokens between the answer's borders are proven to be those of the text between them (borders.py). A token that
   lies across a border is not trained.

The end token is trained with its answer, the newline that templates put behind it is not. An answer that was cut off
has none: its sample ends where it was cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.capture.conversations.borders import encode_with_borders, num_same
from eyas.capture.conversations.normalise import Conversation, RowError
from eyas.capture.conversations.template import THINKING_SWITCHES, ChatTemplate

_EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>\s*")
_WHITE = re.compile(r"\s*")
_THINKING_TAG = re.compile(r"</?think>")


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A conversation as tokens."""

    input_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T]
    notes: Counter[str] = field(default_factory=Counter)  # what became of the answers


@dataclass(frozen=True, kw_only=True)
class _Region:
    """Where the template put an answer. Positions are characters of the whole rendering, unless said otherwise."""

    start: int
    rendering: str  # where the answer is looked for: the whole, or what ends with this answer
    end: int  # of the answer's part of ``rendering``
    agreed: int  # up to here the whole and ``rendering`` are the same
    prompt_known: bool  # start is where the target began to generate


@dataclass(frozen=True, kw_only=True)
class _OwnText:
    """The message's own text within a rendering, with the markup of its thinking and tool calls."""

    start: int
    end: int
    begins_with_markup: bool  # so that where it begins is known only if the region's start is


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """A trained answer: characters [start, end) of the whole rendering, those from text_end on its end token."""

    start: int
    text_end: int
    end: int


class _NotCertain(Exception):
    """This answer is not trained; the argument is the note that counts it."""


def mask_conversation(template: ChatTemplate, conversation: Conversation, *, last_turn_only: bool) -> Masked:
    """Render, find the answers, encode. Raises RowError where the template refuses the conversation."""
    notes: Counter[str] = Counter()
    text = template.render(conversation.messages, conversation.tools)
    if conversation.tools is not None and not any(_tool_name(tool) in text for tool in conversation.tools):
        notes["tools_not_in_template"] += 1
    positions = conversation.answers
    spans = template.marked_spans(conversation.messages, conversation.tools, text)
    if spans is not None and len(spans) != len(positions):
        spans = None  # which mark is whose cannot be told
    answers: list[_Answer] = []
    for n, position in enumerate(positions):
        if (last_turn_only and position != positions[-1]) or position in conversation.untrained:
            continue
        try:
            answer = _find_answer(template, conversation, position, text, spans[n] if spans else None, notes)
        except _NotCertain as reason:
            notes[str(reason)] += 1
            continue
        if position in conversation.cut:
            notes["answers_cut_off"] += 1
            answer = _Answer(start=answer.start, text_end=answer.text_end, end=answer.text_end)
            if position == len(conversation.messages) - 1:
                text = text[: answer.end]
        elif answer.end == answer.text_end:
            notes["answers_without_end_token"] += 1
        notes["answers_trained"] += 1
        answers.append(answer)
    borders = sorted({border for answer in answers for border in (answer.start, answer.end)})
    encoded = encode_with_borders(template.tokenizer, text, borders)
    mask = np.zeros(len(encoded.ids), np.uint8)  # [T]
    for answer in answers:
        mask[encoded.after[answer.start] : encoded.before[answer.end]] = 1
    notes["tokens_across_borders"] += sum(encoded.after[border] - encoded.before[border] for border in borders)
    return Masked(input_ids=np.asarray(encoded.ids, np.int32), loss_mask=mask, notes=+notes)


def _find_answer(
    template: ChatTemplate,
    conversation: Conversation,
    position: int,
    text: str,
    span: tuple[int, int] | None,
    notes: Counter[str],
) -> _Answer:
    """Where the answer at ``position`` stands in ``text``, the whole rendering. Raises _NotCertain."""
    message = conversation.messages[position]
    if not any(
        message.get(key) and str(message[key]).strip() for key in ("content", "reasoning_content", "tool_calls")
    ):
        raise _NotCertain("answers_empty")
    region = _region(template, conversation, position, text, span)
    own = _own_text(message, region, template.end_texts)
    if own is None or own.end > region.agreed:
        raise _NotCertain("answers_rewritten")
    if own.begins_with_markup and not region.prompt_known:
        raise _NotCertain("answers_after_another_prompt")
    start = region.start
    if text[start : own.start].strip():
        notes["answers_after_text_of_the_template"] += 1
        start = own.start
    if any(token in text[start : own.end] for token in template.end_texts):
        raise _NotCertain("answers_with_end_token_inside")
    return _Answer(start=start, text_end=own.end, end=_end(region, text, own.end, template.end_texts))


def _end(region: _Region, text: str, text_end: int, end_texts: Sequence[str]) -> int:
    """Behind the end token that follows the answer's text; ``text_end`` where none does."""
    behind_white = len(_WHITE.match(text, text_end)[0]) + text_end  # type: ignore[index]  # it matches the empty text
    token = next((token for token in end_texts if text.startswith(token, behind_white)), None)
    if token is None:
        return text_end
    end = behind_white + len(token)
    # Behind the answer's part the end token may be the next message's header (GLM): the target generates it all the
    # same. Where the two renderings differ before that, which end token it generated is not known.
    return end if end <= region.agreed or region.agreed == len(region.rendering) else text_end


def _region(
    template: ChatTemplate, conversation: Conversation, position: int, text: str, span: tuple[int, int] | None
) -> _Region:
    prompt = _prompt_end(template, conversation, position, text)
    if span is not None:
        start, end = span
        if prompt is not None and start < prompt <= end:
            start = prompt  # marks that include the generation prompt (SmolLM3)
        known = prompt is not None and prompt <= start
        return _Region(start=start, rendering=text, end=end, agreed=len(text), prompt_known=known)
    if prompt is None:
        raise _NotCertain("answers_after_another_prompt")
    if position == len(conversation.messages) - 1:
        return _Region(start=prompt, rendering=text, end=len(text), agreed=len(text), prompt_known=True)
    try:
        rendering = template.render(conversation.messages[: position + 1], conversation.tools)
    except RowError as error:
        raise _NotCertain("answers_rewritten") from error
    agreed = len(rendering) if text.startswith(rendering) else num_same(text, rendering)
    return _Region(start=prompt, rendering=rendering, end=len(rendering), agreed=agreed, prompt_known=True)


def _prompt_end(template: ChatTemplate, conversation: Conversation, position: int, text: str) -> int | None:
    """Where the generation prompt before the answer ends in ``text``; None where it is no beginning of it."""
    for switches in ({}, *THINKING_SWITCHES):
        try:
            prompt = template.render(conversation.messages[:position], conversation.tools, prompt=True, **switches)
        except RowError:
            return None
        if text.startswith(prompt):
            return len(prompt)
    return None


def _own_text(message: dict[str, Any], region: _Region, end_texts: Sequence[str]) -> _OwnText | None:
    """The message's own text in the region; None where not all of it is there."""
    rendering, start = region.rendering, region.start
    end = _without_tail(rendering, start, region.end, end_texts)
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    if message.get("tool_calls"):
        empty = _EMPTY_THINKING.match(rendering, start, end)
        markup_start = empty.end() if empty else start
        squeezed, _ = _squeeze(_THINKING_TAG.sub("", rendering[start:end]))
        names = [word for call in message["tool_calls"] for word in _words_of(call)]
        if not all(_squeeze(word)[0] in squeezed for word in (reasoning, content, *names)):
            return None
        return _OwnText(start=markup_start, end=end, begins_with_markup=True)
    last = content if content.strip() else reasoning
    found = _ending(last, rendering, end) or _only(last, rendering, start, region.end)
    if found is None:
        return None
    own_start, own_end = max(found[0], start), found[1]
    own_end += _common_white(last, rendering, own_end, region.end)
    if not reasoning.strip():
        return _OwnText(start=own_start, end=own_end, begins_with_markup=False)
    thinking, _ = _squeeze(_THINKING_TAG.sub("", rendering[start:own_end]))
    if _squeeze(reasoning)[0] not in thinking:
        return None
    return _OwnText(start=start, end=own_end, begins_with_markup=True)


def _without_tail(rendering: str, start: int, end: int, end_texts: Sequence[str]) -> int:
    """``end`` moved before the white space and end tokens that close rendering[start:end]."""
    while True:
        end = start + len(rendering[start:end].rstrip())
        token = next((token for token in end_texts if rendering.endswith(token, start, end)), None)
        if token is None:
            return end
        end -= len(token)


def _ending(own: str, rendering: str, end: int) -> tuple[int, int] | None:
    """[start, end) of ``own`` where rendering[:end] ends with it, white space aside."""
    own = own.strip()
    if rendering.endswith(own, 0, end):
        return end - len(own), end
    wanted, _ = _squeeze(own)
    # Templates that take thinking apart and write it again move white space only.
    window = max(0, end - 2 * len(own) - 1000)
    squeezed, positions = _squeeze(rendering[window:end])
    if not wanted or not squeezed.endswith(wanted):
        return None
    return window + positions[len(squeezed) - len(wanted)], end


def _only(own: str, rendering: str, start: int, end: int) -> tuple[int, int] | None:
    """[start, end) of ``own`` in rendering[start:end] where it stands there exactly once."""
    own = own.strip()
    first = rendering.find(own, start, end)
    if first < 0 or rendering.find(own, first + 1, end) >= 0:
        return None
    return first, first + len(own)


def _common_white(own: str, rendering: str, at: int, end: int) -> int:
    """How many of ``own``'s closing white space characters the rendering kept at ``at``."""
    return num_same(own[len(own.rstrip()) :], rendering[at:end])


def _squeeze(text: str) -> tuple[str, list[int]]:
    """``text`` without white space, and where each character stood."""
    positions = [n for n, character in enumerate(text) if not character.isspace()]
    return "".join(text[n] for n in positions), positions


def _words_of(call: dict[str, Any]) -> list[str]:
    return [call["function"]["name"], *map(str, call["function"]["arguments"])]


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""
