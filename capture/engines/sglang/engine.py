"""The engine ``sglang``: SGLang runs the target, and its worker processes write the shards.

This process plans, announces each sample to the workers, submits it, and hears what became of it. Hidden states come
here in the self-test only.
"""

from __future__ import annotations

import os
import platform
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
from packaging.version import Version

from eyas.capture.engines.base import EngineSettings, Event, Forwarded, Rejected, Sink, TargetOutline, Work
from eyas.capture.engines.sglang.link import (
    EVERY,
    RID_PREFIX,
    Begin,
    Captured,
    Drop,
    Failed,
    Finish,
    Finished,
    Gone,
    Happened,
    Hello,
    Hub,
    Place,
    Start,
    Tested,
    from_array,
)
from eyas.capture.engines.sglang.load import (
    LAST_RELEASE,
    check_options,
    installed_version,
    parse_options,
    server_arguments,
)
from eyas.capture.engines.sglang.server import Server
from eyas.capture.engines.transformers.batches import plan_batches
from eyas.capture.engines.transformers.load import (
    read_head_facts,
    read_outline,
    target_identity,
)
from eyas.capture.engines.transformers.parallel import Ranks
from eyas.capture.errors import WHY_ENDED, CaptureFailed, SelfTestError, TargetError
from eyas.capture.self_test import Probed, check_taps, check_workers_agree, read_reference, usable_probe
from eyas.shards.identity import TargetIdentity
from eyas.shards.sample import TokenSample
from eyas.taps.conventions import SYSTEMS, ids_for
from eyas.taps.conventions.entry import of_target
from eyas.taps.conventions.numbering import ConventionError
from eyas.taps.errors import UsageError
from eyas.taps.notation import EMBED, FINAL, Tap, after, parse_tap, validate_taps
from eyas.taps.target import TargetFacts

MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODEL_PACKAGE = "eyas.capture.engines.sglang.model"
_PROMPT_ONLY = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
BATCHES_AHEAD = 3  # of tokens, that SGLang has been given and not done yet
SECONDS_BETWEEN_POLLS = 0.2
SECONDS_TO_SETTLE = 900.0  # from SGLang's answer to the word of the worker that writes it, which may wait for the disk


@dataclass(frozen=True, kw_only=True)
class _Running:
    """SGLang with the target loaded."""

    stack: ExitStack
    server: Server
    hub: Hub
    hellos: dict[int, Hello]  # by the worker's number in the hub
    batch_tokens: int
    attention: str
    ranks: Ranks  # of eyas' own processes, each with an SGLang of its own


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """SGLang is done with a request."""

    rid: str
    failure: str  # empty where it is not one
    hidden_states: Any = None  # as SGLang answers them, where it was asked for them


@dataclass(kw_only=True)
class _Request:
    """A sample that SGLang has been given."""

    sample: TokenSample
    num_writers: int  # whose word that they have captured it is still to come
    answered_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class _AuxCapture:
    """What SGLang's own EAGLE-3 capture is asked for."""

    taps: tuple[Tap, ...]  # ascending
    ids: tuple[int, ...]  # SGLang's, for these taps of this target
    unread: str  # why nothing but the self-test says that these ids are those taps; empty where the source does


class SglangEngine:
    """Engine ``sglang`` (capture/engines/base.py says what an engine is)."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        from_layers: bool = False,
        serving: Mapping[str, Any] | None = None,
    ) -> None:
        """from_layers: every after:j is taken between the layers, whatever layer ids SGLang has for this target.
        serving: fields of SGLang's ServerArgs by which it captures for a draft and answers with that (``serve``);
        needs from_layers."""
        self._settings = settings
        self._from_layers = from_layers
        self._serving = serving
        self._running: _Running | None = None
        self._num_requests = 0
        self._num_captures = 0
        self._self_test = "none"

    def __enter__(self) -> SglangEngine:
        """Start SGLang, which loads the target. Raises TargetError, TapError or UsageError."""
        import torch

        settings, outline = self._settings, self._outline
        _check_place(outline, settings)
        if not self._from_layers:
            aux = _aux_capture(outline, settings, installed_version())
        else:
            aux = _AuxCapture(taps=(), ids=(), unread="")
        with ExitStack() as stack:
            hub = Hub()
            stack.callback(hub.close)
            place = Place(
                socket=hub.socket,
                key=hub.key.hex(),
                architecture=outline.model_class,
                num_layers=outline.num_layers,
                hidden_size=outline.hidden_size,
                vocab_size=outline.vocab_size,
                dtype=settings.dtype,
                taps=tuple(map(str, settings.taps)),
                last_hidden=None if settings.last_hidden is None else str(settings.last_hidden),
                aux_taps=tuple(map(str, aux.taps)),
                aux_ids=aux.ids,
                target_statistics=settings.target_statistics,
                from_layers=self._from_layers,
            )
            environment = {
                **place.to_environment(),
                MODEL_PACKAGE_VARIABLE: MODEL_PACKAGE,
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            }
            arguments = server_arguments(settings, outline, self._serving)
            ranks = Ranks(1, torch.device("cpu"))
            stack.push(lambda kind, *_: ranks.leave(failed=kind is not None))
            server = stack.enter_context(Server(arguments, environment))
            hellos: dict[int, Hello] = {}
            started = False
            while len(hellos) < settings.tp or not started:
                before, started = started, server.started
                for number, message in _arrived(hub, server):
                    if isinstance(message, Hello):
                        hellos[number] = message
                if before and len(hellos) < settings.tp:  # workers say hello before SGLang has started
                    raise TargetError(
                        f"SGLang runs {outline.model_class} by a class that eyas finds no hooks for (what it said may "
                        f"stand above): capture with --engine transformers or vllm"
                    )
            self._running = _Running(
                stack=stack.pop_all(),
                server=server,
                hub=hub,
                hellos=hellos,
                batch_tokens=int(arguments.chunked_prefill_size),
                attention=str(arguments.attention_backend),
                ranks=ranks,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running = self._loaded
        self._running = None
        running.stack.__exit__(kind, error, traceback)

    @cached_property
    def _outline(self) -> TargetOutline:
        settings = self._settings
        return read_outline(settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code)

    @property
    def _loaded(self) -> _Running:
        if self._running is None:
            raise RuntimeError("the engine is not entered: use it in a with statement")
        return self._running

    @cached_property
    def target(self) -> TargetIdentity:
        """What is being run, as dataset.json records it: the same as engine transformers says of the same target."""
        outline, settings = self._outline, self._settings
        hello = next(iter(self._loaded.hellos.values()))
        return target_identity(
            settings,
            outline,
            read_head_facts(settings, outline),
            logit_scale=hello.logit_scale,
            logit_softcap=hello.logit_softcap,
        )

    @property
    def label(self) -> str:
        """System and version."""
        return f"sglang {installed_version()}"

    @property
    def max_positions(self) -> int:
        """The longest sample, in tokens, that SGLang takes: by the target's positions and by its own memory."""
        longest = self._loaded.server.max_tokens
        return min(longest, self._outline.max_positions or longest)

    def self_test(self, probe: Sequence[TokenSample]) -> None:
        """Prove on ``probe`` that the taps asked for are captured (capture/self_test.py), chunked as in a capture.

        Every worker's tensors are compared with each other and, where the target fits this machine, with
        transformers'. Raises SelfTestError.
        """
        settings, outline = self._settings, self._outline
        samples = usable_probe(probe, replace(outline, max_positions=self.max_positions))
        captured = self.probe(samples)
        check_workers_agree("SGLang", settings.dtype, captured)
        reference, why_not = read_reference(settings, outline, samples)
        if reference is not None:
            check_taps("SGLang", settings.dtype, captured[0], reference)
            self._self_test = "transformers"
            return
        if unread := _aux_capture(outline, settings, installed_version()).unread:
            raise SelfTestError(
                f"{unread}, and the target cannot be compared with transformers here ({why_not}): nothing shows that "
                f"the taps are right"
            )
        self._self_test = f"workers agree; not compared with transformers: {why_not}"

    def capture(self, work: Work, sink: Sink, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Capture ``work`` (see Engine.capture)."""
        running, settings = self._loaded, self._settings
        ranks = running.ranks
        self._num_captures += 1
        longest = self.max_positions
        fits = (work.lengths >= 1) & (work.lengths <= longest)
        if ranks.rank == 0:
            for row in work.rows[~fits]:
                sample = work.source[int(row)]
                yield Rejected(sample_id=sample.sample_id, reason=self._too_long(sample.num_tokens))
        batches = plan_batches(work.rows[fits], work.lengths[fits], batch_tokens=running.batch_tokens)
        for connection, hello in running.hellos.items():
            start = Start(sink=sink, rank=ranks.rank * settings.tp + hello.member, metadata=self._metadata())
            running.hub.send(connection, start)
        requests: dict[str, _Request] = {}
        written = np.zeros(settings.tp, dtype=np.int64)  # tokens that each member was given to write
        counter = f"capture-{self._num_captures}" + (f"-of-{ranks.rank}" if work.everywhere else "")
        more = True
        abort = True
        try:
            while more or requests:
                while more and _num_tokens(requests) < BATCHES_AHEAD * running.batch_tokens:
                    number = ranks.claim(counter, should_stop())
                    more = number is not None and number < len(batches)
                    for row in batches[number].rows if more and number is not None else []:
                        sample = work.source[int(row)]
                        if reason := self._refusal(sample):
                            yield Rejected(sample_id=sample.sample_id, reason=reason)
                            continue
                        if work.everywhere:
                            member, num_writers = EVERY, settings.tp
                        else:
                            member, num_writers = int(written.argmin()), 1
                            written[member] += sample.num_tokens
                        requests[self._submit(sample, member)] = _Request(sample=sample, num_writers=num_writers)
                yield from self._follow(requests)
            abort = False
            running.hub.broadcast(Finish(abort=False))
            yield from self._finish()
        finally:
            if abort:
                for rid in requests:
                    running.hub.broadcast(Drop(rid=rid))
                running.hub.broadcast(Finish(abort=True))

    def _follow(self, requests: dict[str, _Request]) -> Iterator[Event]:
        """Hear what became of ``requests``, and take out those that are done."""
        running = self._loaded
        for _, message in _arrived(running.hub, running.server):
            if isinstance(message, Happened):
                yield message.event
            elif isinstance(message, Captured) and message.rid in requests:
                requests[message.rid].num_writers -= 1
            elif isinstance(message, _Answered) and message.rid in requests:
                request = requests[message.rid]
                request.answered_at = time.monotonic()
                if message.failure:
                    del requests[message.rid]
                    running.hub.broadcast(Drop(rid=message.rid))
                    yield Rejected(sample_id=request.sample.sample_id, reason=message.failure)
        done = {rid: request for rid, request in requests.items() if not request.num_writers and request.answered_at}
        for rid in done:
            del requests[rid]
        if done:
            yield Forwarded(
                num_samples=len(done), num_tokens=sum(request.sample.num_tokens for request in done.values())
            )
        for rid, request in requests.items():
            if request.answered_at and time.monotonic() > request.answered_at + SECONDS_TO_SETTLE:
                raise TargetError(
                    f"SGLang answered request {rid} and no worker captured its {request.sample.num_tokens} tokens: "
                    f"with these options its hooks do not see every row"
                )

    def _finish(self) -> Iterator[Event]:
        running = self._loaded
        left = set(running.hellos)
        while left:
            for number, message in _arrived(running.hub, running.server):
                if isinstance(message, Happened):
                    yield message.event
                elif isinstance(message, Finished):
                    left.discard(number)

    def _submit(self, sample: TokenSample, member: int | None) -> str:
        """Announce ``sample`` to the workers and have SGLang read it. Returns the request's id."""
        running = self._loaded
        rid = f"{RID_PREFIX}{self._num_requests}"
        self._num_requests += 1
        running.hub.broadcast(Begin(rid=rid, sample=sample, member=member))

        def answered(future: Future[dict[str, Any]]) -> None:
            failure = _failure(future)
            states = None if failure else future.result()["meta_info"].get("hidden_states")
            running.hub.inbox.put((-1, _Answered(rid=rid, failure=failure, hidden_states=states)))

        serves = self._serving is not None
        future = running.server.generate(rid, sample.input_ids, _PROMPT_ONLY, return_hidden_states=serves)
        future.add_done_callback(answered)
        return rid

    def _too_long(self, num_tokens: int) -> str:
        """Why a sample of ``num_tokens`` is not taken: more than one thing limits the length."""
        longest = self.max_positions
        if longest == self._outline.max_positions:
            return f"{num_tokens} tokens, and the target's positions allow 1 to {longest}"
        return (
            f"{num_tokens} tokens, and SGLang takes 1 to {longest} here, by its options or its memory "
            f"(--context-length, --max-total-tokens, --mem-fraction-static after --)"
        )

    def _refusal(self, sample: TokenSample) -> str | None:
        """Why a sample must not go through the target."""
        smallest, largest = int(sample.input_ids.min()), int(sample.input_ids.max())
        if smallest < 0 or largest >= self._outline.vocab_size:
            return (
                f"token id {smallest if smallest < 0 else largest} is outside the target's vocabulary of "
                f"{self._outline.vocab_size}"
            )
        return None

    def probe(self, samples: Sequence[TokenSample]) -> list[list[Probed]]:
        """What every worker captures of ``samples``: per member, sample by sample."""
        running, settings = self._loaded, self._settings
        rids = [self._submit(sample, None) for sample in samples]
        found: dict[tuple[int, str], Probed] = {}
        while len(found) < settings.tp * len(rids):
            for _, message in _arrived(running.hub, running.server):
                if isinstance(message, Tested):
                    found[message.member, message.rid] = _probed(message)
                elif isinstance(message, _Answered) and message.failure:
                    raise SelfTestError(f"SGLang fails on a sample of the self-test: {message.failure}")
        return [[found[member, rid] for rid in rids] for member in range(settings.tp)]

    def serve(self, sample: TokenSample) -> tuple[Probed, Any]:
        """What the first worker captures of ``sample``, and the hidden states that SGLang answers it with."""
        running = self._loaded
        rid = self._submit(sample, None)
        probed: Probed | None = None
        answer: _Answered | None = None
        num_workers = 0
        while answer is None or num_workers < self._settings.tp:
            for _, message in _arrived(running.hub, running.server):
                if getattr(message, "rid", rid) != rid:
                    continue
                if isinstance(message, Tested):
                    num_workers += 1
                    if message.member == 0:
                        probed = _probed(message)
                elif isinstance(message, _Answered):
                    answer = message
                    if answer.failure:
                        raise TargetError(f"SGLang fails on a sample of {sample.num_tokens} tokens: {answer.failure}")
        assert probed is not None
        return probed, answer.hidden_states

    def _metadata(self) -> dict[str, str]:
        """What made a shard, for its header: what may differ between workers of one dataset."""
        import torch
        from sglang import __version__

        running, settings = self._loaded, self._settings
        aux = _aux_capture(self._outline, settings, installed_version())
        return {
            "engine": "sglang",
            "sglang": __version__,
            "torch": torch.__version__,
            "path": f"set_eagle3_layers_to_capture({list(aux.ids)})" if aux.ids else "module hooks",
            "self_test": self._self_test,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "attention": running.attention,
            "tp": str(settings.tp),
            "world_size": str(running.ranks.world_size * settings.tp),
            "batch_tokens": str(running.batch_tokens),
            "engine_options": " ".join(settings.engine_options),
            "host": platform.node(),
        }


def check_settings(outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse what can be refused without starting SGLang. Raises TargetError, TapError or UsageError."""
    _check_place(outline, settings)
    _aux_capture(outline, settings, installed_version())
    if settings.engine_options:
        parse_options(settings)  # what SGLang does not know, before anything is made


def create_prober(settings: EngineSettings) -> SglangEngine:
    """For ``probe`` alone: taps need no layer ids of SGLang's."""
    return SglangEngine(settings, from_layers=True)


def _check_place(outline: TargetOutline, settings: EngineSettings) -> None:
    import torch

    validate_taps(settings.taps, outline.num_layers)
    check_options(settings.engine_options)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: torch finds no CUDA device here")
    if os.environ.get(MODEL_PACKAGE_VARIABLE, MODEL_PACKAGE) != MODEL_PACKAGE:
        raise UsageError(
            f"{MODEL_PACKAGE_VARIABLE} is {os.environ[MODEL_PACKAGE_VARIABLE]}: eyas' own package has to stand there; "
            f"unset it"
        )


def create_engine(settings: EngineSettings) -> SglangEngine:
    """The engine that ``settings`` describe."""
    return SglangEngine(settings)


def _aux_capture(outline: TargetOutline, settings: EngineSettings, release: str) -> _AuxCapture:
    """What SGLang's EAGLE-3 capture is to give. Raises TargetError where it cannot be told to."""
    hooked = (EMBED, FINAL, after(outline.num_layers - 1))
    taps = tuple(tap for tap in settings.taps if tap not in hooked)
    if not taps:
        return _AuxCapture(taps=(), ids=(), unread="")
    facts = TargetFacts.from_config(outline.config.to_dict(), where=settings.target)
    unread = ""
    if Version(release) > Version(LAST_RELEASE):
        unread = f"SGLang {release} is newer than {LAST_RELEASE}, the last release whose source eyas' authors read"
        release = LAST_RELEASE
    if not of_target(SYSTEMS["sglang"], facts):
        unread = f"how SGLang {release} reads layer ids for {outline.model_class} was not read in its source"
        return _AuxCapture(taps=taps, ids=tuple(tap.layer for tap in taps), unread=unread)
    try:
        return _AuxCapture(taps=taps, ids=ids_for(f"sglang@{release}", taps, facts), unread=unread)
    except ConventionError as error:
        raise TargetError(f"--engine sglang: {error}") from error


def _probed(message: Tested) -> Probed:
    return Probed(
        columns={parse_tap(tap): from_array(column) for tap, column in message.columns.items()},
        target_lse=None if message.target_lse is None else from_array(message.target_lse),
    )


def _arrived(hub: Hub, server: Server) -> Iterator[tuple[int, Any]]:
    """What arrived by now, after waiting a moment for the first. Raises what a worker says it failed of."""
    timeout: float | None = SECONDS_BETWEEN_POLLS
    while True:
        try:
            number, message = hub.inbox.get(timeout=timeout) if timeout else hub.inbox.get_nowait()
        except queue.Empty:
            if server.worker_failed.is_set():
                raise CaptureFailed(f"a process of SGLang ended {WHY_ENDED}") from None
            return
        timeout = None
        if isinstance(message, Failed):
            raise CaptureFailed(message.why)
        if isinstance(message, Gone):
            raise CaptureFailed(f"a worker of SGLang ended {WHY_ENDED}")
        yield number, message


def _failure(future: Future[dict[str, Any]]) -> str:
    """Why SGLang did not answer; empty where it did."""
    if future.cancelled():
        return "cancelled by SGLang"
    if (error := future.exception()) is not None:
        return f"SGLang: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    reason = future.result()["meta_info"].get("finish_reason") or {}
    return f"SGLang: {reason.get('message', 'aborted')}" if reason.get("type") == "abort" else ""


def _num_tokens(requests: dict[str, _Request]) -> int:
    return sum(request.sample.num_tokens for request in requests.values())
