"""The engine ``vllm``: the target runs in vLLM, whose workers write the shards.

eyas is one process, which holds vLLM's engine core, feeds prompts of token ids with ``max_tokens=1`` and asks the
workers now and then what they sealed. What is hooked and why is in worker.py.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.base import (
    EngineSettings,
    Event,
    Forwarded,
    Rejected,
    Sink,
    TargetOutline,
    Work,
)
from eyas.capture.engines.transformers.load import (
    read_head_facts,
    target_identity,
    text_config,
)
from eyas.capture.engines.transformers.parallel import Ranks
from eyas.capture.engines.vllm.load import (
    check_options,
    installed_version,
    is_known_version,
    parse_options,
    read_outline,
    set_environment_of_a_capture,
    start,
)
from eyas.capture.engines.vllm.worker import EVERY, RANK, ROW, Facts, Failed, Plan
from eyas.capture.errors import WHY_ENDED, CaptureFailed, SelfTestError, TargetError
from eyas.capture.self_test import Probed, check_taps, check_workers_agree, read_reference, usable_probe
from eyas.shards.identity import TargetIdentity
from eyas.shards.sample import Sample, TokenSample, sample_id
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import validate_taps

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

Rows = npt.NDArray[np.int64]

# Requests that vLLM holds, so that its scheduler always fills a batch: those of this many batches, by tokens.
BATCHES_AHEAD = 4
MOST_REQUESTS = 4096  # at a time, where samples are short
SECONDS_BETWEEN_POLLS = 0.5
LEARNING_TOKENS = 8
# Of the final norm of after:{L-1} to what vLLM gives: another tensor than the residual stream is far away.
FINAL_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class _Running:
    engine: LLMEngine
    facts: Facts
    ranks: Ranks  # of eyas' own processes, each with a vLLM of its own
    leave: ExitStack  # ends all of it


class VllmEngine:
    """Engine ``vllm`` (capture/engines/base.py says what an engine is)."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._running: _Running | None = None
        self._self_test = "none"
        self._num_captures = 0

    def __enter__(self) -> VllmEngine:
        """Start vLLM with the target and hook its workers.

        Raises TargetError, UsageError or TapError: what can be refused from the configuration alone is, before
        anything loads.
        """
        import torch

        settings, outline = self._settings, self._outline
        check_settings(outline, settings)
        with ExitStack() as stack:
            ranks = Ranks(1, torch.device("cpu"))
            stack.push(lambda kind, *_: ranks.leave(failed=kind is not None))
            engine = start(settings, outline)
            stack.callback(_shut_down, engine)
            facts = install(engine, settings, outline)
            self._running = _Running(engine=engine, facts=facts, ranks=ranks, leave=stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leave = self._loaded.leave
        self._running = None
        leave.__exit__(kind, error, traceback)

    @property
    def vllm(self) -> LLMEngine:
        """The vLLM that runs the target."""
        return self._loaded.engine

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
        outline, settings, facts = self._outline, self._settings, self._loaded.facts
        return target_identity(
            settings,
            outline,
            read_head_facts(settings, outline),
            logit_scale=facts.logit_scale,
            logit_softcap=facts.logit_softcap,
            quantization=facts.quantization,
        )

    @property
    def label(self) -> str:
        """System and version."""
        return f"vllm {installed_version()}"

    @property
    def max_positions(self) -> int | None:
        """The longest sample, in tokens, that vLLM takes."""
        return int(self._loaded.engine.vllm_config.model_config.max_model_len) - 1

    def self_test(self, probe: Sequence[TokenSample]) -> None:
        """Capture ``probe`` the way ``capture`` does it, on every worker, and compare.

        The workers must agree; where transformers can run the target here, every column must be the tap it is called
        (capture/self_test.py). Everywhere the model's own final norm must turn after:{L-1} into what the model gives.
        Raises SelfTestError.
        """
        running, settings = self._loaded, self._settings
        samples = usable_probe(probe, replace(self._outline, max_positions=self.max_positions))
        facts = running.facts
        if settings.target_statistics and facts.head_error:
            raise SelfTestError(facts.head_error)
        captured = self.probe(samples)
        check_workers_agree("vLLM", settings.dtype, captured)
        reference, why_not = read_reference(settings, self._outline, samples)
        if reference is not None:
            check_taps("vLLM", settings.dtype, captured[0], reference)
            self._self_test = "transformers"
            return
        if not facts.final_error <= FINAL_TOLERANCE:
            raise SelfTestError(
                f"the target cannot be compared with transformers ({why_not}), and vLLM's final norm does not turn "
                f"what its last layer gives into what it gives itself (relative error {facts.final_error:.2g}): "
                f"nothing shows that the taps are right"
            )
        if not is_known_version(installed_version()):
            raise SelfTestError(
                f"vLLM {installed_version()} is not one that eyas knows, and the target cannot be compared with "
                f"transformers here ({why_not}): nothing shows that the taps are right"
            )
        self._self_test = f"final norm; not compared with transformers: {why_not}"

    def probe(self, samples: Sequence[TokenSample]) -> list[list[Probed]]:
        """What every worker captures of ``samples``: per worker, sample by sample. Raises SelfTestError."""
        engine, settings = self._loaded.engine, self._settings
        # Ids of their own: the samples were cut.
        named = [
            TokenSample(sample_id=sample_id(s.input_ids, s.loss_mask), input_ids=s.input_ids, loss_mask=s.loss_mask)
            for s in samples
        ]
        named = list({sample.sample_id: sample for sample in named}.values())
        self._call("eyas_open", named, None, {}, 0)
        for row, sample in enumerate(named):
            add_request(engine, f"probe-{row}", sample.input_ids.tolist(), {ROW: row, RANK: EVERY})
        while engine.has_unfinished_requests():
            self._step()
        rejected = [event for event in self._ask("eyas_finish") if isinstance(event, Rejected)]
        if rejected:
            raise SelfTestError(f"the probe: {rejected[0].reason}. Is --dtype {settings.dtype} wide enough?")
        workers: list[list[Sample]] = self._call("eyas_collected")
        self._call("eyas_abort")
        probed = []
        for worker in workers:
            by_id = {sample.sample_id: sample for sample in worker}
            probed.append([_probed(by_id[sample.sample_id], settings) for sample in samples_of(named, samples)])
        return probed

    def capture(self, work: Work, sink: Sink, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Capture ``work`` (see Engine.capture)."""
        ranks, settings = self._loaded.ranks, self._settings
        self._num_captures += 1
        longest = self.max_positions or np.iinfo(np.int64).max
        fits = (work.lengths >= 1) & (work.lengths <= longest)
        for row in work.rows[~fits] if ranks.rank == 0 else ():
            sample = work.source[int(row)]
            yield Rejected(
                sample_id=sample.sample_id,
                reason=f"{sample.num_tokens} tokens, and the target's positions allow 1 to {longest}"
                if longest == self._outline.max_positions
                else f"{sample.num_tokens} tokens, and vLLM takes 1 to {longest} here (--max-model-len after --)",
            )
        self._call("eyas_open", work.source, sink, self._metadata(), ranks.rank * settings.tp)
        try:
            yield from self._feed(work, work.rows[fits], work.lengths[fits], should_stop)
            yield from self._ask("eyas_finish")
        except CaptureFailed:
            raise  # vLLM is gone, and its workers with what they had not sealed
        except BaseException:
            self._call("eyas_abort")
            raise
        self._call("eyas_abort")

    def _feed(self, work: Work, rows: Rows, lengths: Rows, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Keep vLLM busy with this process's part of ``rows``, of which it claims one batch's worth after the other;
        ends when all are through, or soon after ``should_stop`` is true."""
        engine, ranks = self._loaded.engine, self._loaded.ranks
        batch_tokens = int(engine.vllm_config.scheduler_config.max_num_batched_tokens)
        ahead = BATCHES_AHEAD * batch_tokens
        parts = _parts(rows, lengths, batch_tokens)
        counter = f"capture-{self._num_captures}" + (f"-of-{ranks.rank}" if work.everywhere else "")
        waiting: deque[int] = deque()
        is_more = True
        running: dict[str, int] = {}  # tokens of each request that vLLM holds
        held = 0
        written = np.zeros(self._settings.tp, dtype=np.int64)  # tokens that each worker was given to write
        polled = time.monotonic()
        while (is_more or waiting or running) and not should_stop():
            while (is_more or waiting) and (held < ahead or not running) and len(running) < MOST_REQUESTS:
                if not waiting:
                    number = ranks.claim(counter, should_stop())
                    is_more = number is not None and number < len(parts)
                    waiting.extend(parts[number].tolist() if number is not None and is_more else ())
                    continue
                row = waiting.popleft()
                sample = work.source[row]
                if reason := self._refusal(sample):
                    yield Rejected(sample_id=sample.sample_id, reason=reason)
                    continue
                rank = EVERY if work.everywhere else int(written.argmin())
                name = f"eyas-{row}"
                add_request(engine, name, sample.input_ids.tolist(), {ROW: row, RANK: rank})
                if not work.everywhere:
                    written[rank] += sample.num_tokens
                running[name] = sample.num_tokens
                held += sample.num_tokens
            if not running:
                continue
            finished = [running.pop(output.request_id) for output in self._step() if output.finished]
            if finished:
                held -= sum(finished)
                yield Forwarded(num_samples=len(finished), num_tokens=sum(finished))
            if time.monotonic() - polled > SECONDS_BETWEEN_POLLS:
                yield from self._ask("eyas_poll")
                polled = time.monotonic()
        if running:  # told to stop
            engine.abort_request(list(running))
            while engine.has_unfinished_requests():
                self._step()

    def _step(self) -> list[Any]:
        engine = self._loaded.engine
        with _failures(engine):
            return engine.step()  # type: ignore[no-any-return]

    def _call(self, method: str, *arguments: object) -> list[Any]:
        return _call(self._loaded.engine, method, *arguments)

    def _refusal(self, sample: TokenSample) -> str | None:
        """Why a sample must not go through the target. On CUDA an id out of range would end the process."""
        smallest, largest = int(sample.input_ids.min()), int(sample.input_ids.max())
        if smallest < 0 or largest >= self._outline.vocab_size:
            return (
                f"token id {smallest if smallest < 0 else largest} is outside the target's vocabulary of "
                f"{self._outline.vocab_size}"
            )
        return None

    def _ask(self, method: str) -> list[Event]:
        """The events of all workers."""
        return [event for answer in self._call(method) for event in answer]

    def _metadata(self) -> dict[str, str]:
        """What made a shard, for its header: what may differ between workers of one dataset."""
        import torch

        running, settings = self._loaded, self._settings
        config = running.engine.vllm_config
        return {
            "engine": "vllm",
            "vllm": installed_version(),
            "torch": torch.__version__,
            "path": "forward hooks (worker_extension_cls), eager",
            "residual": "added" if running.facts.adds_residual else "in the hidden states",
            "device": running.facts.device,
            "attention": running.facts.attention,
            "tp": str(settings.tp),
            "world_size": str(running.ranks.world_size * settings.tp),
            "batch_tokens": str(config.scheduler_config.max_num_batched_tokens),
            "max_model_len": str(config.model_config.max_model_len),
            "engine_options": " ".join(settings.engine_options),
            "self_test": self._self_test,
            "host": platform.node(),
        }


def check_settings(outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse what can be refused before anything loads. Raises TargetError, UsageError or TapError."""
    validate_taps(settings.taps, outline.num_layers)
    check_options(settings.engine_options)
    installed_version()
    if settings.device != "auto":
        raise UsageError(f"--device {settings.device} with --engine vllm: vLLM's build decides where it runs")
    num_heads = getattr(text_config(outline.config), "num_attention_heads", None)
    if num_heads and num_heads % settings.tp:
        raise TargetError(f"--tp {settings.tp} does not divide this target's {num_heads} attention heads")
    if settings.engine_options:
        set_environment_of_a_capture()
        parse_options(settings)  # what vLLM does not know, before anything is made


def create_engine(settings: EngineSettings) -> VllmEngine:
    """The engine that ``settings`` describe."""
    return VllmEngine(settings)


def create_prober(settings: EngineSettings) -> VllmEngine:
    """The same, for ``probe`` alone."""
    return VllmEngine(settings)


def _parts(rows: Rows, lengths: Rows, batch_tokens: int) -> list[Rows]:
    """``rows`` [N] in their order, in parts of about ``batch_tokens`` tokens. lengths: tokens of each, [N]."""
    begins = np.cumsum(lengths) - lengths
    return np.split(rows, np.flatnonzero(np.diff(begins // batch_tokens)) + 1) if len(rows) else []


def samples_of(named: Sequence[TokenSample], samples: Sequence[TokenSample]) -> list[TokenSample]:
    """Of each of ``samples`` the one in ``named`` with the same tokens."""
    by_id = {sample.sample_id: sample for sample in named}
    return [by_id[sample_id(sample.input_ids, sample.loss_mask)] for sample in samples]


def _probed(sample: Sample, settings: EngineSettings) -> Probed:
    columns = dict(
        zip(settings.taps, sample.features.view(sample.num_tokens, len(settings.taps), -1).unbind(1), strict=True)
    )
    if settings.last_hidden is not None and sample.last_hidden is not None:
        columns[settings.last_hidden] = sample.last_hidden
    return Probed(columns=columns, target_lse=sample.target_lse)


def install(engine: LLMEngine, settings: EngineSettings, outline: TargetOutline) -> Facts:
    """Hook the model in every worker of ``engine``, and teach the hooks by a first short forward."""
    plan = Plan(
        taps=settings.taps,
        last_hidden=settings.last_hidden,
        target_statistics=settings.target_statistics,
        dtype=settings.dtype,
        num_layers=outline.num_layers,
        hidden_size=outline.hidden_size,
    )
    _call(engine, "eyas_install", plan)
    ids = [n % outline.vocab_size for n in range(LEARNING_TOKENS)]
    add_request(engine, "learning", ids[: outline.max_positions], {})
    while engine.has_unfinished_requests():
        with _failures(engine):
            engine.step()
    facts: Facts = _call(engine, "eyas_facts")[0]
    return facts


def add_request(engine: LLMEngine, name: str, ids: Sequence[int], extra: dict[str, int]) -> None:
    """A request that only computes its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra,
    )
    (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": list(ids)}])
    engine.add_request(name, prompt, parameters)


def _call(engine: LLMEngine, method: str, *arguments: object) -> list[Any]:
    """Every worker's answer. Raises the error that one of them met."""
    with _failures(engine):
        answers: list[Any] = engine.collective_rpc(method, args=arguments)
    for answer in answers:
        if isinstance(answer, Failed):
            raise answer.error
    return answers


@contextmanager
def _failures(engine: LLMEngine) -> Iterator[None]:
    """What vLLM raises when a worker failed or is gone, as one error."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        if _has_ended(engine):
            raise CaptureFailed(f"a worker of vLLM ended {WHY_ENDED}") from error
        raise CaptureFailed(
            f"vLLM failed: {type(error).__name__}: {error}. What was sealed is kept: run the same command again to go "
            f"on"
        ) from error


def _has_ended(engine: LLMEngine) -> bool:
    """Whether one of vLLM's workers is gone, where they are processes of this machine."""
    executor: Any = engine.model_executor
    processes = [worker.proc for worker in getattr(executor, "workers", ()) if hasattr(worker, "proc")]
    return bool(getattr(executor, "is_failed", False)) or not all(process.is_alive() for process in processes)


def _shut_down(engine: LLMEngine) -> None:
    """End vLLM's workers and free the device."""
    engine.engine_core.shutdown()
