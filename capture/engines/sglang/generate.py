"""The target's own answers from SGLang: token ids in, token ids out.

Whatever makes serving fast is left to SGLang (radix cache, CUDA graphs, overlapped scheduling). It holds more prompts
than it answers at a time, and each answer that ends makes room for the next prompt.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from eyas.capture.endpoints.dialects import seed_of
from eyas.capture.engines.base import Answer, EngineSettings, Prompt, Refused, Sampling, TakePrompts
from eyas.capture.engines.sglang.load import (
    DECIDED,
    answering_arguments,
    check_options,
    installed_version,
    read_outline,
)
from eyas.capture.engines.sglang.server import Server
from eyas.capture.errors import TargetError

MOST_HELD = 1024  # prompts, for each copy of the target
SECONDS_BETWEEN_LOOKS = 0.2  # at whether to stop

_REFUSED = {
    "dp": "give eyas regenerate --dp instead",
    "dp_size": "give eyas regenerate --dp instead",
    "data_parallel_size": "give eyas regenerate --dp instead",
    "nnodes": "workers on other nodes cannot reach this process",
    "node_rank": "workers on other nodes cannot reach this process",
    "is_embedding": "the target generates",
    "config": "give the options themselves",
    "skip_tokenizer_init": "eyas gives tokens",
    "tokenizer_worker_num": "eyas gives tokens",
}


class SglangGenerator:
    """Generator of engine ``sglang`` (capture/engines/base.py says what a generator is)."""

    def __init__(self, settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> None:
        self._settings = settings
        self._sampling = sampling
        self._most = batch_size or MOST_HELD * settings.dp
        self._server: Server | None = None

    def __enter__(self) -> SglangGenerator:
        """Start SGLang with the target. Raises TargetError or UsageError."""
        settings = self._settings
        check_generation(settings)
        outline = read_outline(
            settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        arguments = answering_arguments(settings, outline)
        server = Server(arguments, {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
        server.__enter__()
        try:
            server.wait_until_started()
        except BaseException:
            server.__exit__()
            raise
        self._server = server
        return self

    def __exit__(self, *exc: object) -> None:
        server, self._server = self._running, None
        server.__exit__(*exc)

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the generator is not entered: use it in a with statement")
        return self._server

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer, in tokens, by SGLang's memory (--mem-fraction-static)."""
        return self._running.max_tokens

    def generate(self, take: TakePrompts, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Answer | Refused]]:
        """Answer what ``take`` gives (see Generator.generate)."""
        server = self._running
        answered: queue.SimpleQueue[tuple[int, Future[dict[str, Any]]]] = queue.SimpleQueue()
        num_held = 0

        def submit(number: int, prompt: Prompt) -> None:
            future = server.generate(f"eyas-{number}", prompt.input_ids, self._parameters(prompt))
            future.add_done_callback(lambda done: answered.put((number, done)))

        while not should_stop():
            if num_held < self._most:
                for number, prompt in take(self._most - num_held):
                    submit(number, prompt)
                    num_held += 1
            if not num_held:
                return
            try:
                number, future = answered.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                if server.worker_failed.is_set():
                    raise TargetError(
                        "a process of SGLang failed; what it said stands above. What is finished stays: run the same "
                        "command again to go on"
                    ) from None
                continue
            num_held -= 1
            yield number, _answer(future)

    def _parameters(self, prompt: Prompt) -> dict[str, Any]:
        sampling = self._sampling
        greedy = sampling.temperature == 0
        return {
            "max_new_tokens": prompt.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "sampling_seed": seed_of(prompt),  # SGLang heeds it under --enable-deterministic-inference
            "stop_token_ids": sorted(sampling.stop_ids),
        }


def check_generation(settings: EngineSettings) -> None:
    """Refuse what can be refused before anything loads. Raises TargetError or UsageError."""
    check_options(settings.engine_options, command="regenerate", decided=DECIDED, refused=_REFUSED, refused_prefixes={})
    installed_version()


def create_generator(settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> SglangGenerator:
    """The generator that ``settings`` describe."""
    return SglangGenerator(settings, sampling, batch_size)


def _answer(future: Future[dict[str, Any]]) -> Answer | Refused:
    if future.cancelled():
        return Refused(reason="cancelled by SGLang")
    if (error := future.exception()) is not None:
        return Refused(reason=f"SGLang: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    result = future.result()
    reason = result["meta_info"].get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length"):
        return Refused(reason=f"SGLang: {reason.get('message', 'aborted')}")
    return Answer(token_ids=list(result["output_ids"]), finish=reason["type"])
