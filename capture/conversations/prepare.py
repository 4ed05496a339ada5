"""eyas prepare: read, normalise, render, mask, write. Rows keep their order whatever the number of workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eyas.capture.conversations.masking import mask_conversation
from eyas.capture.conversations.normalise import RowError, TokenRow, normalise
from eyas.capture.conversations.reading import CUT_OFF, RawRow, Reader
from eyas.capture.conversations.template import ChatTemplate, read_stop_ids
from eyas.capture.errors import ConversationsError, PreparedError, TargetError
from eyas.capture.prepared import PreparedRow, PreparedSamples, RejectedRow, read_prepared_json, write_prepared
from eyas.capture.regenerate.output import options_path, read_options
from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity
from eyas.shards.identity import TokenizerIdentity
from eyas.taps.errors import UsageError

CHUNK_ROWS = 64
CHUNKS_AHEAD = 3  # per worker: memory is bounded by what is in flight
SKIPPED = ("too long", "too few trained tokens")  # left out by the options, not for a fault of the row

NOTES = {
    "answers_trained": "answers trained",
    "answers_cut_off": "answers that were cut off: trained without an end token, and the sample ends there",
    "answers_without_end_token": "answers behind which the template puts no end token that the target knows",
    "answers_with_end_token_inside": "answers with an end token in their text: not trained",
    "answers_rewritten": "answers that the template rewrites or leaves out (drops thinking, merges turns): not trained",
    "answers_after_another_prompt": "answers that do not follow the template's own generation prompt: not trained",
    "answers_after_text_of_the_template": "answers behind text that the template puts there, which is not trained",
    "answers_empty": "answers without text: not trained",
    "leading_answers_dropped": "conversations that start with the assistant: that answer is left out",
    "unanswered_messages_dropped": "conversations that end with an unanswered message: it is left out",
    "tools_not_in_template": "conversations whose tools the template does not show to the target",
    "tokens_across_borders": "tokens that lie across the border of an answer: not trained",
    "prompts_with_date": "conversations into which the template writes today's date: another day gives other samples",
    "truncated": "samples truncated to --max-tokens",
}

OnProgress = Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What decides which samples come out."""

    last_turn_only: bool = False
    max_tokens: int | None = None
    overlong: Literal["truncate", "skip"] = "truncate"
    min_trained_tokens: int = 1
    max_samples: int | None = None

    def __post_init__(self) -> None:
        if self.overlong not in ("truncate", "skip"):
            raise UsageError(f"--overlong {self.overlong}: expected truncate or skip")
        for option in ("max_tokens", "min_trained_tokens", "max_samples"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"--{option.replace('_', '-')} {value}: expected 1 or more")
        if self.max_tokens is not None and self.max_tokens <= self.min_trained_tokens:
            raise UsageError(
                f"--max-tokens {self.max_tokens} leaves no room for --min-trained-tokens {self.min_trained_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class TargetTokenizer:
    """Where the tokenizer comes from. Small and picklable: workers load their own."""

    target: str
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one row."""

    row: PreparedRow | RejectedRow
    notes: Counter[str] = field(default_factory=Counter)
    amount: int = 0  # of the input, in the reader's unit


class RowPreparer:
    """Turns raw rows into samples."""

    def __init__(self, tokenizer: TargetTokenizer, options: PrepareOptions) -> None:
        """Raises TargetError where the tokenizer cannot be loaded."""
        self.options = options
        self._target = tokenizer.target
        self.tokenizer = load_tokenizer(tokenizer.target, tokenizer.revision, tokenizer.trust_remote_code)
        self.template = ChatTemplate(self.tokenizer, read_stop_ids(tokenizer.target, tokenizer.revision))
        self._num_ids = len(self.tokenizer)

    def __call__(self, raw: RawRow | RejectedRow) -> Outcome:
        if isinstance(raw, RejectedRow):
            return Outcome(row=raw)
        row_id = None
        notes: Counter[str] = Counter()
        try:
            body = parse_row(raw.body)
            if isinstance(body, Mapping) and isinstance(body.get("id"), str | int):
                row_id = str(body["id"])
            row = self._prepare(body, raw.source, notes)
        except RowError as error:
            row = RejectedRow(source=raw.source, kind=error.kind, reason=error.reason, row_id=row_id)
        return Outcome(row=row, notes=+notes, amount=raw.amount)

    def _prepare(self, body: Any, source: str, notes: Counter[str]) -> PreparedRow | RejectedRow:
        conversation = normalise(body)
        if isinstance(conversation, TokenRow):
            input_ids, loss_mask = conversation.input_ids, conversation.loss_mask
            if input_ids.max() >= self._num_ids:
                raise RowError(
                    "tokens", f"token id {input_ids.max()}, and the target's tokenizer has {self._num_ids} ids"
                )
            if self.options.last_turn_only:
                loss_mask = _last_run(loss_mask)
        else:
            if not self.template.exists:
                raise TargetError(
                    f"--target {self._target}: its tokenizer has no chat template, so only rows with input_ids "
                    "and loss_mask can be prepared. Give the chat model, or put its chat_template.jinja into the "
                    "target's folder"
                )
            notes.update(conversation.notes)
            masked = mask_conversation(self.template, conversation, last_turn_only=self.options.last_turn_only)
            notes.update(masked.notes)
            notes["prompts_with_date"] += int(self.template.writes_date)
            input_ids, loss_mask = masked.input_ids, masked.loss_mask
        limit = self.options.max_tokens
        if limit is not None and len(input_ids) > limit:
            if self.options.overlong == "skip":
                raise RowError("too long", f"{len(input_ids)} tokens, more than --max-tokens {limit}")
            notes["truncated"] += 1
            input_ids, loss_mask = input_ids[:limit], loss_mask[:limit]
        num_trained = int(loss_mask.sum())
        if num_trained < self.options.min_trained_tokens:
            raise RowError("too few trained tokens", _why_few(num_trained, self.options, notes))
        return PreparedRow(
            input_ids=input_ids,
            loss_mask=loss_mask,
            messages=_dump(conversation.messages),
            tools=_dump(conversation.tools),
            category=conversation.category,
            source=source,
        )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of prepare()."""

    samples: PreparedSamples
    was_done: bool  # a finished folder of the same input and options was there already

    @property
    def num_rejected(self) -> int:
        """Rows that are malformed or refused, without those that the options leave out."""
        return int(self.samples.counts["num_rejected"])


def prepare(
    reader: Reader,
    out: Path,
    *,
    tokenizer: TargetTokenizer,
    options: PrepareOptions,
    workers: int = 1,
    on_progress: OnProgress = lambda amount, note: None,
) -> Prepared:
    """Make the prepared folder ``out`` from the rows of ``reader``. ``on_progress`` is told after each row.

    Run again after a kill it starts anew; run again when done, with the same input and options, it says so.

    Raises ConversationsError, TargetError, PreparedError.
    """
    preparer = RowPreparer(tokenizer, options)
    identity = tokenizer_identity(tokenizer.target, preparer.tokenizer, tokenizer.revision)
    for file in reader.files:
        _same_tokens_or_refuse(file, tokenizer.target, identity)
    recorded = {**asdict(options), "conversations": reader.name, "split": reader.split, "input": reader.fingerprint}
    if (found := read_prepared_json(out)) is not None:
        _same_or_refuse(out, found, recorded, identity)
        return Prepared(samples=PreparedSamples.open(out), was_done=True)
    tally = _Tally()
    samples = write_prepared(
        out,
        tally.count(_outcomes(reader, preparer, tokenizer, workers), on_progress),
        tokenizer=identity,
        target=tokenizer.target,
        revision=tokenizer.revision,
        options=recorded,
        counts=tally.counts,
        max_samples=options.max_samples,
    )
    return Prepared(samples=samples, was_done=False)


def _outcomes(reader: Reader, preparer: RowPreparer, tokenizer: TargetTokenizer, workers: int) -> Iterator[Outcome]:
    """What becomes of each row, in the input's order."""
    rows = iter(reader)
    # The first rows are done here: small inputs need no workers, and what is wrong with all rows shows at once.
    yield from map(preparer, islice(rows, CHUNK_ROWS))
    if workers == 1:
        yield from map(preparer, rows)
        return
    chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])
    if (second := next(chunks, None)) is None:
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, preparer.options),
    )
    try:
        running: deque[Future[list[Outcome]]] = deque()
        for chunk in chain([second], chunks):
            running.append(pool.submit(_run_chunk, chunk))
            if len(running) >= workers * CHUNKS_AHEAD:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    except BrokenProcessPool as error:
        raise PreparedError(
            "a worker process ended abruptly, most likely for want of memory: run again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_preparer: RowPreparer | None = None


def _start_worker(tokenizer: TargetTokenizer, options: PrepareOptions) -> None:
    global _worker_preparer
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group: the parent ends its workers
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _worker_preparer = RowPreparer(tokenizer, options)


def _end_with(parent_sentinel: int) -> None:
    wait([parent_sentinel])
    os._exit(1)


def _run_chunk(rows: list[RawRow | RejectedRow]) -> list[Outcome]:
    assert _worker_preparer is not None
    return [_worker_preparer(row) for row in rows]


class _Tally:
    """Counts rows as they pass."""

    def __init__(self) -> None:
        self._num_rows = self._num_tokens = 0
        self._rejected: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._cut_off: list[str] = []

    def count(self, outcomes: Iterator[Outcome], on_progress: OnProgress) -> Iterator[PreparedRow | RejectedRow]:
        started = time.monotonic()
        for outcome in outcomes:
            row = outcome.row
            self._num_rows += 1
            self._notes += outcome.notes
            if isinstance(row, PreparedRow):
                self._num_tokens += len(row.input_ids)
            else:
                (self._skipped if row.kind in SKIPPED else self._rejected)[row.kind] += 1
                if row.kind == CUT_OFF:
                    self._cut_off.append(f"{row.source}: {row.reason}")
            rate = self._num_tokens / max(time.monotonic() - started, 1e-9)
            on_progress(outcome.amount, f"{self._num_rows:,} rows, {rate:,.0f} tokens/s")
            yield row

    def counts(self) -> dict[str, Any]:
        return {
            "num_rows": self._num_rows,
            "num_rejected": self._rejected.total(),
            "rejected": dict(sorted(self._rejected.items())),
            "num_skipped": self._skipped.total(),
            "skipped": dict(sorted(self._skipped.items())),
            "cut_off": self._cut_off,
            "notes": dict(sorted(self._notes.items())),
        }


def _same_tokens_or_refuse(file: Path, target: str, tokenizer: TokenizerIdentity) -> None:
    """Raises ConversationsError where eyas regenerate made ``file`` with another tokenizer than the target's."""
    if (options := read_options(file)) is None:
        return
    theirs, ours = options.get("tokenizer"), asdict(tokenizer)
    if theirs == ours:
        return
    names = {
        "files_hash": "tokenizer files",
        "chat_template_hash": "chat template",
        "probe_hash": "ids of a probe text",
    }
    found = theirs if isinstance(theirs, dict) else {}
    differing = ", ".join(label for name, label in names.items() if found.get(name) != ours[name])
    raise ConversationsError(
        f"{file} holds the tokens of another target's answers: {options_path(file)} and --target {target} differ in "
        f"their {differing or 'tokenizer'}. Give --target the model that answered, or let this one answer (eyas "
        f"regenerate {file} OTHER --target {target}); where the two are known to be one tokenizer, saved twice, move "
        f"{options_path(file)} away"
    )


def _same_or_refuse(
    out: Path, found: Mapping[str, Any], options: Mapping[str, Any], tokenizer: TokenizerIdentity
) -> None:
    """Raises PreparedError unless the finished folder is what this run would make."""
    theirs = {**found["options"], **found["tokenizer"]}
    ours = {**options, **asdict(tokenizer)}
    differences = [
        f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here"
        for name in sorted({*theirs, *ours} - {"conversations"})
        if theirs.get(name) != ours.get(name)
    ]
    if ours["input"] is None:
        differences.append("the input is standard input, which cannot be compared")
    if differences:
        raise PreparedError(
            f"{out} is finished already, and not from the same input and options: {'; '.join(differences)}. Give "
            f"another folder, or remove it first (rm -r {out})"
        )


def parse_row(body: Any) -> Any:
    """The row that ``body`` of a RawRow holds. Raises RowError where it is no JSON."""
    if not isinstance(body, bytes):
        return body
    try:
        return json.loads(body.removeprefix(b"\xef\xbb\xbf"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowError("no JSON", f"no JSON ({error})") from error


def _dump(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair beside tokens, which are what counts there
        return json.dumps(value)
    return text


def _last_run(loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Only the last stretch of trained tokens [T]: the last turn of a row that came as tokens."""
    last = np.zeros_like(loss_mask)
    (trained,) = np.nonzero(loss_mask)
    if len(trained):
        (gaps,) = np.nonzero(np.diff(trained) > 1)
        last[trained[gaps[-1] + 1 if len(gaps) else 0] : trained[-1] + 1] = 1
    return last


def _why_few(num_trained: int, options: PrepareOptions, notes: Counter[str]) -> str:
    causes = [f"{NOTES[note]}: {notes[note]}" for note in notes if note.startswith(("answers", "truncated"))]
    because = f" ({'; '.join(causes)})" if causes else ""
    return f"{num_trained} trained tokens, fewer than {options.min_trained_tokens}{because}"
