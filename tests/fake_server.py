"""An OpenAI-compatible server without a model: its answers follow from the prompt and the seed alone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

END = 2  # <|im_end|> of tests.tiny's tokenizer
LONGEST = 12  # tokens of an answer, its end included
DROP = object()  # a trouble: the connection is cut

# Told the number of the question, from 0, and its body; gives what happens instead of an answer, or None.
Trouble = Callable[[int, dict[str, Any]], Any]


def answer_to(prompt: Sequence[int], seed: int, max_tokens: int, *, greedy: bool) -> tuple[list[int], str]:
    """The tokens that every fake server answers, and why they end."""
    draw = random.Random(f"{list(prompt)}:{'' if greedy else seed}")
    tokens = [draw.randrange(6, 128) for _ in range(draw.randrange(LONGEST))] + [END]
    return (tokens, "stop") if len(tokens) <= max_tokens else (tokens[:max_tokens], "length")


class FakeServer:
    """Context manager, in a thread of its own. ``stop`` and ``start`` at the same address as one likes."""

    def __init__(
        self,
        target: Path,
        *,
        kind: str = "vllm",  # or sglang, or plain: chat completions only
        model: str | None = None,
        trouble: Trouble = lambda number, body: None,
        delay: Callable[[], float] = lambda: 0.0,
        key: str | None = None,
        max_model_len: int = 512,
        adapters: Sequence[str] = (),
    ) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.kind, self.model = kind, model or str(target)
        self.trouble, self.delay, self.key = trouble, delay, key
        self.max_model_len, self.adapters = max_model_len, adapters
        self.message: dict[str, Any] | None = None  # of every chat completion, else the decoded answer
        self.questions: list[dict[str, Any]] = []  # bodies, those of verifications left out
        self.arrived: list[float] = []
        self.num_answers = self.num_tokenized = 0
        self.in_flight = self.most_in_flight = 0
        self.histogram = [0, 0, 0, 0]  # verify steps by drafted tokens accepted, of 3
        self.says_histogram = False
        self.has_draft = True  # kind vllm says so in its counters
        self.finished = 0
        self.hangs = False  # at everything
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve() -> None:
            app = web.Application(middlewares=[self._check_key])
            app.add_routes(
                [
                    web.get("/v1/models", self._models),
                    web.post("/v1/chat/completions", self._chat),
                    web.get("/metrics", self._metrics),
                ]
            )
            if self.kind != "plain":
                app.add_routes([web.post("/tokenize", self._tokenize), web.post("/v1/completions", self._completions)])
            if self.kind == "sglang":
                app.add_routes([web.post("/generate", self._generate)])
            self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = self._runner.addresses[0][1]
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def stop(self) -> None:
        """Close the address and every connection."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.hangs:
            await asyncio.sleep(30)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        owner = {"vllm": "vllm", "sglang": "sglang"}.get(self.kind, "somebody")
        card = {"id": self.model, "root": self.model, "owned_by": owner, "max_model_len": self.max_model_len}
        adapters = [{"id": name, "root": name, "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": [*adapters, card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        self.num_tokenized += 1
        if len(tokens) > self.max_model_len:
            return web.json_response({"error": {"message": "longer than max_model_len"}}, status=400)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == self.model

        def reply(tokens: list[int], finish: str, histogram: list[int]) -> dict[str, Any]:
            choice = {"text": "-", "token_ids": tokens, "finish_reason": finish}
            found = {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
            return {**found, "metrics": {"speculative_decoding": {"acceptance_histogram": histogram}}}

        return await self._answer(request, body, body["prompt"], body["seed"], body["max_tokens"], body, reply)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]

        def reply(tokens: list[int], finish: str, histogram: list[int]) -> dict[str, Any]:
            meta = {"finish_reason": {"type": finish}, "prompt_tokens": len(body["input_ids"])}
            return {
                "text": "-",
                "output_ids": tokens,
                "meta_info": {**meta, "spec_correct_drafts_histogram": histogram},
            }

        seed, most = sampling["sampling_seed"], sampling["max_new_tokens"]
        return await self._answer(request, body, body["input_ids"], seed, most, sampling, reply)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]

        def reply(tokens: list[int], finish: str, histogram: list[int]) -> dict[str, Any]:
            content = self.tokenizer.decode([token for token in tokens if token != END]) or "w6"
            message = self.message or {"role": "assistant", "content": content}
            if self.message is not None:
                finish = "tool_calls" if "tool_calls" in message else "stop"
            choice = {"message": message, "finish_reason": finish}
            return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}

        return await self._answer(request, body, prompt, body["seed"], body["max_tokens"], body, reply)

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: list[int],
        seed: int,
        max_tokens: int,
        sampling: dict[str, Any],
        reply: Callable[[list[int], str, list[int]], dict[str, Any]],
    ) -> web.StreamResponse:
        tokens, finish = answer_to(prompt, seed, max_tokens, greedy=sampling["temperature"] == 0)
        if max_tokens == 1:  # a verification
            return web.json_response(reply(tokens, finish, []))
        number = len(self.questions)
        self.questions.append(body)
        self.arrived.append(time.monotonic())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            trouble = self.trouble(number, body)
            if trouble is DROP:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if isinstance(trouble, web.Response):
                return trouble
            await asyncio.sleep(trouble if isinstance(trouble, float) else self.delay())
            histogram = self._speculate(len(tokens))
            self.num_answers += 1
            self.finished += 1
            return web.json_response(reply(tokens, finish, histogram if self.says_histogram else []))
        finally:
            self.in_flight -= 1

    def _speculate(self, num_tokens: int) -> list[int]:
        """Verify steps of 3 drafted tokens that give all tokens but the first."""
        histogram, left, step = [0, 0, 0, 0], num_tokens - 1, 0
        while left > 0:
            accepted = min(step % 4, left - 1)
            histogram[accepted] += 1
            left, step = left - accepted - 1, step + 1
        self.histogram = [a + b for a, b in zip(self.histogram, histogram, strict=True)]
        return histogram

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.kind != "vllm":
            return web.Response(status=404)
        labels = 'engine="0",model_name="m"'
        accepted = sum(n * steps for n, steps in enumerate(self.histogram))
        lines = [
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{labels}}} 0",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {self.in_flight}",
            "# TYPE vllm:request_success counter",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {self.finished}',
        ]
        if not self.has_draft:
            return web.Response(text="\n".join(lines) + "\n")
        lines += [
            "# TYPE vllm:spec_decode_num_drafts counter",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {sum(self.histogram)}",
            "# TYPE vllm:spec_decode_num_accepted_tokens counter",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted}",
            "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter",
        ]
        for position in range(3):
            reached = sum(self.histogram[position + 1 :])
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{labels},position="{position}"}} {reached}')
        return web.Response(text="\n".join(lines) + "\n")
