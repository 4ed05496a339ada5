"""What a server is asked and how its answer is read, by kind of server.

| dialect | asks | token ids | read in |
|---|---|---|---|
| Completions | /v1/completions with the prompt's token ids and ``return_token_ids`` | yes | vLLM 0.24 and 0.32, entrypoints/openai/completion/protocol.py; SGLang 0.5.23 knows it too |
| Generate | SGLang's /generate with ``input_ids`` | yes (``output_ids``) | SGLang 0.5.9, 0.5.14 and 0.5.23, managers/io_struct.py and tokenizer_manager.py |
| ChatMessages | /v1/chat/completions with messages and tools | no | any other |

Servers take sampling settings that a request leaves out from the model's generation_config.json (vLLM's
``--generation-config auto``, SGLang's ``--sampling-defaults model``), so each is said. SGLang honours a seed only under
``--enable-deterministic-inference`` (layers/sampler.py).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from eyas.capture.engines.base import Answer, MessageAnswer, Prompt, Sampling

SEED_BITS = 31  # what every server takes


class BadAnswer(Exception):
    """The server's answer is not what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One answer that is wanted."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer, and what the server says of it."""

    answer: Answer | MessageAnswer
    num_tokens: int
    # Verify steps of the target that accepted exactly j drafted tokens, by j; None where the server does not say.
    accepted_histogram: tuple[int, ...] | None = None


class Dialect(Protocol):
    """One way to ask."""

    path: str
    gives_tokens: bool

    def body(self, model: str, question: Question, sampling: Sampling) -> dict[str, Any]:
        """The JSON to post."""
        ...

    def read(self, body: Any, question: Question) -> Reply:
        """Raises BadAnswer."""
        ...


class Completions:
    path = "/v1/completions"
    gives_tokens = True

    def body(self, model: str, question: Question, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": question.prompt.input_ids.tolist(),
            "max_tokens": question.prompt.max_new_tokens,
            "seed": seed_of(question.prompt),
            "stop_token_ids": sorted(sampling.stop_ids),
            "return_token_ids": True,
            **_sampling(sampling),
            **_NEUTRAL,
        }

    def read(self, body: Any, question: Question) -> Reply:
        choice = _first_choice(body)
        _check_prompt(_of(body, "usage", "prompt_tokens"), question)
        statistics = _of(body, "metrics", "speculative_decoding", "acceptance_histogram")
        if statistics is None:
            statistics = _of(body, "sglext", "spec_tokens_details", "spec_correct_drafts_histogram")
        return _tokens(choice.get("token_ids"), choice.get("finish_reason"), statistics, question)


class Generate:
    path = "/generate"
    gives_tokens = True

    def body(self, model: str, question: Question, sampling: Sampling) -> dict[str, Any]:
        return {
            "input_ids": question.prompt.input_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": question.prompt.max_new_tokens,
                "sampling_seed": seed_of(question.prompt),
                "stop_token_ids": sorted(sampling.stop_ids),
                **_sampling(sampling),
                **_NEUTRAL,
            },
        }

    def read(self, body: Any, question: Question) -> Reply:
        _check_prompt(_of(body, "meta_info", "prompt_tokens"), question)
        statistics = _of(body, "meta_info", "spec_correct_drafts_histogram")
        if statistics is None:  # its name up to 0.5.14
            statistics = _of(body, "meta_info", "spec_accept_histogram")
        return _tokens(_of(body, "output_ids"), _of(body, "meta_info", "finish_reason", "type"), statistics, question)


class ChatMessages:
    path = "/v1/chat/completions"
    gives_tokens = False

    def __init__(self) -> None:
        self._reasoning_key = "reasoning_content"  # or reasoning (vLLM from 0.11 on): as this server calls it

    def body(self, model: str, question: Question, sampling: Sampling) -> dict[str, Any]:
        messages = [
            {self._reasoning_key if key == "reasoning_content" else key: value for key, value in message.items()}
            for message in question.messages
        ]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": question.prompt.max_new_tokens,
            "seed": seed_of(question.prompt),
            **_sampling(sampling),
        }
        return body if question.tools is None else {**body, "tools": question.tools}

    def read(self, body: Any, question: Question) -> Reply:
        choice = _first_choice(body)
        finish, given = choice.get("finish_reason"), choice.get("message")
        if finish not in ("stop", "length", "tool_calls") or not isinstance(given, Mapping):
            raise BadAnswer(f"finish_reason {finish!r}, message {given!r}")
        message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or ""}
        for key in ("reasoning_content", "reasoning"):
            if isinstance(given.get(key), str) and given[key]:
                self._reasoning_key = key
                message["reasoning_content"] = given[key]
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        if not message["content"] and len(message) == 2:
            raise BadAnswer("an empty message")
        number = _of(body, "usage", "completion_tokens")
        return Reply(
            answer=MessageAnswer(message=message, finish="length" if finish == "length" else "stop"),
            num_tokens=number if isinstance(number, int) else 0,
        )


_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def seed_of(prompt: Prompt) -> int:
    """The answer's own seed, as servers take it."""
    return prompt.seed & ((1 << SEED_BITS) - 1)


def _sampling(sampling: Sampling) -> dict[str, float]:
    greedy = sampling.temperature == 0
    return {"temperature": sampling.temperature, "top_p": 1.0 if greedy else sampling.top_p}


def _tokens(token_ids: Any, finish: Any, statistics: Any, question: Question) -> Reply:
    if not isinstance(token_ids, list) or not token_ids or not all(isinstance(token, int) for token in token_ids):
        raise BadAnswer(f"no token ids in the answer (finish_reason {finish!r})")
    if finish not in ("stop", "length"):
        raise BadAnswer(f"finish_reason {finish!r}")
    if len(token_ids) > question.prompt.max_new_tokens:
        raise BadAnswer(f"{len(token_ids)} tokens where {question.prompt.max_new_tokens} were asked for")
    histogram = None
    if isinstance(statistics, list) and all(isinstance(number, int) for number in statistics):
        histogram = tuple(statistics)
    return Reply(
        answer=Answer(token_ids=token_ids, finish="stop" if finish == "stop" else "length"),
        num_tokens=len(token_ids),
        accepted_histogram=histogram,
    )


def _check_prompt(found: Any, question: Question) -> None:
    expected = len(question.prompt.input_ids)
    if isinstance(found, int) and found != expected:
        raise BadAnswer(f"the server made {found} prompt tokens of the {expected} that were sent")


def _first_choice(body: Any) -> Mapping[str, Any]:
    choices = _of(body, "choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise BadAnswer("no choices in the answer")
    choice: Mapping[str, Any] = choices[0]
    return choice


def _of(body: Any, *keys: str) -> Any:
    """``body[key][key]...``, None where that is missing."""
    for key in keys:
        body = body.get(key) if isinstance(body, Mapping) else None
    return body
