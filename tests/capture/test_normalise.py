"""Rows of every known form, and of none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.capture.conversations.normalise import Conversation, RowError, TokenRow, normalise

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "hello"}


def conversation(row: Any) -> Conversation:
    result = normalise(row)
    assert isinstance(result, Conversation)
    return result


def turns(row: Any) -> list[tuple[str, Any]]:
    return [(message["role"], message.get("content")) for message in conversation(row).messages]


def sharegpt(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


SAME = [("user", "hi"), ("assistant", "hello")]
FORMS = [
    ({"messages": [ASKED, ANSWERED]}, SAME),
    ([ASKED, ANSWERED], SAME),
    ({"messages": json.dumps([ASKED, ANSWERED])}, SAME),
    (sharegpt(("human", "hi"), ("gpt", "hello")), SAME),
    (sharegpt(("user", "hi"), ("chatgpt", "hello")), SAME),
    (sharegpt(("Human", "hi"), ("bing", "hello")), SAME),
    (sharegpt(("human", "hi"), ("bard", "hello")), SAME),
    (sharegpt(("gpt", "x"), ("chatgpt", "y"), ("human", "hi"), ("gpt", "hello")), SAME),
    (sharegpt(("system", "s"), ("gpt", "x"), ("human", "hi"), ("gpt", "hello")), [("system", "s"), *SAME]),
    (sharegpt(("human", "hi"), ("gpt", "hello"), ("human", "x")), SAME),
    ({"system": "s", **sharegpt(("human", "hi"), ("gpt", "hello"))}, [("system", "s"), *SAME]),
    ({"system": "s", **sharegpt(("system", "t"), ("human", "hi"), ("gpt", "hello"))}, [("system", "t"), *SAME]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWERED]}, SAME),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "x"}]},
                ANSWERED,
            ]
        },
        [("user", "hi\nx"), ("assistant", "hello")],
    ),
]


@pytest.mark.parametrize(("row", "expected"), FORMS)
def test_forms(row: Any, expected: list[tuple[str, str]]) -> None:
    assert turns(row) == expected


def test_tools_and_tool_calls_reach_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    got = conversation(
        {
            "tools": json.dumps([tool]),
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
                ANSWERED,
            ],
        }
    )
    assert got.tools == [tool]
    assert got.messages[1] == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert got.messages[2] == {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"}


def test_thinking_by_any_of_its_names() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert conversation([ASKED, {**ANSWERED, key: "because"}]).messages[1]["reasoning_content"] == "because"


def test_what_is_cut_off_and_what_is_not_to_be_trained() -> None:
    got = conversation(
        {"finish": "length", "messages": [ANSWERED, ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED, ASKED]}
    )
    assert got.answers == [1, 3]
    assert got.untrained == {1}
    assert got.cut == {3}
    assert got.notes == {"leading_answers_dropped": 1, "unanswered_messages_dropped": 1}
    assert conversation({"finish_reason": "stop", "messages": [ASKED, ANSWERED]}).cut == frozenset()


def test_tokens() -> None:
    got = normalise(
        {"id": 7, "input_ids": [5, 6], "loss_mask": [False, True], "messages": [ASKED, ANSWERED], "category": "c"}
    )
    assert isinstance(got, TokenRow)
    assert (got.input_ids.tolist(), got.loss_mask.tolist()) == ([5, 6], [0, 1])
    assert (got.input_ids.dtype, got.loss_mask.dtype) == ("int32", "uint8")
    assert (got.messages, got.category, got.row_id) == ([ASKED, ANSWERED], "c", "7")


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
MALFORMED = [
    (3, "form", "expected a JSON object, found a number"),
    (None, "form", "found nothing"),
    ({}, "form", "its keys: none"),
    ({"text": "hi"}, "form", "its keys: text"),
    ({"messages": []}, "form", "a list of 0"),
    ({"messages": "hi"}, "form", "no JSON"),
    ({"messages": [3]}, "form", "messages[0]"),
    ({"messages": [{"content": "hi"}, ANSWERED]}, "role", "role None"),
    ({"messages": [{"role": "narrator", "content": "hi"}, ANSWERED]}, "role", "'narrator'"),
    ({"messages": [{"role": "user"}, ANSWERED]}, "form", "no content"),
    ({"messages": [{"role": "user", "content": 3}, ANSWERED]}, "form", "content is a number"),
    ({"messages": [ASKED]}, "no answer", "no message of the assistant"),
    (sharegpt(("gpt", "hello")), "no answer", "no message of the assistant"),
    ({"messages": [ASKED, {"role": "assistant", "function_call": {}}]}, "form", "tool_calls"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "form", "function.name"),
    (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "form",
        "arguments of f",
    ),
    ({"tools": 3, "messages": [ASKED, ANSWERED]}, "form", "tools"),
    ({"messages": [{"role": "user", "content": [IMAGE]}, ANSWERED]}, "multimodal", "an image (image_url)"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}, ANSWERED]}, "multimodal", "audio"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWERED]}, "multimodal", "a video"),
    ({"images": ["x.png"], "messages": [ASKED, ANSWERED]}, "multimodal", "an image (column 'images')"),
    ({"messages": [ASKED, {**ANSWERED, "audio": {"id": "x"}}]}, "multimodal", "audio"),
    ({"messages": [ASKED, {"role": "assistant", "content": "\ud83d"}]}, "text", "surrogate"),
    ({"input_ids": [1]}, "tokens", "without loss_mask"),
    ({"input_ids": [1], "loss_mask": [1, 1]}, "tokens", "1 input_ids and 2 loss_mask"),
    ({"input_ids": [], "loss_mask": []}, "tokens", "no tokens"),
    ({"input_ids": [1.5], "loss_mask": [1]}, "tokens", "whole numbers"),
    ({"input_ids": [-1], "loss_mask": [1]}, "tokens", "no token ids"),
    ({"input_ids": [2**70], "loss_mask": [1]}, "tokens", "input_ids"),
    ({"input_ids": [1], "loss_mask": [2]}, "tokens", "0 and 1"),
]


@pytest.mark.parametrize(("row", "kind", "reason"), MALFORMED)
def test_malformed_rows_are_refused_by_name(row: Any, kind: str, reason: str) -> None:
    with pytest.raises(RowError) as refused:
        normalise(row)
    assert refused.value.kind == kind
    assert reason in refused.value.reason


def result_of(row: Any) -> Conversation | TokenRow | str:
    """What normalise makes of it, or the kind of its refusal."""
    try:
        return normalise(row)
    except RowError as error:
        return error.kind


texts = st.text(max_size=8)
roles = st.sampled_from(["system", "user", "assistant"])
NAMES = {"system": ["system"], "user": ["human", "user"], "assistant": ["gpt", "chatgpt", "bing", "bard", "assistant"]}


@given(pairs=st.lists(st.tuples(roles, texts), max_size=6), data=st.data())
def test_sharegpt_and_openai_say_the_same(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    openai = {"messages": [{"role": role, "content": text} for role, text in pairs]}
    names = [(data.draw(st.sampled_from(NAMES[role])), text) for role, text in pairs]
    expected, got = result_of(openai), result_of(sharegpt(*names))
    assert got == expected
    if not isinstance(got, Conversation):
        return
    assert got.messages[-1]["role"] == "assistant"
    kept = iter(pairs)  # nothing is reordered or rewritten, only left out at the ends
    assert all((message["role"], message["content"]) in kept for message in got.messages)


KEYS = """
    messages conversations role from content value tool_calls function name arguments tools type text input_ids
    loss_mask images system finish weight id reasoning_content
""".split()  # noqa: SIM905
WORDS = st.sampled_from(["user", "assistant", "gpt", "text", "image_url", "length", "f", "{}", "[]", "\ud800"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=500)
@given(row=anything | st.dictionaries(st.sampled_from(KEYS), anything, max_size=5))
def test_any_json_is_a_row_or_refused(row: Any) -> None:
    assert isinstance(result_of(row), Conversation | TokenRow | str)
