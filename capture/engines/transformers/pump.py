"""From the device to the shards: copies overlap the forward, writing overlaps both, memory is bounded.

The forward's thread hands over a batch's tensors on the device and goes on. A thread of the pump's own reduces their
statistics and copies them into pinned memory, on a side stream of the device, and feeds the shard writer, which writes
from that same memory in a thread of its own. A few batches may be on their way; then the forward waits. On the CPU
nothing needs copying.

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

# Batches on the device between the forward and the writer. Two would do when both are steady: one is copied while one
# is computed. The third evens out a writer that waits for a shard to be sealed. What the writer has it bounds itself.
BATCHES_IN_FLIGHT = 3


@dataclass(frozen=True, kw_only=True)
class CapturedBatch:
    """What one forward gave, on the target's device, samples back to back without padding."""

    samples: Sequence[TokenSample]  # B of them
    features: Tensor  # dataset dtype [N, A, H]
    last_hidden: Tensor | None  # dataset dtype [N, H]
    target_top1: Tensor | None  # int32 [N]
    target_lse: Tensor | None  # float32 [N]


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
        self._handovers: queue.SimpleQueue[tuple[CapturedBatch, torch.cuda.Event | None] | None] = queue.SimpleQueue()
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
        import torch

        self._room.acquire()
        self._raise_error()
        computed = None
        if self._stream is not None:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()
        self._handovers.put((batch, computed))

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

    def _run(self) -> None:
        import torch

        if self._stream is not None:  # a thread starts on device 0, whatever the rank's is
            torch.cuda.set_device(self._stream.device)
        while (handover := self._handovers.get()) is not None:
            # After an error the queue still empties, so that put() wakes up and raises it.
            if self._error is None and not self._dropped:
                try:
                    on_host = self._to_host(*handover)
                    del handover  # the device's memory, before the writer may wait
                    self._write(*on_host)
                    del on_host
                except BaseException as error:  # noqa: BLE001  raised again in the forward's thread
                    self._error = error
            self._room.release()

    def _to_host(self, batch: CapturedBatch, computed: torch.cuda.Event | None) -> tuple[CapturedBatch, list[Tensor]]:
        """The batch and the statistics of its samples (float64 [A(+1), 4] each) on the CPU."""
        import torch

        if self._stream is None or computed is None:
            return batch, _statistics(batch)

        # Pinned memory comes from torch's cache, which takes a block back once the writer has let go of it. One block
        # a tensor and batch: the samples are slices of it.
        def copied(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            statistics = copied(torch.stack(_statistics(batch)))  # [B, A(+1), 4]
            host = CapturedBatch(
                samples=batch.samples,
                features=copied(batch.features),
                last_hidden=None if batch.last_hidden is None else copied(batch.last_hidden),
                target_top1=None if batch.target_top1 is None else copied(batch.target_top1),
                target_lse=None if batch.target_lse is None else copied(batch.target_lse),
            )
        self._stream.synchronize()
        return host, list(statistics)

    def _write(self, batch: CapturedBatch, statistics: list[Tensor]) -> None:
        import torch

        begin = 0
        for sample, totals in zip(batch.samples, statistics, strict=True):
            rows = slice(begin, begin + sample.num_tokens)
            begin = rows.stop
            captured = Sample(
                sample_id=sample.sample_id,
                input_ids=torch.from_numpy(np.array(sample.input_ids, dtype=np.int32)),
                loss_mask=torch.from_numpy(np.array(sample.loss_mask, dtype=np.uint8)),
                features=batch.features[rows].flatten(1),  # [T, A*H]
                last_hidden=None if batch.last_hidden is None else batch.last_hidden[rows],
                target_top1=None if batch.target_top1 is None else batch.target_top1[rows],
                target_lse=None if batch.target_lse is None else batch.target_lse[rows],
            )
            if reason := self._why_not(captured, totals):
                self._events.append(Rejected(sample_id=sample.sample_id, reason=reason))
                continue
            sealed = self._writer.add(captured, totals)
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
