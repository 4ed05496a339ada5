"""eyas regenerate: read conversations, have the target answer them in batches, write what is finished."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from eyas.capture.conversations.normalise import RowError
from eyas.capture.conversations.prepare import parse_row
from eyas.capture.conversations.reading import CUT_OFF, Reader
from eyas.capture.conversations.template import ChatTemplate, read_stop_ids
from eyas.capture.endpoints.dialects import Question, Reply
from eyas.capture.endpoints.pool import DEFAULT_MOST, Pool, PoolSettings, Tally
from eyas.capture.endpoints.server import expected_of
from eyas.capture.engines import create_generator, hash_weights, read_outline
from eyas.capture.engines.base import Answer, EngineSettings, MessageAnswer, Prompt, Refused, Sampling
from eyas.capture.errors import ConversationsError, TargetError
from eyas.capture.prepared import RejectedRow
from eyas.capture.regenerate.chat import Chat
from eyas.capture.regenerate.output import FORMAT, Output
from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity

AS_SERVED = "as served"  # the dtype of a target that a server runs

# Conversations waiting at a time, in batches: enough to find prompts of about one length.
BATCHES_WAITING = 8
_SHOWN = 5  # of damaged lines
_COUNT_SECONDS = 2.0  # for counting what is left: who stops a run waits for it


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """A regeneration, resolved. The first five decide the answers."""

    settings: EngineSettings
    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int
    max_tokens: int | None  # of a whole conversation; None: the target's positions
    engine: str
    endpoints: tuple[str, ...] = ()  # addresses of servers that run the target; the engine runs it where there are none
    timeout_seconds: float = 600.0  # of one answer of a server
    batch_size: int | None  # answers at a time, at each server at most; None: the engine's choice
    max_samples: int | None  # the first so many conversations of the input that can be answered
    max_runtime_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RegenerateSummary:
    """How a regeneration ended."""

    out: str
    num_done: int  # conversations in OUT, earlier runs included
    num_left: int | None  # conversations of the input that are not in OUT; None: reading on to count them takes long
    num_new: int
    num_answers: int  # of this run, and the tokens in them
    num_new_tokens: int
    num_rejected: int  # rows of the input that cannot be regenerated
    rejected: dict[str, int]
    num_duplicates: int
    num_cut: int  # new conversations that end with an answer cut at --max-new-tokens
    num_leading_dropped: int  # new conversations that start with the assistant: that answer is left out
    num_rewritten: int  # new conversations whose template rewrites earlier answers: those are not trained
    num_retokenized: int  # new conversations whose server gave no token ids, so that prepare tokenizes them
    cut_off: list[str]  # what could not be read of the input
    seconds: float  # from the first batch to the last answer; where nothing was answered, of the whole run
    stopped: str | None  # "signal", "max runtime" or "no endpoint answers"
    endpoints: list[Tally] = field(default_factory=list)  # what each server did


@dataclass
class _Waiting:
    chat: Chat
    prompt: Prompt


def regenerate(
    reader: Reader,
    out: Path,
    config: RegenerateConfig,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, str], None] = lambda amount, note: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> RegenerateSummary:
    """Append to ``out`` the conversations of ``reader`` with the target's own answers.

    ``on_progress`` is told how many conversations were finished, and a note; ``on_note`` what a user should know of the
    servers. Run again after any interruption, with
    another batch size too, it goes on with what is missing. Raises ConversationsError, TargetError, EndpointError.
    """
    started = time.monotonic()
    session = _Session(reader, config, out, on_progress, on_note)

    def why_stop() -> str | None:
        if should_stop():
            return "signal"
        limit = config.max_runtime_seconds
        return "max runtime" if limit is not None and time.monotonic() - started >= limit else None

    with session.output as output:
        if output.damaged:
            shown = ", ".join(map(str, output.damaged[:_SHOWN])) + (", ..." if output.damaged[_SHOWN:] else "")
            on_note(
                f"{output.path}: {len(output.damaged)} damaged (line {shown}): their conversations are answered again, "
                f"and eyas prepare leaves these lines out"
            )
        stopped = session.run(why_stop)
    return session.summary(stopped)


class _Session:
    def __init__(
        self,
        reader: Reader,
        config: RegenerateConfig,
        out: Path,
        on_progress: Callable[[int, str], None],
        on_note: Callable[[str], None],
    ) -> None:
        settings = config.settings
        target, revision, trust = settings.target, settings.revision, settings.trust_remote_code
        outline = read_outline(config.engine, target=target, revision=revision, trust_remote_code=trust)
        tokenizer = load_tokenizer(target, revision, trust)
        stop_ids = read_stop_ids(target, revision)
        self._template = ChatTemplate(tokenizer, stop_ids)
        if not self._template.exists:
            raise TargetError(
                f"--target {target}: its tokenizer has no chat template, so it cannot be asked anything. Give the "
                "chat model, or put its chat_template.jinja into the target's folder"
            )
        ends = {*stop_ids, *(tokenizer.convert_tokens_to_ids(text) for text in self._template.end_texts)}
        ends -= {None, tokenizer.unk_token_id}
        if not ends:
            raise TargetError(
                f"--target {target}: no token is known to end its answers; name eos_token_id in its config"
            )
        limits = [limit for limit in (config.max_tokens, outline.max_positions) if limit is not None]
        self._max_tokens = min(limits, default=2**31)
        self._config = config
        weights_hash = hash_weights(config.engine, target=target, revision=revision)
        self._expected = expected_of(target, outline, tokenizer, weights_hash)
        self._sampling = Sampling(temperature=config.temperature, top_p=config.top_p, stop_ids=frozenset(ends))
        greedy = config.temperature == 0
        self.output = Output(
            out,
            {
                "format": FORMAT,
                "config_hash": outline.config_hash,
                "weights_hash": weights_hash,
                "tokenizer": asdict(tokenizer_identity(target, tokenizer, revision)),
                "dtype": AS_SERVED if config.endpoints else settings.dtype,
                "temperature": config.temperature,
                "top_p": None if greedy else config.top_p,
                "seed": None if greedy else config.seed,
                "max_new_tokens": config.max_new_tokens,
                "max_tokens": config.max_tokens,
            },
        )
        self._reader = reader
        self._on_progress, self._on_note = on_progress, on_note
        self._rejected: Counter[str] = Counter()
        self._cut_off: list[str] = []
        self._waiting: list[_Waiting] = []  # in the order they came
        self._num_new = self._num_answers = self._num_tokens = self._num_duplicates = 0
        self._num_cut = self._num_leading_dropped = self._num_rewritten = self._num_retokenized = 0
        self._tallies: list[Tally] = []
        self._num_wanted = 0  # conversations of the input so far that can be answered, those done included
        self._num_unread: int | None = 0
        self._started = self._first_batch = self._last_answer = time.monotonic()

    def run(self, why_stop: Callable[[], str | None]) -> str | None:
        """Answer all that is missing; says why it stopped early."""
        chats = self._missing()
        stopped = self._answer(chats, why_stop)
        if stopped is not None:
            self._num_unread = self._count(chats)
        return stopped

    def _count(self, chats: Iterator[Chat]) -> int | None:
        """How many come; None where that takes long: a hub, a pipe or standard input may have to be waited for."""
        if not self._reader.total:
            return None
        until, number = time.monotonic() + _COUNT_SECONDS, 0
        for _ in chats:
            number += 1
            if time.monotonic() > until:
                return None
        return number

    def _answer(self, chats: Iterator[Chat], why_stop: Callable[[], str | None]) -> str | None:
        if not self._refill(chats, 1):  # all done: no target is loaded for nothing
            if not self.output.done:
                raise ConversationsError(
                    f"{self._reader.name}: no row of it can be regenerated, see {self.output.rejects_path}"
                )
            return None
        if self._config.endpoints:
            return asyncio.run(self._run_endpoints(chats, why_stop))
        return self._run_engine(chats, why_stop)

    def _run_engine(self, chats: Iterator[Chat], why_stop: Callable[[], str | None]) -> str | None:
        config = self._config
        numbers = count()
        asked: dict[int, _Waiting] = {}

        def take(most: int, padded_tokens: int | None = None) -> Sequence[tuple[int, Prompt]]:
            self._refill(chats, most if padded_tokens is None else most * BATCHES_WAITING)
            taken = [(next(numbers), waiting) for waiting in self._take(most, padded_tokens)]
            asked.update(taken)
            return [(number, waiting.prompt) for number, waiting in taken]

        with create_generator(config.engine, config.settings, self._sampling, config.batch_size) as generator:
            self._limit_tokens(generator.max_tokens, "the engine takes")
            self._first_batch = time.monotonic()
            for number, answer in generator.generate(take, lambda: why_stop() is not None):
                chat = asked.pop(number).chat
                if isinstance(answer, Refused):
                    self._reject(chat.source, chat.row_id, "refused", answer.reason)
                else:
                    self._take_answer(chat, answer, len(answer.token_ids))
        self._waiting += asked.values()
        reason = why_stop()
        return reason if reason is not None and self._refill(chats, 1) else None

    async def _run_endpoints(self, chats: Iterator[Chat], why_stop: Callable[[], str | None]) -> str | None:
        config = self._config

        def next_question() -> tuple[Question, _Waiting] | None:
            if not self._refill(chats, 1):
                return None
            waiting = self._waiting.pop()  # the newest: a conversation that goes on finds its tokens cached
            chat = waiting.chat
            return Question(prompt=waiting.prompt, messages=[*chat.messages], tools=chat.tools), waiting

        def on_reply(waiting: _Waiting, reply: Reply) -> None:
            self._take_answer(waiting.chat, reply.answer, reply.num_tokens)

        def on_failure(waiting: _Waiting, kind: str, reason: str) -> None:
            self._reject(waiting.chat.source, waiting.chat.row_id, kind, reason)

        settings = PoolSettings(
            urls=config.endpoints,
            expected=self._expected,
            sampling=self._sampling,
            most=config.batch_size or DEFAULT_MOST,
            timeout_seconds=config.timeout_seconds,
        )
        async with Pool(settings, self._on_note) as pool:
            self._tallies = pool.tallies
            self._limit_tokens(pool.max_tokens, "the servers take")
            if config.temperature > 0:
                speculating = [server.url for server in pool.servers if await server.speculates()]
                if speculating:
                    self._on_note(
                        f"{', '.join(speculating)}: sampled answers come from the server's rejection sampler, which is "
                        "wrong in vLLM's CPU build (0.32: tokens that the target never gives); a server without a "
                        "draft, or --temperature 0, is safe"
                    )
            self._first_batch = time.monotonic()
            stopped, left = await pool.run(next_question, on_reply, on_failure, why_stop)
            self._waiting += left
            return stopped

    def _limit_tokens(self, limit: int | None, whose: str) -> None:
        if limit is not None and limit < self._max_tokens:
            self._on_note(f"conversations are kept within the {limit} tokens that {whose}")
            self._max_tokens = limit

    def _take_answer(self, chat: Chat, answer: Answer | MessageAnswer, num_tokens: int) -> None:
        self._num_answers += 1
        self._num_tokens += num_tokens
        self._last_answer = time.monotonic()
        if chat.add(answer, self._template.tokenizer):
            self._ask(chat)
        else:
            self._finish(chat)

    def summary(self, stopped: str | None) -> RegenerateSummary:
        seconds = self._last_answer - self._first_batch if self._num_answers else time.monotonic() - self._started
        return RegenerateSummary(
            out=str(self.output.path),
            num_done=len(self.output.done),
            num_left=None if self._num_unread is None else len(self._waiting) + self._num_unread,
            num_new=self._num_new,
            num_answers=self._num_answers,
            num_new_tokens=self._num_tokens,
            num_rejected=self._rejected.total(),
            rejected=dict(sorted(self._rejected.items())),
            num_duplicates=self._num_duplicates,
            num_cut=self._num_cut,
            num_leading_dropped=self._num_leading_dropped,
            num_rewritten=self._num_rewritten,
            num_retokenized=self._num_retokenized,
            cut_off=self._cut_off,
            seconds=seconds,
            stopped=stopped,
            endpoints=self._tallies,
        )

    def _missing(self) -> Iterator[Chat]:
        """The input's conversations that are not in the output, each once."""
        seen: set[str] = set()
        done = frozenset(self.output.done)
        for raw in self._reader:
            if self._num_wanted == self._config.max_samples:
                return
            if isinstance(raw, RejectedRow):
                if raw.kind == CUT_OFF:
                    self._cut_off.append(f"{raw.source}: {raw.reason}")
                self._reject(raw.source, raw.row_id, raw.kind, raw.reason)
                continue
            try:
                chat = Chat(parse_row(raw.body), raw.source)
            except RowError as error:
                self._reject(raw.source, None, error.kind, error.reason)
                continue
            if chat.key in seen:
                self._num_duplicates += 1
                continue
            seen.add(chat.key)
            self._num_wanted += 1
            if chat.key not in done:
                yield chat

    def _refill(self, chats: Iterator[Chat], wanted: int) -> bool:
        """Have ``wanted`` conversations waiting, as far as there are any; says whether any is."""
        while len(self._waiting) < wanted and (chat := next(chats, None)) is not None:
            self._ask(chat)
        return bool(self._waiting)

    def _ask(self, chat: Chat) -> None:
        """Let ``chat`` wait for its next answer, or end it where it can have none."""
        config = self._config
        try:
            prompt = chat.prompt(
                self._template, seed=config.seed, max_new_tokens=config.max_new_tokens, max_tokens=self._max_tokens
            )
            if prompt is None:
                raise RowError("too long", f"its prompt leaves no room for an answer within {self._max_tokens} tokens")
        except RowError as error:
            if chat.turn:
                self._finish(chat)
            else:
                self._reject(chat.source, chat.row_id, error.kind, error.reason)
                self._num_wanted -= 1
            return
        self._waiting.append(_Waiting(chat, prompt))

    def _take(self, most: int, padded_tokens: int | None) -> list[_Waiting]:
        """Up to ``most`` that wait: the newest, or for padding the one that has waited longest and its nearest."""
        if not self._waiting:
            return []
        if padded_tokens is None:  # a conversation that goes on finds its tokens cached
            taken = self._waiting[-most:][::-1]
            del self._waiting[-most:]
            return taken
        return self._take_alike(most, padded_tokens)

    def _take_alike(self, most: int, padded_tokens: int) -> list[_Waiting]:
        """The conversation that has waited longest, and those whose prompts are nearest to its in length."""
        length = len(self._waiting[0].prompt.input_ids)
        nearest = sorted(self._waiting, key=lambda waiting: abs(len(waiting.prompt.input_ids) - length))[:most]
        batch = [nearest[0]]
        width = length
        for waiting in nearest[1:]:
            width = max(width, len(waiting.prompt.input_ids))
            if width * (len(batch) + 1) > padded_tokens:
                break
            batch.append(waiting)
        taken = {id(waiting) for waiting in batch}
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        return batch

    def _finish(self, chat: Chat) -> None:
        self.output.add(chat.row())
        self._num_new += 1
        self._num_cut += chat.finish == "length"
        self._num_leading_dropped += chat.leading_dropped
        self._num_rewritten += chat.rewritten
        self._num_retokenized += chat.retokenize
        rate = self._num_tokens / max(time.monotonic() - self._first_batch, 1e-9)
        self._on_progress(1, f"{self._num_tokens:,} tokens, {rate:,.0f} tokens/s")

    def _reject(self, source: str, row_id: str | None, kind: str, reason: str) -> None:
        self._rejected[kind] += 1
        self.output.reject(source=source, row_id=row_id, kind=kind, reason=reason)
