"""A conversation whose answers are being replaced by the target's own, turn by turn, as messages and as tokens.

A later prompt continues the tokens that are there: what the target generated is never tokenized again. That is what
the target would see wherever the template leaves earlier answers as they are. Where it rewrites them (drops their
thinking), the prompt is rendered and tokenized anew, and only the answers from there on are trained.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from eyas.capture.conversations.borders import encode_with_borders
from eyas.capture.conversations.normalise import Conversation, RowError, normalise
from eyas.capture.conversations.template import ChatTemplate
from eyas.capture.engines.base import Answer, MessageAnswer, Prompt

_PLACEHOLDER = "eyas-placeholder-answer"


class Chat:
    """One conversation on its way."""

    def __init__(self, row: Any, source: str) -> None:
        """``row``: of any form with messages that eyas prepare reads, whose last questions may be without answers, or
        ``turns`` (a list of questions, as MT-bench has them). Raises RowError."""
        if isinstance(row, dict) and row.get("input_ids") is not None:  # the answers in the tokens are another's
            row = {key: value for key, value in row.items() if key not in ("input_ids", "loss_mask")}
        if isinstance(row, dict) and isinstance(row.get("turns"), list):
            row = {**row, "messages": [{"role": "user", "content": text} for text in row["turns"]]}
        given = normalise(row, to_be_answered=True)
        assert isinstance(given, Conversation)
        self.source = source
        self.row_id = given.row_id
        self.key = _key(given)
        self.leading_dropped = bool(given.notes["leading_answers_dropped"])
        self.finish = ""
        self.rewritten = False  # the template changed an earlier answer
        self.retokenize = False  # an answer came without its tokens
        self._given = given
        self._next = 0  # of given.messages
        self._turn = 0
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._text = ""  # the last prompt
        self._end_text = ""  # of the last answer, empty where it was cut
        if not self._advance():
            raise RowError("tools", "its first answer calls tools: their results belong to another model's calls")

    @property
    def turn(self) -> int:
        """Answers so far."""
        return self._turn

    @property
    def category(self) -> str | None:
        return self._given.category

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, up to what is to be answered next."""
        return self._messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return self._given.tools

    def prompt(self, template: ChatTemplate, *, seed: int, max_new_tokens: int, max_tokens: int) -> Prompt | None:
        """What the target is to answer next; None where no room is left within ``max_tokens``.

        Raises RowError where the template refuses the messages.
        """
        text = template.render(self._messages, self._given.tools, prompt=True)
        continuation = self._continuation(template, text) if self._turn else None
        added = encode_with_borders(template.tokenizer, text if continuation is None else continuation, []).ids
        kept = 0 if continuation is None else len(self._ids)
        room = min(max_new_tokens, max_tokens - kept - len(added))
        if room < 1:
            return None
        self.rewritten |= self._turn > 0 and continuation is None and not self.retokenize
        self._text = text
        self._ids = [*self._ids[:kept], *added]
        self._mask = [*self._mask[:kept], *([0] * len(added))]
        digest = hashlib.blake2b(f"{seed}:{self.key}:{self._turn}".encode(), digest_size=8).digest()
        return Prompt(
            input_ids=np.array(self._ids, np.int32), max_new_tokens=room, seed=int.from_bytes(digest, "little")
        )

    def add(self, answer: Answer | MessageAnswer, tokenizer: Any) -> bool:
        """Take the target's answer; says whether another is wanted."""
        if isinstance(answer, MessageAnswer):
            return self._add_message(answer)
        self._ids += answer.token_ids
        self._mask += [1] * len(answer.token_ids)
        own = answer.token_ids[:-1] if answer.finish == "stop" else answer.token_ids
        end = answer.token_ids[-1:] if answer.finish == "stop" else []
        content = tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._end_text = tokenizer.decode(end, skip_special_tokens=False) if end else ""
        self._messages.append({"role": "assistant", "content": content})
        self._turn += 1
        self.finish = answer.finish
        return answer.finish == "stop" and self._advance()

    def _add_message(self, answer: MessageAnswer) -> bool:
        """A server's own reading of what the target said."""
        self.retokenize, self._end_text = True, ""
        self._messages.append(answer.message)
        self._turn += 1
        self.finish = answer.finish
        # What a tool would give to the target's own call is unknown.
        return answer.finish == "stop" and "tool_calls" not in answer.message and self._advance()

    def row(self) -> dict[str, Any]:
        """The regenerated conversation up to its last answer, as eyas prepare reads it."""
        last = max(n for n, message in enumerate(self._messages) if message["role"] == "assistant")
        optional = {"source_id": self.row_id, "category": self._given.category, "tools": self._given.tools}
        return {
            "id": self.key,
            "source": self.source,
            **{name: value for name, value in optional.items() if value is not None},
            "messages": self._messages[: last + 1],
            "finish": self.finish,
            **({} if self.retokenize else {"input_ids": self._ids, "loss_mask": self._mask}),
        }

    def _advance(self) -> bool:
        """Move to the next answer that is wanted; says whether there is one."""
        given = self._given.messages
        while self._next < len(given) and given[self._next]["role"] == "assistant" and self._turn:
            self._next += 1  # the answer that was just replaced, and what the assistant added to it
        start = self._next
        while self._next < len(given) and given[self._next]["role"] not in ("assistant", "tool"):
            self._next += 1
        if self._next == len(given) or given[self._next]["role"] == "tool" or given[self._next].get("tool_calls"):
            return False
        self._messages += given[start : self._next]
        return True

    def _continuation(self, template: ChatTemplate, text: str) -> str | None:
        """What ``text`` has behind the last answer and its end token; None where the template rewrote the rest."""
        last = max(n for n, message in enumerate(self._messages) if message["role"] == "assistant")
        content = self._messages[last]["content"]
        instead = [*self._messages]
        instead[last] = {"role": "assistant", "content": _PLACEHOLDER}
        before, found, behind = template.render(instead, self._given.tools, prompt=True).rpartition(_PLACEHOLDER)
        tail = behind.lstrip()
        if not found or before != self._text or not self._end_text or not tail.startswith(self._end_text):
            return None
        if not text.startswith(before) or not text.endswith(behind) or len(text) < len(before) + len(behind):
            return None
        if text[len(before) : len(text) - len(behind)].strip() != content.strip():
            return None
        return tail[len(self._end_text) :]


def _key(conversation: Conversation) -> str:
    """16 hex digits that name a conversation by what is asked in it, whatever was answered."""
    asked = [{"role": "assistant"} if message["role"] == "assistant" else message for message in conversation.messages]
    text = json.dumps([asked, conversation.tools], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
