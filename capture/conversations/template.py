"""The target's chat template and tokenizer, as masking needs them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.capture.conversations.normalise import RowError

Messages = Sequence[dict[str, Any]]

# Keyword arguments by which templates turn thinking off and on (Qwen3, GLM-4.5; DeepSeek-V3.1, Kimi-K2.5).
THINKING_SWITCHES: tuple[dict[str, bool], ...] = (
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True},
)
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = ("eyas-probe-question", "eyas-probe-answer")


class ChatTemplate:
    """Renders conversations and says where the template itself marks answers."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        """``stop_ids``: token ids that end an answer, by the target's generation_config.json."""
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids

    def render(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None, *, prompt: bool = False, **switches: bool
    ) -> str:
        """The conversation as text; with ``prompt``, followed by what the template puts before an answer.

        Raises RowError where the template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                _with_thinking(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **switches
            )
        # Templates are programs: on messages they were not made for they fail like any other.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RowError(
                "template", f"the target's chat template refuses it: {error or type(error).__name__}"
            ) from error
        return text

    def marked_spans(
        self, messages: Messages, tools: Sequence[dict[str, Any]] | None, text: str
    ) -> list[tuple[int, int]] | None:
        """Where the template marks answers ({% generation %}) in ``text``, its own rendering of these messages.

        [start, end) in characters. None where the template has no such marks, or where they cannot be trusted because
        the tokenizer renders another text than the bare template does.
        """
        template = self._template(tools)
        if template is None or not _GENERATION_TAG.search(template):
            return None
        # apply_chat_template gives marks as tokens only, mapped by token offsets that some tokenizers get wrong.
        from transformers.utils.chat_template_utils import render_jinja_template

        (rendered,), (spans,) = render_jinja_template(
            conversations=[_with_thinking(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in spans] if rendered == text else None

    @cached_property
    def writes_date(self) -> bool:
        """Whether what it renders depends on the day."""
        return "strftime_now" in (self._template(None) or "")

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """Tokens that end an answer, as text, longest first.

        The tokenizer's and the generation config's end tokens, and the special token that the template itself puts
        behind an answer (a ChatML template on a base model's tokenizer, whose end token is another).
        """
        ids = {*self._stop_ids, self.tokenizer.eos_token_id} - {None}
        texts = {self.tokenizer.decode([end], skip_special_tokens=False) for end in ids}
        texts.add(self._probe_end())
        return tuple(sorted((text for text in texts if text.strip()), key=len, reverse=True))

    def _probe_end(self) -> str:
        question, answer = _PROBE
        try:
            text = self.render([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None)
        except RowError:
            return ""
        _, found, tail = text.rpartition(answer)
        added = [*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens]
        behind = [token for token in added if found and token.strip() and tail.lstrip().startswith(token)]
        return max(behind, key=len, default="")

    def _template(self, tools: Sequence[dict[str, Any]] | None) -> str | None:
        try:
            template: str = self.tokenizer.get_chat_template(tools=tools)
        except ValueError:  # none at all
            return None
        return template

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._template(None) is not None


def read_stop_ids(target: str | Path, revision: str | None) -> tuple[int, ...]:
    """The end tokens of ``target``'s generation_config.json; empty where it has none."""
    from transformers.utils import cached_file

    path = cached_file(
        str(target),
        "generation_config.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    ids = json.loads(Path(path).read_bytes()).get("eos_token_id") if path else None
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _with_thinking(messages: Messages) -> list[dict[str, Any]]:
    """gpt-oss templates read ``thinking``; transformers fills it from ``reasoning_content`` only since 5.24."""
    return [
        {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
        for message in messages
    ]
