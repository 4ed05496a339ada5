"""What runs inside vLLM's workers: mixed into its worker class (``worker_extension_cls``), called by collective_rpc.

Each worker hooks its model, keeps the rows of the samples that are its own, and writes them through its own pump and
shard writer. The driver sends rows of the prepared samples as requests, and asks now and then what was sealed.

Only hooks, and no speculative decoding: vLLM's own extract_hidden_states goes through the key-value cache of a dummy
draft, which costs memory and a second copy, gives the file writing to one rank, and refuses targets whose cache is of
another kind (MLA, hybrid). Hooks see every target that has decoder layers; the price is that the model runs eagerly,
which a prefill of thousands of tokens hardly feels.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from eyas.capture.engines.base import Event, SampleSource, Sink
from eyas.capture.engines.vllm.hooks import ScheduledPiece, StepHooks, Wanted
from eyas.capture.engines.vllm.locate import locate
from eyas.capture.errors import TargetError
from eyas.capture.pump import CapturedBatch, Piece, Pump
from eyas.shards.sample import Sample, TokenSample
from eyas.taps.errors import EyasError
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.ledger import SealedShard
    from eyas.shards.writer import ShardWriter

ROW, RANK = "eyas_row", "eyas_rank"  # of a request's extra_args: its row of the samples, and the worker that writes it
EVERY = -1  # in place of that worker: all of them write it
SECONDS_BETWEEN_POLLS = 0.2
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a worker is to capture. Travels to it."""

    taps: tuple[Tap, ...]
    last_hidden: Tap | None
    target_statistics: bool
    dtype: str
    num_layers: int
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a worker found out about its model."""

    adds_residual: bool
    final_error: float
    head_error: str
    logit_scale: float
    logit_softcap: float | None
    device: str
    quantization: str | None
    attention: str


@dataclass(frozen=True)
class Failed:
    """In place of a worker's answer: what it met. Of an exception itself vLLM hands on no more than its text."""

    error: EyasError


class Collector:
    """In place of a shard writer during the self-test: keeps the samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, sample: Sample, statistics: Tensor | None = None) -> list[SealedShard]:
        self.samples.append(sample)
        return []

    def close(self) -> list[SealedShard]:
        return []

    def abort(self) -> None:
        pass


class CaptureExtension:
    """Methods of vLLM's worker, on every rank. Their names start with eyas_, as nothing of vLLM's does."""

    def eyas_install(self, plan: Plan) -> Failed | None:
        """Hook the model. The next forward teaches the hooks how its layers hand on their sums."""

        def install() -> None:
            self._eyas = _Capture(self, plan)

        return _answer(install)

    def eyas_facts(self) -> Facts:
        return self._eyas.facts()

    def eyas_open(
        self, source: SampleSource, sink: Sink | None, metadata: dict[str, str], first_rank: int
    ) -> Failed | None:
        """From now on capture the requests that name a row of ``source``: into ``sink``, or to be collected.

        first_rank: the number under which this vLLM's first worker writes.
        """
        return _answer(lambda: self._eyas.open(source, sink, metadata, first_rank))

    def eyas_poll(self) -> list[Event] | Failed:
        """What became of samples since the last call, or what went wrong."""
        return _answer(self._eyas.poll)

    def eyas_finish(self) -> list[Event] | Failed:
        """Seal everything, and give the remaining events."""
        return _answer(self._eyas.finish)

    def eyas_collected(self) -> list[Sample]:
        return self._eyas.collected()

    def eyas_abort(self) -> None:
        """Drop what is not sealed."""
        self._eyas.abort()

    def eyas_remove(self) -> None:
        """Take the hooks off the model."""
        self._eyas.close()


class _Capture:
    """A worker's capture."""

    def __init__(self, worker: Any, plan: Plan) -> None:
        import torch

        self._worker = worker
        self._runner = worker.model_runner
        self._plan = plan
        self._rank = int(worker.rank)
        self._source: SampleSource | None = None
        self._writer: ShardWriter | Collector | None = None
        self._pump: Pump | None = None
        self._pieces: dict[str, tuple[TokenSample, bool]] = {}  # by request: its sample, and whether it is our own
        self._error: BaseException | None = None
        if not hasattr(self._runner, "input_batch"):
            raise TargetError(f"vLLM's {type(self._runner).__name__} keeps no input batch that eyas can read")
        wanted = Wanted(
            taps=plan.taps,
            last_hidden=plan.last_hidden,
            target_statistics=plan.target_statistics,
            dtype=getattr(torch, plan.dtype),
            hidden_size=plan.hidden_size,
        )
        self._hooks = StepHooks(
            locate(self._runner.get_model(), plan.num_layers), wanted, schedule=self._schedule, take=self._take
        )
        self._hooks.learn()
        _follow_parent()

    def facts(self) -> Facts:
        import torch

        learned, config = self._hooks.learned, self._worker.vllm_config
        on_cuda = torch.device(self._runner.device).type == "cuda"
        backends = {group.backend.get_name() for groups in self._runner.attn_groups for group in groups}
        return Facts(
            adds_residual=learned.adds_residual,
            final_error=learned.final_error,
            head_error=learned.head_error or ("" if learned.head else "no logits were made"),
            logit_scale=learned.head.scale if learned.head else 1.0,
            logit_softcap=learned.head.softcap if learned.head else None,
            device=torch.cuda.get_device_name(self._runner.device) if on_cuda else platform.machine(),
            quantization=config.model_config.quantization,
            attention=",".join(sorted(backends)),
        )

    def open(self, source: SampleSource, sink: Sink | None, metadata: dict[str, str], first_rank: int) -> None:
        import torch

        self.abort()
        self._source = source
        host = {"host": platform.node()}
        self._writer = Collector() if sink is None else sink.open(first_rank + self._rank, metadata | host)
        self._pump = Pump(
            self._writer,
            taps=self._plan.taps,
            last_hidden=self._plan.last_hidden,
            device=torch.device(self._runner.device),
        )
        self._pump.__enter__()

    def poll(self) -> list[Event]:
        if self._error is not None:
            raise self._error
        return [] if self._pump is None else self._pump.events()

    def finish(self) -> list[Event]:
        events = self.poll()
        assert self._pump is not None
        return events + self._pump.finish()

    def collected(self) -> list[Sample]:
        assert isinstance(self._writer, Collector)
        return self._writer.samples

    def abort(self) -> None:
        pump, writer = self._pump, self._writer
        self._source = self._pump = self._writer = self._error = None
        self._pieces.clear()
        if pump is not None:
            pump.__exit__(None, None, None)
        if writer is not None:
            writer.abort()

    def close(self) -> None:
        self.abort()
        self._hooks.close()

    def _schedule(self) -> list[ScheduledPiece] | None:
        """The pieces of samples in the forward that comes; None in a dummy run, or when nobody captures."""
        from vllm.forward_context import get_forward_context

        if self._pump is None or self._error is not None or get_forward_context().attn_metadata is None:
            return None
        batch = self._runner.input_batch
        num_requests = len(batch.req_ids)
        begins = batch.num_computed_tokens_cpu[:num_requests].tolist()
        rows = self._runner.query_start_loc.np[: num_requests + 1].tolist()  # [requests + 1]
        scheduled = []
        for number, request_id in enumerate(batch.req_ids):
            known = self._pieces.get(request_id) or self._look_up(request_id)
            if known is None:
                continue
            sample, is_own = known
            num_rows = min(rows[number + 1] - rows[number], sample.num_tokens - begins[number])
            if num_rows > 0:
                piece = Piece(sample=sample, begin=begins[number], num_rows=num_rows)
                scheduled.append(ScheduledPiece(piece=piece, start=rows[number], is_own=is_own))
            if begins[number] + num_rows >= sample.num_tokens:
                self._pieces.pop(request_id, None)
        return scheduled

    def _look_up(self, request_id: str) -> tuple[TokenSample, bool] | None:
        parameters = self._runner.requests[request_id].sampling_params
        extra = parameters.extra_args if parameters is not None else None
        if not extra or ROW not in extra or self._source is None:
            return None
        known = self._source[extra[ROW]], extra[RANK] in (EVERY, self._rank)
        self._pieces[request_id] = known
        return known

    def _take(self, batch: CapturedBatch) -> None:
        assert self._pump is not None
        try:
            self._pump.put(batch)
        except EyasError as error:
            # Told at the driver's next question: raised here it would end vLLM, and say so instead of the cause.
            self._error = error


def _answer(action: Callable[[], _T]) -> _T | Failed:
    try:
        return action()
    except EyasError as error:
        return Failed(error)


def _follow_parent() -> None:
    """End this worker at once when the process that started it is gone: nothing may be written that nobody waits for.

    Its own process group, so that a terminal's Ctrl-C reaches the driver alone, which then has the workers seal.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # the driver itself, or started by something that watches it
        return
    with contextlib.suppress(PermissionError):  # it leads a session: no terminal signals it
        os.setpgid(0, 0)

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(SECONDS_BETWEEN_POLLS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="eyas-follow-driver", daemon=True).start()
