"""From the device to the shards: copies overlap the forward, writing overlaps both, memory is bounded.

The forward's thread hands over a batch's tensors on the device and goes on. On CUDA a side stream reduces their
statistics and copies them into pinned memory; a thread waits for that copy and feeds the shard writer, which writes
from that same memory. A few batches may be on their way; then the forward waits. On the CPU nothing needs copying.

Shapes: N tokens of B samples back to back, A taps, H hidden_size.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.base import Event, Rejected, Sealed
from eyas.shards.sample import Sample, TokenSample
from eyas.shards.statistics import NONFINITE, tap_statistics
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Batches between the forward and the writer. Two would do when both are steady: one is copied while one is written.
# The third evens out a writer that waits for a shard to be sealed. What the writer has taken it bounds itself.
BATCHES_IN_FLIGHT = 3


@dataclass(frozen=True, kw_only=True)
class CapturedBatch:
    """What one forward gave, on the target's device, samples back to back without padding."""

    samples: Sequence[TokenSample]  # B of them
    features: Tensor  # dataset dtype [N, A, H]
    last_hidden: Tensor | None  # dataset dtype [N, H]
    target_top1: Tensor | None  # int32 [N]
    target_lse: Tensor | None  # float32 [N]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.features, self.last_hidden, self.target_top1, self.target_lse]


@dataclass(frozen=True, kw_only=True)
class _Handover:
    samples: Sequence[TokenSample]
    host: list[Tensor | None]  # features, last_hidden, top1, lse on the CPU
    statistics: list[Tensor]  # per sample float64 [A(+1), 4], on the CPU
    copied: torch.cuda.Event | None  # host and statistics are whole once it has happened
    on_device: list[Tensor | None]  # what the copy reads: kept until then


class Pump:
    """Writes captured batches through ``writer`` in a thread of its own.

    Context manager; ``finish`` seals everything. Left without it, what has not reached the writer is dropped. The
    writer itself is its opener's to close or abort.
    """

    def __init__(
        self, writer: ShardWriter, *, taps: Sequence[Tap], last_hidden: Tap | None, device: torch.device
    ) -> None:
        import torch

        self._writer = writer
        self._columns = [str(tap) for tap in taps] + ([] if last_hidden is None else [f"last_hidden ({last_hidden})"])
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._room = threading.Semaphore(BATCHES_IN_FLIGHT)
        self._handovers: queue.SimpleQueue[_Handover | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name="eyas-pump", daemon=True)

    def __enter__(self) -> Pump:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._dropped = True
        if self._thread.is_alive():
            self._handovers.put(None)
            self._thread.join()

    def put(self, batch: CapturedBatch) -> None:
        """Hand over a batch. Waits while too many are on their way; raises what went wrong in the writer's thread."""
        self._room.acquire()
        self._raise_error()
        if self._stream is not None:
            self._handovers.put(self._start_copy(batch, self._stream))
        else:
            self._handovers.put(
                _Handover(
                    samples=batch.samples, host=batch.tensors, statistics=_statistics(batch), copied=None, on_device=[]
                )
            )

    def events(self) -> list[Event]:
        """What became of samples since the last call. Raises what went wrong in the writer's thread."""
        self._raise_error()
        return [self._events.popleft() for _ in range(len(self._events))]

    def finish(self) -> list[Event]:
        """Wait until everything put is written, seal it, and return the remaining events."""
        self._handovers.put(None)
        self._thread.join()
        self._raise_error()
        self._events.extend(Sealed(shard=shard) for shard in self._writer.close())
        return self.events()

    def _start_copy(self, batch: CapturedBatch, stream: torch.cuda.Stream) -> _Handover:
        """On the side stream: statistics, then everything into pinned memory, without waiting."""
        import torch

        # Pinned memory comes from torch's cache, which takes a block back once the writer has let go of it. One block
        # a tensor and batch: the samples are slices of it.
        def copy(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            statistics = copy(torch.stack(_statistics(batch)))  # float64 [B, A(+1), 4]
            host = [None if tensor is None else copy(tensor) for tensor in batch.tensors]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return _Handover(
            samples=batch.samples, host=host, statistics=list(statistics), copied=copied, on_device=batch.tensors
        )

    def _run(self) -> None:
        import torch

        if self._stream is not None:  # a thread starts on device 0, whatever the rank's is
            torch.cuda.set_device(self._stream.device)
        while (handover := self._handovers.get()) is not None:
            # After an error the queue still empties, so that put() wakes up and raises it.
            if self._error is None and not self._dropped:
                try:
                    self._write(handover)
                except BaseException as error:  # noqa: BLE001  raised again in the forward's thread
                    self._error = error
            self._room.release()

    def _write(self, handover: _Handover) -> None:
        import torch

        if handover.copied is not None:
            handover.copied.synchronize()
        handover.on_device.clear()
        features, last_hidden, top1, lse = handover.host
        assert features is not None
        begin = 0
        for n, sample in enumerate(handover.samples):
            rows = slice(begin, begin + sample.num_tokens)
            begin = rows.stop
            captured = Sample(
                sample_id=sample.sample_id,
                input_ids=torch.from_numpy(np.array(sample.input_ids, dtype=np.int32)),
                loss_mask=torch.from_numpy(np.array(sample.loss_mask, dtype=np.uint8)),
                features=features[rows].flatten(1),  # [T, A*H]
                last_hidden=None if last_hidden is None else last_hidden[rows],
                target_top1=None if top1 is None else top1[rows],
                target_lse=None if lse is None else lse[rows],
            )
            statistics = handover.statistics[n]  # [A(+1), 4]
            if reason := self._why_not(captured, statistics):
                self._events.append(Rejected(sample_id=sample.sample_id, reason=reason))
                continue
            sealed = self._writer.add(captured, statistics)
            self._events.extend(Sealed(shard=shard) for shard in sealed)

    def _why_not(self, sample: Sample, statistics: Tensor) -> str | None:
        """Why a sample cannot be trained on: NaN or Inf in a captured tensor or in the logits' statistics."""
        bad = [
            f"{int(count)} in {name}"
            for name, count in zip(self._columns, statistics[:, NONFINITE].tolist(), strict=True)
            if count
        ]
        if bad:
            return f"NaN or Inf in the captured tensors: {', '.join(bad)}"
        if sample.target_lse is not None and sample.target_top1 is not None:
            bad_rows = int((~sample.target_lse.isfinite() & (sample.target_top1 >= 0)).sum())
            if bad_rows:
                return f"NaN or Inf in the target's logits at {bad_rows} tokens"
        return None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _statistics(batch: CapturedBatch) -> list[Tensor]:
    """Per sample [A, 4], or [A + 1, 4] with last_hidden's row at the end: float64, on the batch's device."""
    import torch

    statistics: list[Any] = []
    begin = 0
    for sample in batch.samples:
        rows = slice(begin, begin + sample.num_tokens)
        begin = rows.stop
        parts = [tap_statistics(batch.features[rows])]
        if batch.last_hidden is not None:
            parts.append(tap_statistics(batch.last_hidden[rows].unsqueeze(1)))
        statistics.append(torch.cat(parts))
    return statistics
