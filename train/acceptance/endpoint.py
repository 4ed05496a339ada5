"""What a running server's own speculation accepts, while it answers prompts.

Two sources. Where every answer says how many drafted tokens each of its verify steps accepted, those are summed: SGLang
does so in /generate (``meta_info``, managers/tokenizer_manager.py), vLLM with ``--per-request-spec-decode-metrics
summary`` (0.32, entrypoints/generate/base/serving.py). Else the server's counters are read before and after the prompts
of each category: vLLM's ``vllm:spec_decode_*`` (v1/spec_decode/metrics.py).

Both count what the target accepted, also behind the token that ends an answer, which ``eyas eval --decode`` leaves out;
``kept_length`` counts the tokens that are in the answers. A forward without drafted tokens (n-gram drafts that found
nothing) is none of vLLM's ``num_drafts``, and follows from the number of tokens.

Where the server answers others meanwhile, its counters hold theirs too: they give the acceptance of the whole server,
and nothing about our answers or their categories.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eyas.capture.endpoints.dialects import Question, Reply
from eyas.capture.endpoints.pool import Pool, PoolSettings
from eyas.capture.endpoints.prometheus import Metrics
from eyas.capture.endpoints.server import DRAFTS_COUNTER, Server, expected_of
from eyas.capture.engines import hash_weights, read_outline
from eyas.capture.engines.base import Answer, Prompt, Sampling
from eyas.capture.errors import EndpointError
from eyas.train.acceptance.prompts import Prompts, Turn

AT_A_TIME = 16
ANSWER_SECONDS = 600.0
SETTLE_SECONDS = 0.2  # between two readings of the counters, which are settled when both are the same
SETTLED_WITHIN_SECONDS = 10.0
PER_ANSWER, COUNTERS = "each answer's own statistics", "the server's counters, before and after"


class _Progress(Protocol):
    def update(self, amount: int, note: str = "") -> None: ...


ShowProgress = Callable[[str, "int | None", str], AbstractContextManager[_Progress]]  # description, total, unit


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """What is measured."""

    url: str
    target: str
    prompts: Path
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    max_prompts: int | None = None
    trust_remote_code: bool = False


@dataclass
class ServedTally:
    """What the server's draft did. Named as in the report of ``eyas eval --decode``."""

    name: str = "served draft"
    num_draft: int = 0
    num_tokens: int = 0  # given by the target's forwards, the prompts' own left out
    num_forwards: int = 0
    num_kept: int = 0  # of num_tokens, those in the answers
    reached: list[int] = field(default_factory=list)  # [N] proposals whose predecessors were all accepted
    accepted: list[int] = field(default_factory=list)  # [N]
    categories: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens and forwards
    num_turns: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens per target forward, the bonus token included."""
        return self.num_tokens / max(self.num_forwards, 1)

    @property
    def kept_length(self) -> float:
        """Tokens that are in the answers, per target forward."""
        return self.num_kept / max(self.num_forwards, 1)

    @property
    def acceptance(self) -> list[float]:
        """[N], conditional: of the proposals whose predecessors were all accepted."""
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

    def add(self, category: str, accepted: Sequence[int], *, num_drafts: int, num_kept: int, num_turns: int) -> None:
        """Take ``num_drafts`` verify steps, ``accepted[n]`` of which accepted more than n drafted tokens."""
        num_draft = max(self.num_draft, len(accepted))
        for counts in (self.reached, self.accepted):
            counts += [0] * (num_draft - len(counts))
        self.num_draft = num_draft
        for n, (reached, stood) in enumerate(zip([num_drafts, *accepted], accepted, strict=False)):
            self.reached[n] += reached
            self.accepted[n] += stood
        num_forwards = max(num_drafts, num_kept - sum(accepted))
        num_tokens = num_forwards + sum(accepted)
        self.num_tokens += num_tokens
        self.num_forwards += num_forwards
        self.num_kept += num_kept
        self.num_turns += num_turns
        tokens, forwards = self.categories.get(category, (0, 0))
        self.categories[category] = (tokens + num_tokens, forwards + num_forwards)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "accepted_length": self.accepted_length,
            "kept_length": self.kept_length,
            "acceptance": self.acceptance,
        }


@dataclass(frozen=True, kw_only=True)
class EndpointReport:
    """The result."""

    url: str
    server: str
    model: str
    target: str
    temperature: float
    num_prompts: int
    source: str  # PER_ANSWER or COUNTERS
    foreign_requests: int | None  # that the server was busy with meanwhile and not ours; None: it does not count
    tally: ServedTally
    seconds: float
    largest_window: int  # answers at a time

    @property
    def is_of_the_server(self) -> bool:
        """Whether requests of others are in the numbers: forwards, tokens and acceptance are the whole server's then,
        and what our answers kept and the categories are unknown."""
        return self.source == COUNTERS and bool(self.foreign_requests)

    @property
    def tokens_per_second(self) -> float:
        return self.tally.num_kept / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        tally = {**self.tally.to_json(), "tokens_per_second": self.tokens_per_second}
        if self.is_of_the_server:
            tally |= dict.fromkeys(("num_kept", "kept_length", "categories", "tokens_per_second"))
        return {
            "endpoint": self.url,
            "server": self.server,
            "model": self.model,
            "target": self.target,
            "num_draft": self.tally.num_draft,
            "num_prompts": self.num_prompts,
            "source": self.source,
            "foreign_requests": self.foreign_requests,
            "decoding": {
                "temperature": self.temperature,
                "drafts": [tally],
            },
        }


def evaluate_endpoint(
    config: EndpointConfig, show: ShowProgress, note: Callable[[str], None] = lambda line: None
) -> EndpointReport:
    """Have the server answer. Raises EndpointError where it does not, serves another model or does not speculate."""
    prompts = Prompts(
        config.prompts,
        config.target,
        max_prompts=config.max_prompts,
        revision=None,
        trust_remote_code=config.trust_remote_code,
    )
    return asyncio.run(_Measurement(config, prompts, note).run(show))


@dataclass
class _Heard:
    """What the answers of one category say."""

    num_turns: int = 0
    num_kept: int = 0
    histograms: list[tuple[int, ...]] = field(default_factory=list)
    silent: int = 0  # answers that needed verify steps and say nothing of them


class _Measurement:
    def __init__(self, config: EndpointConfig, prompts: Prompts, note: Callable[[str], None]) -> None:
        self._config, self._prompts, self._note = config, prompts, note
        self._max_tokens = 1 << 30

    async def run(self, show: ShowProgress) -> EndpointReport:
        config = self._config
        outline = read_outline(
            "transformers", target=config.target, revision=None, trust_remote_code=config.trust_remote_code
        )
        weights_hash = hash_weights("transformers", target=config.target, revision=None)
        settings = PoolSettings(
            urls=(config.url,),
            expected=expected_of(config.target, outline, self._prompts.tokenizer, weights_hash),
            sampling=Sampling(temperature=config.temperature, top_p=1.0, stop_ids=self._prompts.stop_ids),
            most=AT_A_TIME,
            timeout_seconds=ANSWER_SECONDS,
        )
        heard: dict[str, _Heard] = {}
        readings: list[Metrics | None] = []
        async with Pool(settings, self._note) as pool:
            (server,) = pool.servers
            if not server.dialect.gives_tokens:
                raise EndpointError(
                    f"--endpoint {config.url} gives no token ids back, so its answers cannot be counted: eyas eval "
                    "needs a server of vLLM or SGLang"
                )
            self._max_tokens = min(n for n in (outline.max_positions, pool.max_tokens, 1 << 30) if n is not None)
            readings.append(await _settled(server, self._note))
            started = time.monotonic()
            with show("eval", len(self._prompts), "prompts") as progress:
                for category, numbers in self._prompts.categories.items():
                    heard[category] = await self._answer(pool, numbers, progress)
                    readings.append(await _settled(server, self._note))
            seconds = time.monotonic() - started
            (done,) = pool.tallies
        num_turns = sum(found.num_turns for found in heard.values())
        if not num_turns:
            raise EndpointError(f"{config.prompts}: no prompt leaves room for --max-new-tokens {config.max_new_tokens}")
        foreign_requests = _foreign(readings[0], readings[-1], num_turns)
        tally, source = self._tally(heard, readings, foreign_requests)
        return EndpointReport(
            url=config.url,
            server=server.kind,
            model=server.model,
            target=config.target,
            temperature=config.temperature,
            num_prompts=len(self._prompts),
            source=source,
            foreign_requests=foreign_requests,
            tally=tally,
            seconds=seconds,
            largest_window=done.largest_window,
        )

    async def _answer(self, pool: Pool, numbers: Sequence[int], progress: _Progress) -> _Heard:
        """Ask every turn of these prompts; those of different prompts at the same time."""
        config, heard = self._config, _Heard()
        left = list(reversed(numbers))

        def next_question() -> tuple[Question, Turn] | None:
            while left:
                number = left.pop()
                turn = self._prompts.ask(
                    number, max_new_tokens=config.max_new_tokens, max_tokens=self._max_tokens, seed=config.seed
                )
                if turn is not None:
                    ids = np.array(turn.token_ids, np.int32)
                    prompt = Prompt(input_ids=ids, max_new_tokens=config.max_new_tokens, seed=turn.seed)
                    return Question(prompt=prompt, messages=[], tools=None), turn
                progress.update(1)
            return None

        def on_reply(turn: Turn, reply: Reply) -> None:
            assert isinstance(reply.answer, Answer)
            heard.num_turns += 1
            heard.num_kept += reply.num_tokens - 1  # the first token is the prompt's own forward's
            if reply.accepted_histogram:
                heard.histograms.append(reply.accepted_histogram)
            elif reply.num_tokens > 1:
                heard.silent += 1
            if self._prompts.answer(turn, reply.answer.token_ids):
                left.append(turn.prompt)
            else:
                progress.update(1)

        def on_failure(turn: Turn, kind: str, reason: str) -> None:
            raise EndpointError(f"--endpoint {config.url}: prompt {turn.prompt} turn {turn.turn}: {reason}")

        stopped, _ = await pool.run(next_question, on_reply, on_failure, lambda: None)
        if stopped is not None:
            raise EndpointError(f"--endpoint {config.url}: {stopped}")
        return heard

    def _tally(
        self, heard: Mapping[str, _Heard], readings: Sequence[Metrics | None], foreign_requests: int | None
    ) -> tuple[ServedTally, str]:
        tally = ServedTally()
        if any(found.histograms for found in heard.values()) and not any(found.silent for found in heard.values()):
            for category, found in heard.items():
                longest = max(map(len, found.histograms), default=1)
                steps = np.zeros(longest, np.int64)  # [N + 1], by drafted tokens accepted
                for histogram in found.histograms:
                    steps[: len(histogram)] += histogram
                accepted = [int(steps[n + 1 :].sum()) for n in range(longest - 1)]
                tally.add(
                    category,
                    accepted,
                    num_drafts=int(steps.sum()),
                    num_kept=found.num_kept,
                    num_turns=found.num_turns,
                )
            return tally, PER_ANSWER
        for (category, found), before, after in zip(heard.items(), readings, readings[1:], strict=False):
            if before is None or after is None or after.get(DRAFTS_COUNTER) is None:
                raise EndpointError(
                    f"--endpoint {self._config.url} says nothing of speculation, neither in its answers nor at "
                    "/metrics: start it with a draft (vLLM --speculative-config, SGLang --speculative-algorithm)"
                )
            num_drafts = int((after.get(DRAFTS_COUNTER) or 0) - (before.get(DRAFTS_COUNTER) or 0))
            if num_drafts < 0:
                raise EndpointError(f"--endpoint {self._config.url}: its counters went back, so it was restarted")
            counted = zip(after.positions(_ACCEPTED), before.positions(_ACCEPTED), strict=True)
            tally.add(
                category,
                [int(there - then) for there, then in counted],
                num_drafts=num_drafts,
                num_kept=0 if foreign_requests else found.num_kept,
                num_turns=found.num_turns,
            )
        return tally, COUNTERS


_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_REQUESTS = "vllm:request_success_total"
_IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def _foreign(first: Metrics | None, last: Metrics | None, num_ours: int) -> int | None:
    """Requests that the server answered, or is still busy with, and that were not ours."""
    if first is None or last is None or (total := last.get(_REQUESTS)) is None:
        return None
    return max(0, int(total - (first.get(_REQUESTS) or 0)) + _in_flight(last) - num_ours)


def _in_flight(metrics: Metrics) -> int:
    return int(sum(metrics.get(name) or 0 for name in _IN_FLIGHT))


async def _settled(server: Server, note: Callable[[str], None]) -> Metrics | None:
    """The counters once nothing runs and they no longer move, or as they are after SETTLED_WITHIN_SECONDS.

    The last step of an answer is counted after the answer has left.
    """
    deadline = time.monotonic() + SETTLED_WITHIN_SECONDS
    known = await server.metrics()
    told = False
    while known is not None and time.monotonic() < deadline:
        await asyncio.sleep(SETTLE_SECONDS)
        again = await server.metrics()
        if again is None or (not _in_flight(again) and _same(known, again)):
            return again
        if not told and (number := _in_flight(again)):  # ours have been answered, and are no longer counted by now
            told = True
            note(
                f"the server is busy with {number} requests of others: waiting up to {SETTLED_WITHIN_SECONDS:g} s "
                "for them"
            )
        known = again
    return known


def _same(one: Metrics, two: Metrics) -> bool:
    return all(one.get(name) == two.get(name) for name in (DRAFTS_COUNTER, _REQUESTS))
