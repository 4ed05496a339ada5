"""One row of any known form as a conversation that a chat template takes, or as tokens.

| form | keys |
|---|---|
| ShareGPT | `conversations`: a list of `from`, `value`; roles human, gpt, system and others as exported |
| OpenAI | `messages`: a list of `role`, `content`, `tool_calls`, ...; `tools` beside it |
| tokens | `input_ids`, `loss_mask` |

Text only: a row with images, audio or video is refused by that name, not stripped of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
}
MEDIA = {
    "image": "image", "image_url": "image", "input_image": "image", "image_file": "image", "images": "image",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio", "audios": "audio",
    "video": "video", "video_url": "video", "videos": "video",
    "file": "file", "input_file": "file", "document": "file",
}  # fmt: skip
ROW_MEDIA = ("image", "images", "audio", "audios", "video", "videos")  # columns beside the conversation
TEXT_PARTS = ("text", "input_text", "output_text")
CUT_REASONS = ("length", "max_tokens")  # finish reasons of an answer that was cut off, and so has no end token
LONGEST_REASON = 500  # characters: a reason may quote what it found
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class RowError(Exception):
    """This row becomes no sample. ``kind`` is what the counts go by."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as the chat template takes them. The last one is the assistant's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    untrained: frozenset[int]  # positions of answers that the row says not to train on (weight 0)
    cut: frozenset[int]  # positions of answers that were cut off before their end token
    category: str | None
    row_id: str | None
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's messages."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A conversation that came as tokens."""

    input_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T]
    messages: list[Any] | None  # for display only
    tools: list[Any] | None
    category: str | None
    row_id: str | None


def normalise(row: Any, *, to_be_answered: bool = False) -> Conversation | TokenRow:
    """``to_be_answered``: questions behind the last answer stay, an empty one behind each.

    Raises RowError where the row is none of the known forms.
    """
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise RowError("form", f"expected a JSON object, found {_kind_of(row)}")
    for column in ROW_MEDIA:
        if row.get(column):
            raise RowError("multimodal", f"holds {_article(MEDIA[column])} (column {column!r}); eyas takes text only")
    category, row_id = row.get("category"), row.get("id")
    category = category.encode(errors="replace").decode() if isinstance(category, str) else None
    row_id = str(row_id) if isinstance(row_id, str | int) else None
    if row.get("input_ids") is not None:
        return _token_row(row, category, row_id)
    messages, untrained, cut = _messages(row)
    if to_be_answered:
        messages = _with_empty_answers(messages)
    notes: Counter[str] = Counter()
    first = next((n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    # What a leading answer answers is unknown, and most templates refuse it: it is left out, as the field does.
    leading = 0
    while first + leading < len(messages) and messages[first + leading]["role"] == "assistant":
        leading += 1
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < first + leading:
        raise RowError("no answer", "no message of the assistant that answers another message")
    if leading:
        notes["leading_answers_dropped"] = 1
    if last + 1 < len(messages):
        notes["unanswered_messages_dropped"] = 1  # nothing after the last answer is trained or seen by what is
    kept = [*range(first), *range(first + leading, last + 1)]
    if row.get("finish", row.get("finish_reason")) in CUT_REASONS:
        cut = cut | {last}
    conversation = Conversation(
        messages=[messages[n] for n in kept],
        tools=_tools(row.get("tools")),
        untrained=frozenset(new for new, old in enumerate(kept) if old in untrained),
        cut=frozenset(new for new, old in enumerate(kept) if old in cut),
        category=category,
        row_id=row_id,
        notes=notes,
    )
    for text in ([conversation.messages], conversation.tools):
        try:
            json.dumps(text, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowError("text", f"holds half of a surrogate pair, which is no text ({error.reason})") from error
        except TypeError as error:
            raise RowError("form", f"holds a value that is no JSON ({error})") from error
    return conversation


def _with_empty_answers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answered = 1 + max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    added = messages[:answered]
    for message in messages[answered:]:
        added += [message, {"role": "assistant", "content": ""}] if message["role"] == "user" else [message]
    return added


def _messages(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], set[int], set[int]]:
    """The messages, and the positions of those not to train on and of those cut off."""
    key = next((key for key in ("messages", "conversations", "conversation") if row.get(key) is not None), None)
    if key is None:
        found = ", ".join(map(str, list(row)[:8])) or "none"
        raise RowError("form", f"expected messages, conversations or input_ids; its keys: {found}")
    turns = _from_json(row[key], key)
    if not isinstance(turns, list) or not turns:
        raise RowError("form", f"{key}: expected a list of messages, found {_kind_of(turns)}")
    messages: list[dict[str, Any]] = []
    untrained: set[int] = set()
    cut: set[int] = set()
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for n, turn in enumerate(turns):
        where = f"{key}[{n}]"
        if not isinstance(turn, Mapping):
            raise RowError("form", f"{where}: expected an object, found {_kind_of(turn)}")
        message = _message(turn, where)
        if message["role"] == "system" and messages and "system" in row and n == 0:
            messages.clear()  # the conversation brings its own
        if message["role"] == "assistant":
            if turn.get("weight") == 0:
                untrained.add(len(messages))
            if turn.get("finish_reason") in CUT_REASONS:
                cut.add(len(messages))
        messages.append(message)
    return messages, untrained, cut


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise RowError("role", f"{where}: role {role!r}; expected one of {', '.join(ROLES)}")
    if turn.get("function_call") is not None:
        raise RowError("form", f"{where}: function_call is the form before tool_calls; write it as tool_calls")
    if turn.get("audio") is not None:
        raise RowError("multimodal", f"{where}: holds audio; eyas takes text only")
    message: dict[str, Any] = {"role": ROLES[role.strip().lower()]}
    content = _content(turn.get("content", turn.get("value")), where)
    calls = _tool_calls(turn.get("tool_calls"), where)
    if content is None and calls is None:
        raise RowError("form", f"{where}: no content")
    if content is not None:
        message["content"] = content
    if calls is not None:
        message["tool_calls"] = calls
    reasoning = next((turn[key] for key in REASONING_KEYS if isinstance(turn.get(key), str)), None)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    return message


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("form", f"{where}: content is {_kind_of(content)}; expected text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        kind = kind if isinstance(kind, str) else None
        if kind in MEDIA:
            raise RowError("multimodal", f"{where}: holds {_article(MEDIA[kind])} ({kind}); eyas takes text only")
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RowError("form", f"{where}: a part of type {kind!r}; expected parts of type text")
        texts.append(part["text"])
    return "\n".join(texts)  # as the serving engines do for templates that take text (vLLM, chat_utils.py)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]] | None:
    calls = _from_json(calls, f"{where}.tool_calls")
    if calls is None or calls == []:
        return None
    if not isinstance(calls, list):
        raise RowError("form", f"{where}: tool_calls is {_kind_of(calls)}; expected a list")
    normal = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("form", f"{where}: a tool call without function.name")
        # Templates take an object where the API gives JSON text; the serving engines convert it too (vLLM,
        # chat_utils.py, _postprocess_messages).
        arguments = _from_json(function.get("arguments") or {}, f"{where}.tool_calls.arguments")
        if not isinstance(arguments, Mapping):
            raise RowError("form", f"{where}: arguments of {function['name']} are no JSON object")
        body = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
        normal.append({"id": call["id"], **body} if isinstance(call.get("id"), str) else body)
    return normal


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(tools, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("form", f"tools: expected a list of objects, found {_kind_of(tools)}")
    return [dict(tool) for tool in tools]


def _token_row(row: Mapping[str, Any], category: str | None, row_id: str | None) -> TokenRow:
    if row.get("loss_mask") is None:
        raise RowError("tokens", "input_ids without loss_mask: which tokens are the assistant's is unknown")
    input_ids, loss_mask = _integers(row, "input_ids"), _integers(row, "loss_mask")
    if len(input_ids) != len(loss_mask):
        raise RowError("tokens", f"{len(input_ids)} input_ids and {len(loss_mask)} loss_mask; expected as many")
    if len(input_ids) == 0:
        raise RowError("tokens", "no tokens")
    if input_ids.min() < 0 or input_ids.max() > np.iinfo(np.int32).max:
        raise RowError("tokens", f"input_ids go from {input_ids.min()} to {input_ids.max()}: no token ids")
    if not np.isin(loss_mask, (0, 1)).all():
        raise RowError("tokens", "loss_mask holds other values than 0 and 1")
    messages = _from_json(row.get("messages", row.get("conversations")), "messages")
    tools = _from_json(row.get("tools"), "tools")
    return TokenRow(
        input_ids=input_ids.astype(np.int32),
        loss_mask=loss_mask.astype(np.uint8),
        messages=messages if isinstance(messages, list) else None,
        tools=tools if isinstance(tools, list) else None,
        category=category,
        row_id=row_id,
    )


def _integers(row: Mapping[str, Any], key: str) -> npt.NDArray[np.int64]:
    values = row[key]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise RowError("tokens", f"{key}: expected a list of whole numbers, found {_kind_of(values)}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise RowError("tokens", f"{key}: {error}") from error


def _from_json(value: Any, where: str) -> Any:
    """Parquet keeps nested values as JSON text; anything but text is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise RowError("form", f"{where}: text that is no JSON ({error})") from error


def _article(medium: str) -> str:
    return "audio" if medium == "audio" else f"an {medium}" if medium == "image" else f"a {medium}"


def _kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {bool: "a truth value", int: "a number", float: "a number", str: "text", dict: "an object"}.get(
        type(value), type(value).__name__
    )
