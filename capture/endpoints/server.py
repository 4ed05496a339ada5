"""One OpenAI-compatible server: is it the target, what it can do, and asking it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from eyas.capture.endpoints.dialects import (
    BadAnswer,
    ChatMessages,
    Completions,
    Dialect,
    Generate,
    Question,
    Reply,
)
from eyas.capture.endpoints.prometheus import Metrics, parse
from eyas.capture.engines import hash_weights, read_outline
from eyas.capture.engines.base import Answer, Prompt, Sampling, TargetOutline
from eyas.capture.errors import EndpointError, TargetError
from eyas.capture.tokenizer import PROBE_TEXT, vocabulary_texts
from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLE = "EYAS_API_KEY"
SHORT_SECONDS = 30.0  # for everything but an answer
DRAFTS_COUNTER = "vllm:spec_decode_num_drafts_total"  # vLLM with a draft alone has it
QUEUE_GAUGES = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
LONGEST_BODY = 300  # characters of an error that are shown
LONGEST_TEXT = 32768  # tokens to ask /tokenize for: less than 1 MiB, the most that proxies let through
SHORT_TEXT = 4096  # where the server does not say what it takes


class Unreachable(Exception):
    """Nothing answers there, or not in time. No request was taken."""


class Dropped(Exception):
    """The request was taken and no answer came: connection lost, timed out, or an error of the server (5xx)."""


class Busy(Exception):
    """The server wants fewer requests (429, 503)."""

    def __init__(self, reason: str, retry_after: float | None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after  # seconds


class Refused(Exception):
    """The server will never answer this request (400, 413, 422)."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What tells the target."""

    target: str  # as --target says
    config_hash: str
    weights_hash: str | None  # None: its weights are not here
    vocab_size: int
    # PROBE_TEXT and texts of the vocabulary within so many tokens, each with its ids without special tokens
    probes: Callable[[int], tuple[tuple[str, list[int]], ...]]
    ask_ids: tuple[int, ...]  # a short prompt


def expected_of(target: str, outline: TargetOutline, tokenizer: Any, weights_hash: str | None) -> Expected:
    """What a server of ``target`` must show."""
    ids = tokenizer.encode("1 2 3", add_special_tokens=False)

    @cache  # servers are verified again and again
    def probes(longest: int) -> tuple[tuple[str, list[int]], ...]:
        texts = [PROBE_TEXT, *vocabulary_texts(tokenizer, longest)]
        return tuple((text, tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    return Expected(
        target=target,
        config_hash=outline.config_hash,
        weights_hash=weights_hash,
        vocab_size=outline.vocab_size,
        probes=probes,
        ask_ids=tuple(ids),
    )


@dataclass
class Server:
    """A server by its address. ``verify`` comes first."""

    url: str
    client: aiohttp.ClientSession
    timeout_seconds: float  # of an answer
    model: str = ""
    kind: str = ""  # as the server calls itself: vllm, sglang, ...
    max_tokens: int | None = None  # prompt and answer together
    dialect: Dialect = field(default_factory=ChatMessages)
    warnings: list[str] = field(default_factory=list)
    _root: Any = None  # where it says that the model is from

    async def verify(self, expected: Expected, sampling: Sampling) -> None:
        """Find out what is served and how to ask it.

        Raises EndpointError where it is another model than the target; Unreachable, Dropped or Busy where it cannot be
        known now.
        """
        self.warnings = []
        self._take_model(await self._get_json("/v1/models"), expected)
        await self._compare_folder(expected)
        await self._compare_tokenizer(expected)
        await self._find_dialect(expected, sampling)

    async def ask(self, question: Question, sampling: Sampling, expected: Expected) -> Reply:
        """Raises Unreachable, Dropped, Busy, Refused, BadAnswer, EndpointError."""
        body = self.dialect.body(self.model, question, sampling)
        reply = self.dialect.read(await self._post(self.dialect.path, body, self.timeout_seconds), question)
        self._check_tokens(reply, expected, sampling)
        return reply

    async def healthy(self) -> bool:
        """Whether it answers at all."""
        try:
            await self._get_json("/v1/models")
        except (Unreachable, Dropped, EndpointError):
            return False
        except (Busy, Refused):
            return True
        return True

    async def metrics(self) -> Metrics | None:
        """Its counters; None where it shows none."""
        import aiohttp

        try:
            async with self.client.get(self.url + "/metrics", timeout=_timeout(SHORT_SECONDS)) as response:
                return parse(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
            return None

    async def speculates(self) -> bool:
        """Whether a vLLM says that it has a draft."""
        metrics = await self.metrics()
        return metrics is not None and metrics.get(DRAFTS_COUNTER) is not None

    async def waiting(self) -> float | None:
        """Requests that wait in the server; None where it does not say."""
        metrics = await self.metrics()
        if metrics is None:
            return None
        return next((found for name in QUEUE_GAUGES if (found := metrics.get(name)) is not None), None)

    def _take_model(self, body: Any, expected: Expected) -> None:
        cards = body.get("data") if isinstance(body, Mapping) else None
        if not isinstance(cards, list) or not cards:
            raise EndpointError(f"--endpoint {self.url}: /v1/models lists no model: is it an OpenAI-compatible server?")
        models = [card for card in cards if isinstance(card, Mapping) and not card.get("parent")]  # no adapters
        if not models:
            raise EndpointError(f"--endpoint {self.url}: /v1/models lists adapters alone")
        named = [card for card in models if expected.target in (card.get("id"), card.get("root"))]
        if not named:
            named = [card for card in models if Path(expected.target).name in _names(card)]
        chosen = named or models
        if not named and len({str(card.get("id")) for card in models}) > 1:
            raise EndpointError(
                f"--endpoint {self.url} serves {', '.join(str(card.get('id')) for card in models)}, none of which is "
                f"called {expected.target}: give --target the name of one of them, or serve the target as "
                f"{Path(expected.target).name}"
            )
        card = chosen[0]
        self.model = str(card.get("id"))
        self.kind = str(card.get("owned_by") or "")
        limit = card.get("max_model_len")
        self.max_tokens = limit if isinstance(limit, int) else None
        if not named:
            self.warnings.append(f"serves {self.model!r}, and --target is {expected.target!r}")
        self._root = card.get("root")

    async def _compare_folder(self, expected: Expected) -> None:
        """Where the server names a folder that is here too, it holds the target's configuration and weights."""
        root = self._root
        if self.kind == "sglang":  # /v1/models has the name it is served by (0.5.23, entrypoints/http_server.py)
            try:
                info = await self._get_json("/model_info")
            except (NoSuchPath, Refused):
                info = None
            root = info.get("model_path") if isinstance(info, Mapping) else None
        if not isinstance(root, str) or not Path(root, "config.json").is_file():
            return
        if Path(root).resolve() == Path(expected.target).resolve():
            return
        try:
            outline = read_outline("transformers", target=root, revision=None, trust_remote_code=False)
        except TargetError:
            return
        if outline.config_hash != expected.config_hash:
            raise EndpointError(
                f"--endpoint {self.url} runs {root}, whose config.json is not that of --target {expected.target}: "
                "give --target the model that is served"
            )
        weights = hash_weights("transformers", target=root, revision=None)
        if None not in (weights, expected.weights_hash) and weights != expected.weights_hash:
            raise EndpointError(
                f"--endpoint {self.url} runs the weights in {root}, which are not those of --target {expected.target}: "
                "give --target the model that is served"
            )

    async def _compare_tokenizer(self, expected: Expected) -> None:
        """vLLM (entrypoints/serve/tokenize) and SGLang (entrypoints/http_server.py) share /tokenize."""
        longest = min(SHORT_TEXT if self.max_tokens is None else max(self.max_tokens - 1, 1), LONGEST_TEXT)
        for number, (text, ids) in enumerate(expected.probes(longest)):
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            try:
                found = await self._post("/tokenize", body, SHORT_SECONDS)
            except (Refused, EndpointError, Dropped):
                found = None
            tokens = found.get("tokens") if isinstance(found, Mapping) else None
            if not isinstance(tokens, list):
                self.warnings.append(
                    f"gives no tokens of {len(ids)} at /tokenize: its tokenizer was compared in part"
                    if number
                    else "has no /tokenize: whether its tokenizer is the target's cannot be seen"
                )
                return
            if tokens == ids:
                continue
            pairs = zip([*tokens, None], [*ids, None], strict=False)
            at, (theirs, ours) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            raise EndpointError(
                f"--endpoint {self.url} serves {self.model!r} with another tokenizer than that of --target "
                f"{expected.target}: of a probe text, token {at} is {theirs} there and {ours} here. Give --target the "
                "model that is served"
            )

    async def _find_dialect(self, expected: Expected, sampling: Sampling) -> None:
        prompt = Prompt(input_ids=np.array(expected.ask_ids, np.int32), max_new_tokens=1, seed=0)
        question = Question(prompt=prompt, messages=[{"role": "user", "content": "-"}], tools=None)
        by_tokens: Sequence[Dialect] = [Generate(), Completions()] if self.kind == "sglang" else [Completions()]
        failures = []
        for dialect in by_tokens:
            self.dialect = dialect
            try:
                await self.ask(question, sampling, expected)
            except (Refused, BadAnswer, NoSuchPath) as error:
                failures.append(f"{dialect.path}: {error}")
            else:
                return
        self.dialect = ChatMessages()
        try:
            await self.ask(question, sampling, expected)
        except BadAnswer:
            pass  # one token is not always a message
        except (Refused, NoSuchPath) as error:
            failures.append(f"{self.dialect.path}: {error}")
            raise EndpointError(f"--endpoint {self.url} answers no question: {'; '.join(failures)}") from error
        self.warnings.append(
            "gives no token ids back, so eyas prepare will tokenize its answers again, which need not give the tokens "
            f"that were generated ({'; '.join(failures)})"
        )

    def _check_tokens(self, reply: Reply, expected: Expected, sampling: Sampling) -> None:
        if not isinstance(reply.answer, Answer):
            return
        ids = reply.answer.token_ids
        if min(ids) < 0 or max(ids) >= expected.vocab_size:
            raise EndpointError(
                f"--endpoint {self.url} answered with token id {max(ids)}, and --target {expected.target} has "
                f"{expected.vocab_size} tokens: it serves another model"
            )
        if reply.answer.finish == "stop" and ids[-1] not in sampling.stop_ids:
            raise BadAnswer(f"it ends with token {ids[-1]}, which does not end an answer of the target")

    async def _get_json(self, path: str) -> Any:
        return await self._request("GET", path, None, SHORT_SECONDS)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        return await self._request("POST", path, body, seconds)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        import aiohttp

        try:
            async with self.client.request(
                method, self.url + path, json=body, timeout=_timeout(seconds), allow_redirects=False
            ) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                reason = f"HTTP {response.status}: {_error_text(await response.text(errors='replace'))}"
                retry_after = _retry_after(response.headers.get("Retry-After"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Dropped(f"{path}: {str(error) or type(error).__name__}") from error
        except asyncio.TimeoutError as error:
            raise Dropped(f"{path}: no answer within {seconds:g} s") from error
        except ValueError as error:
            raise Dropped(f"{path}: an answer that is no JSON ({error})") from error
        if response.status in (429, 503):
            raise Busy(reason, retry_after)
        if response.status in (401, 403):
            raise EndpointError(f"--endpoint {self.url} asks for a key ({reason}): put it into {KEY_VARIABLE}")
        if response.status in (404, 405, 501):
            raise NoSuchPath(f"--endpoint {self.url}{path}: {reason}")
        if response.status >= 500 or response.status == 408:
            raise Dropped(f"{path}: {reason}")
        raise Refused(reason)


class NoSuchPath(EndpointError):
    """The server does not know what it was asked for, or the model that was asked."""


def normalise_url(url: str) -> str:
    """``url`` without the /v1 that OpenAI's clients want. Raises UsageError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"--endpoint {url}: expected an address such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_client() -> aiohttp.ClientSession:
    """For all servers of a run."""
    import aiohttp

    key = os.environ.get(KEY_VARIABLE)
    # uvicorn closes idle connections after 5 s; a request on one that is just being closed is lost.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=True)


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    import aiohttp

    return aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, SHORT_SECONDS))


def _names(card: Mapping[str, Any]) -> set[str]:
    return {Path(str(card[key])).name for key in ("id", "root") if card.get(key)}


def _error_text(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_BODY else f"{text[:LONGEST_BODY]}..."


def _retry_after(value: str | None) -> float | None:
    """Seconds; the header holds those or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())
