"""Several servers with one list of questions: how many each is asked at a time, what is asked again, who is left alone.

- A server that cannot be reached, or that fails MEMBER_FAILURES times in a row, is left; its questions go to the
  others. It is looked at again after REST_SECONDS, doubled each time, and is verified anew then: it may have come back
  as another model, and is given up for good if so.
- 429 and 503 cost the question nothing: the server rests for its Retry-After, else as after a failure.
- A question that was lost (connection dropped, timeout, 5xx, an answer that is none) is asked again after a backoff,
  ATTEMPTS times in all, and then is a failure. One that the server refuses (400, 413, 422) is a failure at once.
- Where no server answers anything for PATIENCE_SECONDS the pool ends, with work left.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from eyas.capture.endpoints.dialects import BadAnswer, Question, Reply
from eyas.capture.endpoints.server import (
    Busy,
    Dropped,
    Expected,
    Refused,
    Server,
    Unreachable,
    open_client,
)
from eyas.capture.endpoints.window import Window
from eyas.capture.engines.base import Sampling
from eyas.capture.errors import EndpointError

ATTEMPTS = 5
BACKOFF_SECONDS = 1.0  # before the second attempt; doubled for each later one
MEMBER_FAILURES = 8
REST_SECONDS = 5.0
LONGEST_REST_SECONDS = 300.0
LONGEST_BUSY_SECONDS = 30.0
PATIENCE_SECONDS = 900.0
REFUSALS_IN_A_ROW = 16  # without one answer: then it is not the questions
WATCH_SECONDS = 5.0  # between looks at a server's queue
HEALTH_FAILURES = 3  # looks in a row that found nothing, while no answer came
TICK_SECONDS = 0.2  # between looks at should_stop
DEFAULT_MOST = 512  # answers in flight at one server

NO_SERVER = "no endpoint answers"


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The servers, and what tells that they serve the target."""

    urls: tuple[str, ...]
    expected: Expected
    sampling: Sampling
    most: int  # answers in flight at one server
    timeout_seconds: float  # of one answer


@dataclass
class Tally:
    """What one server did."""

    url: str
    model: str = ""
    server: str = ""  # vllm, sglang, ...
    gives_tokens: bool = False
    num_answers: int = 0
    num_tokens: int = 0
    num_lost: int = 0  # questions that were taken and not answered
    num_busy: int = 0  # 429, 503
    num_rests: int = 0  # times it was left
    largest_window: int = 0


@dataclass
class _Member:
    server: Server
    window: Window
    tally: Tally
    in_flight: dict[_Job, asyncio.Task[None]] = field(default_factory=dict)
    rest_until: float | None = None  # not asked before, and verified first where ``verify``
    verify: bool = True
    rests: int = 0  # in a row
    failures: int = 0  # in a row
    busy: int = 0  # rounds of 429 and 503 in a row
    busy_at: float = float("-inf")
    full_at: float = float("-inf")  # when as many were last in flight as may be
    last_answer: float = 0.0
    gone: str = ""  # why it was given up
    waking: bool = False

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(eq=False)
class _Job:
    question: Question
    tag: Any
    attempts: int = 0
    sent_at: float = 0.0


Outcome = tuple[_Member, _Job, "Reply | Exception"]


class Pool:
    """Asks. ``run`` may be called more than once."""

    def __init__(self, settings: PoolSettings, note: Callable[[str], None]) -> None:
        """``note`` is told what a user should know, a line at a time."""
        self._settings = settings
        self._note = note
        self._members: list[_Member] = []
        self._answered = False
        self._refused_in_a_row = 0

    @property
    def tallies(self) -> list[Tally]:
        return [member.tally for member in self._members]

    @property
    def servers(self) -> list[Server]:
        """Those that are up."""
        return [member.server for member in self._members if member.rest_until is None and not member.gone]

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt and answer together that every server takes."""
        return min((server.max_tokens for server in self.servers if server.max_tokens is not None), default=None)

    async def __aenter__(self) -> Pool:
        """Verify the servers. Raises EndpointError where one serves another model, or none can be reached."""
        settings = self._settings
        self._client = open_client()
        try:
            for url in settings.urls:
                server = Server(url, self._client, settings.timeout_seconds)
                self._members.append(_Member(server, Window(settings.most), Tally(url)))
            found = await asyncio.gather(*(self._verify(member) for member in self._members))
            if not any(reason is None for reason in found):
                reasons = [f"{url}: {reason}" for url, reason in zip(settings.urls, found, strict=True)]
                raise EndpointError(f"no endpoint answers: {'; '.join(reasons)}. Is the server running there?")
            for member, reason in zip(self._members, found, strict=True):
                if reason is not None:
                    self._leave(member, reason)
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def run(
        self,
        next_question: Callable[[], tuple[Question, Any] | None],
        on_reply: Callable[[Any, Reply], None],
        on_failure: Callable[[Any, str, str], None],
        why_stop: Callable[[], str | None],
    ) -> tuple[str | None, list[Any]]:
        """Ask until ``next_question`` has no more and all are answered.

        ``next_question`` gives a question and a tag of the caller's, or None for now; ``on_reply`` is given the tag
        and may make more questions; ``on_failure`` the tag, the kind (refused, server) and the reason. Returns why it
        stopped early, None where it did not, and the tags of what was not answered then. Raises EndpointError.
        """
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._again: list[tuple[float, int, _Job]] = []  # a heap: when, and in which order
        self._order = itertools.count()
        self._last_answer = time.monotonic()
        self._background: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        for member in self._members:
            self._start(self._watch(member))
        try:
            while True:
                reason = why_stop() or self._why_hopeless()
                if reason is not None:
                    while not self._outcomes.empty():
                        self._take(self._outcomes.get_nowait(), on_reply, on_failure)
                    return reason, self._left()
                if self._broken is not None:
                    raise self._broken
                self._wake()
                more = self._send(next_question)
                busy = any(member.in_flight for member in self._members)
                if not more and not busy and not self._again and self._outcomes.empty():
                    return None, []
                if all(member.gone for member in self._members):
                    raise EndpointError("; ".join(member.gone for member in self._members))
                try:
                    outcome = await asyncio.wait_for(self._outcomes.get(), TICK_SECONDS)
                except asyncio.TimeoutError:
                    continue
                while True:
                    self._take(outcome, on_reply, on_failure)
                    if self._outcomes.empty():
                        break
                    outcome = self._outcomes.get_nowait()
        finally:
            tasks = list(self._background)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for member in self._members:
                member.in_flight.clear()

    def _left(self) -> list[Any]:
        jobs = [job for member in self._members for job in member.in_flight]
        return [job.tag for job in [*jobs, *(job for _, _, job in self._again)]]

    def _why_hopeless(self) -> str | None:
        if time.monotonic() - self._last_answer <= PATIENCE_SECONDS:
            return None
        return NO_SERVER if all(member.gone or member.rests or member.busy for member in self._members) else None

    def _send(self, next_question: Callable[[], tuple[Question, Any] | None]) -> bool:
        """Ask as many as there is room for; says whether there may be more to ask."""
        now = time.monotonic()
        while (member := self._free(now)) is not None:
            if self._again and self._again[0][0] <= now:
                job = heapq.heappop(self._again)[2]
            elif (given := next_question()) is not None:
                job = _Job(*given)
            else:
                return False
            job.sent_at = time.monotonic()
            member.in_flight[job] = self._start(self._ask(member, job))
            if len(member.in_flight) >= member.window.size:
                member.full_at = job.sent_at
        return True

    def _free(self, now: float) -> _Member | None:
        """The server with the most room, of those that may be asked."""
        free = [
            member
            for member in self._members
            if not member.gone and member.rest_until is None and len(member.in_flight) < member.window.size
        ]
        return max(free, key=lambda member: member.window.size - len(member.in_flight), default=None)

    async def _ask(self, member: _Member, job: _Job) -> None:
        outcome: Reply | Exception
        try:
            outcome = await member.server.ask(job.question, self._settings.sampling, self._settings.expected)
        except (Unreachable, Dropped, Busy, Refused, BadAnswer, EndpointError) as error:
            outcome = error
        await self._outcomes.put((member, job, outcome))

    def _take(
        self,
        outcome: Outcome,
        on_reply: Callable[[Any, Reply], None],
        on_failure: Callable[[Any, str, str], None],
    ) -> None:
        member, job, result = outcome
        now = time.monotonic()
        in_flight = len(member.in_flight)
        member.in_flight.pop(job, None)
        if isinstance(result, Reply):
            self._answered, self._refused_in_a_row, self._last_answer = True, 0, now
            member.failures = member.rests = member.busy = 0
            member.last_answer = now
            member.window.answered(
                sent_at=job.sent_at, now=now, num_tokens=result.num_tokens, was_full=member.full_at >= job.sent_at
            )
            tally = member.tally
            tally.num_answers += 1
            tally.num_tokens += result.num_tokens
            tally.largest_window = max(tally.largest_window, in_flight)
            on_reply(job.tag, result)
        elif isinstance(result, Refused):
            self._refused_in_a_row += 1
            if self._refused_in_a_row >= REFUSALS_IN_A_ROW and not self._answered:
                raise EndpointError(f"{member.url} refuses every question: {result}")
            on_failure(job.tag, "refused", str(result))
        elif isinstance(result, Busy):
            member.tally.num_busy += 1
            member.window.congested(sent_at=job.sent_at, now=now)
            self._ask_again(job, 0.0)
            if job.sent_at > member.busy_at:
                member.busy, member.busy_at = member.busy + 1, now
            backoff = min(BACKOFF_SECONDS * 2 ** (member.busy - 1), LONGEST_BUSY_SECONDS)
            self._rest(member, backoff if result.retry_after is None else result.retry_after, verify=False)
        elif isinstance(result, Unreachable | EndpointError):
            self._ask_again(job, 0.0)
            self._leave(member, str(result))
        else:  # Dropped, BadAnswer
            member.tally.num_lost += 1
            member.failures += 1
            member.window.congested(sent_at=job.sent_at, now=now)
            self._lost(job, str(result), on_failure)
            if member.failures >= MEMBER_FAILURES:
                self._leave(member, str(result))

    def _lost(self, job: _Job, reason: str, on_failure: Callable[[Any, str, str], None]) -> None:
        job.attempts += 1
        if job.attempts >= ATTEMPTS:
            on_failure(job.tag, "server", f"{job.attempts} attempts failed, the last: {reason}")
        else:  # jitter keeps what failed together from coming back together
            self._ask_again(job, BACKOFF_SECONDS * 2 ** (job.attempts - 1) * random.uniform(0.5, 1.5))

    def _ask_again(self, job: _Job, seconds: float) -> None:
        heapq.heappush(self._again, (time.monotonic() + seconds, next(self._order), job))

    def _leave(self, member: _Member, reason: str) -> None:
        """Ask this server nothing until it was verified again."""
        if member.rest_until is not None and member.verify:
            return  # known already
        seconds = min(REST_SECONDS * 2**member.rests, LONGEST_REST_SECONDS)
        if member.rests == 0:
            self._note(f"{member.url} is left alone, and tried again in {seconds:g} s and later ({reason})")
        member.rests += 1
        member.tally.num_rests += 1
        member.failures = 0
        self._rest(member, seconds, verify=True)

    def _rest(self, member: _Member, seconds: float, *, verify: bool) -> None:
        until = time.monotonic() + seconds
        member.rest_until = max(until, member.rest_until or until)
        member.verify = member.verify or verify

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose defects end the run, not only itself."""
        task = asyncio.create_task(work)
        self._background.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._broken = error

        task.add_done_callback(ended)
        return task

    def _wake(self) -> None:
        now = time.monotonic()
        for member in self._members:
            if member.gone or member.waking or member.rest_until is None or member.rest_until > now:
                continue
            if not member.verify:
                member.rest_until = None
                continue
            member.waking = True
            self._start(self._verify_again(member))

    async def _verify_again(self, member: _Member) -> None:
        try:
            reason = await self._verify(member)
        except EndpointError as error:
            member.gone = str(error)
            self._note(f"{member.url} is given up ({error})")
            return
        finally:
            member.waking = False
        if reason is None:
            self._note(f"{member.url} answers again")
            member.window = Window(self._settings.most)
            return
        seconds = min(REST_SECONDS * 2**member.rests, LONGEST_REST_SECONDS)
        member.rests += 1
        member.rest_until = time.monotonic() + seconds

    async def _verify(self, member: _Member) -> str | None:
        """Why it cannot be asked now; None: it can be. Raises EndpointError where it serves another model."""
        server = member.server
        try:
            await server.verify(self._settings.expected, self._settings.sampling)
        except (Unreachable, Dropped, Busy) as error:
            return str(error)
        except Refused as error:
            raise EndpointError(f"--endpoint {server.url}: {error}") from error
        member.rest_until, member.verify, member.last_answer = None, False, time.monotonic()
        tally = member.tally
        tally.model, tally.server, tally.gives_tokens = server.model, server.kind, server.dialect.gives_tokens
        for warning in server.warnings:
            self._note(f"{server.url} {warning}")
        return None

    async def _watch(self, member: _Member) -> None:
        """Look at the server's queue, and whether it still lives where no answer comes."""
        missed, shows_queue = 0, True
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if member.gone or member.rest_until is not None or not member.in_flight:
                missed, shows_queue = 0, True
                continue
            now = time.monotonic()
            waiting = await member.server.waiting() if shows_queue else None
            shows_queue = waiting is not None
            if waiting is not None:
                member.window.queued(waiting, now=now)
                missed = 0
            elif now - member.last_answer < WATCH_SECONDS or await member.server.healthy():
                missed = 0
            else:
                missed += 1
            if missed == HEALTH_FAILURES:
                missed = 0
                self._leave(member, "it does not answer any more")
                for job, task in member.in_flight.items():
                    if task.cancel():
                        self._outcomes.put_nowait((member, job, Dropped("the server does not answer any more")))
