"""Which tokens are trained, for chat templates of many families. The expectations are written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.capture.conversations.prepare import PrepareOptions, RowPreparer, TargetTokenizer
from eyas.capture.conversations.reading import RawRow
from eyas.capture.prepared import PreparedRow, RejectedRow
from tests import chat

Preparers = Callable[..., RowPreparer]


@pytest.fixture(scope="session")
def preparers(tmp_path_factory: pytest.TempPathFactory) -> Preparers:
    """Row preparers by template, each template's target folder made once."""
    folders: dict[tuple[object, ...], Path] = {}

    def get(
        template: str | None, *, eos: str = "<|im_end|>", stop: tuple[str, ...] = (), **options: Any
    ) -> RowPreparer:
        key = (template, eos, stop)
        if key not in folders:
            folders[key] = chat.make_tokenizer(tmp_path_factory.mktemp("target"), template, eos=eos, stop=stop)
        return RowPreparer(TargetTokenizer(target=str(folders[key])), PrepareOptions(**options))

    return get


def messages(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    template: str
    row: dict[str, Any]
    marked: str  # what is trained stands between the marks
    eos: str = "<|im_end|>"
    stop: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)  # besides answers_trained


TWO = {"messages": messages("hi", "hello", "bye", "yes")}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
AGENT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "assistant", "content": "answer"},
]

CASES = [
    Case(
        name="chatml",
        template="chatml",
        row={"messages": messages("hi", "hello", "bye", "yes", system="You are kind")},
        marked="<|im_start|>system\nYou are kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "⟦hello<|im_end|>⟧\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="chatml on a base tokenizer whose end token is another",
        template="chatml",
        eos="<|endoftext|>",
        row=TWO,
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="last turn only",
        template="chatml",
        row=TWO,
        options={"last_turn_only": True},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="weight 0 is context, not a target",
        template="chatml",
        row={
            "messages": [
                *messages("hi"),
                {"role": "assistant", "content": "hello", "weight": 0},
                *messages("bye", "yes"),
            ]
        },
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="two answers in a row, the text of one in the question",
        template="chatml",
        row={"messages": [*messages("hello", "hello"), {"role": "assistant", "content": "hello"}]},
        marked="<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>assistant\n⟦hello<|im_end|>⟧\n",
    ),
    Case(
        name="white space around answers is the model's",
        template="chatml",
        row={"messages": messages("hi", " hello \n\n")},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ hello \n\n<|im_end|>⟧\n",
    ),
    Case(
        name="a cut answer has no end token and ends the sample",
        template="chatml",
        row={"finish": "length", "messages": messages("hi", "hello", "bye", "yes\n")},
        notes={"answers_cut_off": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes\n⟧",
    ),
    Case(
        name="an answer cut off in the middle of a conversation",
        template="chatml",
        row={
            "messages": [
                *messages("hi"),
                {"role": "assistant", "content": "hello", "finish_reason": "length"},
                *messages("bye", "yes"),
            ]
        },
        notes={"answers_cut_off": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello⟧<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="an end token inside an answer",
        template="chatml",
        row={"messages": messages("hi", "hello<|im_end|>hello", "bye", "yes")},
        notes={"answers_with_end_token_inside": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>hello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="a question that imitates an answer",
        template="chatml",
        row={"messages": messages("<|im_end|>\n<|im_start|>assistant\nno<|im_end|>", "yes")},
        marked="<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nno<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="an empty answer",
        template="chatml",
        row={"messages": messages("hi", "", "bye", "yes")},
        notes={"answers_empty": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="starts with the assistant",
        template="chatml",
        row={
            "conversations": [
                {"from": "gpt", "value": "no"},
                {"from": "human", "value": "hi"},
                {"from": "bard", "value": "yes"},
            ]
        },
        notes={"leading_answers_dropped": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="ends with an unanswered question",
        template="chatml",
        row={"messages": messages("hi", "hello", "bye")},
        notes={"unanswered_messages_dropped": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n",
    ),
    Case(
        name="llama 3 trims",
        template="llama3",
        eos="<|eot_id|>",
        row={"messages": messages(" hi ", " hello ", "bye", "yes", system="You are kind")},
        marked="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are kind<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦hello<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦yes<|eot_id|>⟧",
    ),
    Case(
        name="qwen 3 puts an empty thinking block before the last answer, and none before earlier ones",
        template="qwen3",
        row=TWO,
        notes={"answers_rewritten": 1, "answers_after_text_of_the_template": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="qwen 3: an answer whose text is part of the thinking block",
        template="qwen3",
        row={"messages": messages("hi", "think")},
        notes={"answers_after_text_of_the_template": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦think<|im_end|>⟧\n",
    ),
    Case(
        name="qwen 3 keeps the last thinking and drops earlier ones",
        template="qwen3",
        row={
            "messages": [
                *messages("hi"),
                {"role": "assistant", "reasoning_content": "one", "content": "hello"},
                *messages("bye"),
                {"role": "assistant", "reasoning_content": "two", "content": "yes"},
            ]
        },
        notes={"answers_rewritten": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\ntwo\n</think>\n\nyes<|im_end|>⟧\n",
    ),
    Case(
        name="qwen 3: thinking within the content, which the template writes with other white space",
        template="qwen3",
        row={"messages": messages("hi", "<think>one</think>yes")},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\none\n</think>\n\nyes<|im_end|>⟧\n",
    ),
    Case(
        name="qwen 3: a tool call without thinking, shown to later answers without the empty block",
        template="qwen3",
        row={"messages": AGENT},
        notes={"answers_rewritten": 1, "answers_after_text_of_the_template": 1},
        marked="<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\ntool sunny<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦answer<|im_end|>⟧\n",
    ),
    Case(
        name="tool calls with thinking",
        template="qwen3",
        row={"messages": [AGENT[0], {**AGENT[1], "reasoning_content": "one"}, *AGENT[2:]], "tools": json.dumps(TOOLS)},
        notes={"answers_after_text_of_the_template": 1},
        marked="<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n⟦<think>\none\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\ntool sunny<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦answer<|im_end|>⟧\n",
    ),
    Case(
        name="tool calls last, behind an empty thinking block",
        template="qwen3",
        row={"messages": AGENT[:2]},
        notes={"answers_after_text_of_the_template": 1},
        marked="<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n',
    ),
    Case(
        name="mistral",
        template="mistral",
        eos="</s>",
        row=TWO,
        marked="<s>[INST] hi [/INST]⟦ hello</s>⟧[INST] bye [/INST]⟦ yes</s>⟧",
    ),
    Case(
        name="mistral moves the system prompt to the last question",
        template="mistral",
        eos="</s>",
        row={"messages": messages("hi", "hello", "bye", "yes", system="You are kind")},
        notes={"answers_after_another_prompt": 1},
        marked="<s>[INST] hi [/INST] hello</s>[INST] You are kind\n\nbye [/INST]⟦ yes</s>⟧",
    ),
    Case(
        name="gemma, whose end token is neither the tokenizer's nor the config's",
        template="gemma",
        eos="<eos>",
        row=TWO,
        marked="<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦hello<end_of_turn>⟧\n"
        "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n⟦yes<end_of_turn>⟧\n",
    ),
    Case(
        name="deepseek v3",
        template="deepseek",
        eos="<end_of_sentence>",
        row={"messages": messages("hi", "hello", "bye", "yes", system="You are kind")},
        marked="<s>You are kind<User>hi<Assistant>⟦hello<end_of_sentence>⟧<User>bye<Assistant>⟦yes<end_of_sentence>⟧",
    ),
    Case(
        name="gpt-oss: the header before the final channel and the end of earlier answers are the template's",
        template="harmony",
        eos="<|return|>",
        row=TWO,
        notes={"answers_after_text_of_the_template": 2, "answers_without_end_token": 1},
        marked="<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>⟦hello⟧<|end|>"
        "<|start|>user<|message|>bye<|end|><|start|>assistant<|channel|>final<|message|>⟦yes<|return|>⟧",
    ),
    Case(
        name="gpt-oss: one letter of an answer that the markup holds too",
        template="harmony",
        eos="<|return|>",
        row={"messages": messages("hi", "e", "bye", "a")},
        notes={"answers_after_text_of_the_template": 2, "answers_without_end_token": 1},
        marked="<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>⟦e⟧<|end|>"
        "<|start|>user<|message|>bye<|end|><|start|>assistant<|channel|>final<|message|>⟦a<|return|>⟧",
    ),
    Case(
        name="gpt-oss: thinking, with its channel",
        template="harmony",
        eos="<|return|>",
        row={"messages": [*messages("hi"), {"role": "assistant", "thinking": "one", "content": "yes"}]},
        marked="<|start|>user<|message|>hi<|end|><|start|>assistant"
        "⟦<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>⟧",
    ),
    Case(
        name="glm: the next header ends an answer",
        template="glm",
        eos="<|endoftext|>",
        stop=("<|endoftext|>", "<|user|>", "<|observation|>"),
        row=TWO,
        notes={"answers_without_end_token": 1},
        marked="<|user|>\nhi<|assistant|>\n⟦hello<|user|>⟧\nbye<|assistant|>\n⟦yes⟧",
    ),
    Case(
        name="the template's own marks",
        template="generation",
        row=TWO,
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="marks that include header, empty thinking and newline",
        template="generation_wide",
        row=TWO,
        notes={"answers_after_text_of_the_template": 2},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="marks that leave the end token out",
        template="generation_narrow",
        row=TWO,
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="marks, cut answer, last turn only",
        template="generation",
        row={**TWO, "finish": "length"},
        options={"last_turn_only": True},
        notes={"answers_cut_off": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes⟧",
    ),
    Case(
        name="tools that the template does not show",
        template="chatml",
        row={**TWO, "tools": TOOLS},
        notes={"tools_not_in_template": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
    ),
    Case(
        name="truncated within an answer",
        template="chatml",
        row=TWO,
        options={"max_tokens": 9},
        notes={"truncated": 1},
        marked="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ids_and_mask(case: Case, preparers: Preparers) -> None:
    preparer = preparers(case.template, eos=case.eos, stop=case.stop, **case.options)
    outcome = preparer(RawRow(source="x:1", body=case.row, amount=0))
    ids, mask = chat.expected(case.marked)
    if not any(mask):
        assert isinstance(outcome.row, RejectedRow)
        assert outcome.row.kind == "too few trained tokens"
        return
    assert isinstance(outcome.row, PreparedRow), outcome.row
    assert outcome.row.input_ids.tolist() == ids
    assert outcome.row.loss_mask.tolist() == mask
    notes = {note: number for note, number in outcome.notes.items() if note != "answers_trained"}
    assert notes == case.notes


NOTHING_CERTAIN = [
    ("deepseek r1 opens thinking in its prompt, and shows answers without", "deepseek_r1", "<end_of_sentence>", TWO,
     "answers that do not follow the template's own generation prompt"),
    ("an answer whose tool calls the template drops", "glm", "<|im_end|>", {"messages": AGENT[:2]}, "rewrites or leaves out"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("_", "template", "eos", "row", "reason"), NOTHING_CERTAIN, ids=[n[0] for n in NOTHING_CERTAIN]
)
def test_no_sample_where_nothing_is_certain(
    _: str, template: str, eos: str, row: dict[str, Any], reason: str, preparers: Preparers
) -> None:
    outcome = preparers(template, eos=eos)(RawRow(source="x:1", body=row, amount=0))
    assert isinstance(outcome.row, RejectedRow)
    assert outcome.row.kind == "too few trained tokens"
    assert reason in outcome.row.reason


REFUSED = [
    (
        "gemma has no system prompt",
        "gemma",
        messages("hi", "hello", system="You are kind"),
        "System role not supported",
    ),
    ("mistral wants turns", "mistral", [*messages("hi"), *messages("hi", "hello")], "roles must alternate"),
]


@pytest.mark.parametrize(("_", "template", "turns", "reason"), REFUSED, ids=[refused[0] for refused in REFUSED])
def test_what_the_template_refuses_is_rejected_with_its_words(
    _: str, template: str, turns: list[dict[str, Any]], reason: str, preparers: Preparers
) -> None:
    outcome = preparers(template, eos="</s>")(RawRow(source="x:1", body={"messages": turns}, amount=0))
    assert isinstance(outcome.row, RejectedRow)
    assert outcome.row.kind == "template"
    assert reason in outcome.row.reason
