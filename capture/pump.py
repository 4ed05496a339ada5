"""From the device to the shards: copies overlap the forward, writing overlaps both, memory is bounded.

The forward's thread hands over a batch's tensors on the device and goes on. A thread of the pump's own reduces their
statistics and copies them into pinned memory, on a side stream of the device, and feeds the shard writer, which writes
from that same memory in a thread of its own. A few batches may be on their way; then the forward waits. On the CPU
nothing needs copying.

An engine that splits a prefill over several forwards hands over pieces of samples; a sample is written once its last
piece is here.

Shapes: N tokens of B pieces back to back, A taps, H hidden_size, T tokens of a sample.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.base import Event, Rejected, Sealed
from eyas.capture.errors import TargetError
from eyas.shards.sample import Sample, TokenSample
from eyas.shards.statistics import MAX_ABS, NONFINITE, tap_statistics
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eyas.shards.ledger import SealedShard

# Batches on the device between the forward and the writer. Two would do when both are steady: one is copied while one
# is computed. The third evens out a writer that waits for a shard to be sealed. What the writer has it bounds itself.
BATCHES_IN_FLIGHT = 3


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive rows of one sample."""

    sample: TokenSample
    begin: int  # the first row
    num_rows: int

    @property
    def is_whole(self) -> bool:
        return self.num_rows == self.sample.num_tokens


def whole(samples: Sequence[TokenSample]) -> list[Piece]:
    """Each of ``samples`` in one piece."""
    return [Piece(sample=sample, begin=0, num_rows=sample.num_tokens) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class CapturedBatch:
    """What one forward gave, on the target's device, pieces back to back without padding."""

    pieces: Sequence[Piece]  # B of them
    features: Tensor  # dataset dtype [N, A, H]
    last_hidden: Tensor | None  # dataset dtype [N, H]
    target_top1: Tensor | None  # int32 [N]
    target_lse: Tensor | None  # float32 [N]
    input_ids: Tensor | None = None  # integers [N], as the target was given them; compared with the samples'


class SampleWriter(Protocol):
    """What a pump feeds: a ShardWriter, or what a self-test puts in its place."""

    def add(self, sample: Sample, statistics: Tensor | None = None) -> list[SealedShard]: ...

    def close(self) -> list[SealedShard]: ...


class Pump:
    """Writes captured batches through ``writer`` in a thread of its own.

    Context manager; ``finish`` seals everything. Left without it, what has not reached the writer is dropped. The
    writer itself is its opener's to close or abort.
    """

    def __init__(
        self, writer: SampleWriter, *, taps: Sequence[Tap], last_hidden: Tap | None, device: torch.device
    ) -> None:
        import torch

        self._writer = writer
        self._columns = [str(tap) for tap in taps] + ([] if last_hidden is None else [f"last_hidden ({last_hidden})"])
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._room = threading.Semaphore(BATCHES_IN_FLIGHT)
        self._handovers: queue.SimpleQueue[tuple[CapturedBatch, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._begun: dict[str, list[_Parts]] = {}  # by sample id, of samples whose last piece is still to come
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
        """The batch and the statistics of its pieces (float64 [A(+1), 4] each) on the CPU."""
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
                pieces=batch.pieces,
                features=copied(batch.features),
                **{
                    name: None if (tensor := getattr(batch, name)) is None else copied(tensor)
                    for name in ("last_hidden", "target_top1", "target_lse", "input_ids")
                },
            )
        self._stream.synchronize()
        return host, list(statistics)

    def _write(self, batch: CapturedBatch, statistics: list[Tensor]) -> None:
        if batch.input_ids is not None:
            _check_ids(batch.pieces, batch.input_ids.numpy())
        begin = 0
        for piece, totals in zip(batch.pieces, statistics, strict=True):
            rows = slice(begin, begin + piece.num_rows)
            begin = rows.stop
            parts = _Parts(
                {
                    name: tensor[rows]
                    for name in ("features", "last_hidden", "target_top1", "target_lse")
                    if (tensor := getattr(batch, name)) is not None
                },
                totals,
            )
            if not piece.is_whole:
                joined = self._join(piece, parts)
                if joined is None:
                    continue
                parts = joined
            self._write_sample(piece.sample, parts)

    def _join(self, piece: Piece, parts: _Parts) -> _Parts | None:
        """All rows of the sample where ``piece`` is its last, else None.

        An engine that ran out of room starts a sample over: its earlier pieces are forgotten then.
        """
        sample_id = piece.sample.sample_id
        if piece.begin == 0:
            self._begun[sample_id] = [parts]
        else:
            begun = self._begun.get(sample_id, [])
            have = sum(part.num_rows for part in begun)
            if have != piece.begin:
                raise TargetError(
                    f"sample {sample_id}: the engine went on at token {piece.begin}, and {have} are here: a fault of "
                    f"eyas with this engine; nothing wrong was written"
                )
            begun.append(parts)
        if piece.begin + piece.num_rows < piece.sample.num_tokens:
            return None
        return _joined(self._begun.pop(sample_id))

    def _write_sample(self, sample: TokenSample, parts: _Parts) -> None:
        import torch

        tensors = parts.tensors
        captured = Sample(
            sample_id=sample.sample_id,
            input_ids=torch.from_numpy(np.array(sample.input_ids, dtype=np.int32)),
            loss_mask=torch.from_numpy(np.array(sample.loss_mask, dtype=np.uint8)),
            features=tensors["features"].flatten(1),  # [T, A*H]
            last_hidden=tensors.get("last_hidden"),
            target_top1=tensors.get("target_top1"),
            target_lse=tensors.get("target_lse"),
        )
        if reason := self._why_not(captured, parts.statistics):
            self._events.append(Rejected(sample_id=sample.sample_id, reason=reason))
            return
        sealed = self._writer.add(captured, parts.statistics)
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


@dataclass(frozen=True)
class _Parts:
    """Rows of one sample on the CPU."""

    tensors: dict[str, Tensor]  # by the names of CapturedBatch
    statistics: Tensor  # float64 [A(+1), 4]

    @property
    def num_rows(self) -> int:
        return len(self.tensors["features"])


def _joined(parts: Sequence[_Parts]) -> _Parts:
    import torch

    stack = torch.stack([part.statistics for part in parts])  # [pieces, A(+1), 4]
    statistics = stack.sum(0)
    statistics[:, MAX_ABS] = stack[:, :, MAX_ABS].amax(0)
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    return _Parts(tensors, statistics)


def _check_ids(pieces: Sequence[Piece], input_ids: npt.NDArray[np.integer[Any]]) -> None:
    """Refuse rows that are not of the tokens they are taken for. input_ids: [N]"""
    expected = np.concatenate([piece.sample.input_ids[piece.begin : piece.begin + piece.num_rows] for piece in pieces])
    if not np.array_equal(expected, input_ids):
        wrong = int(np.argmax(expected != input_ids)) if len(expected) == len(input_ids) else -1
        raise TargetError(
            f"the engine's batch does not hold the tokens that eyas takes it to (row {wrong} of {len(input_ids)}): a "
            f"fault of eyas with this engine; nothing wrong was written"
        )


def _statistics(batch: CapturedBatch) -> list[Tensor]:
    """Per piece [A, 4], or [A + 1, 4] with last_hidden's row at the end: float64, on the batch's device."""
    import torch

    statistics: list[Any] = []
    begin = 0
    for piece in batch.pieces:
        rows = slice(begin, begin + piece.num_rows)
        begin = rows.stop
        parts = [tap_statistics(batch.features[rows])]
        if batch.last_hidden is not None:
            parts.append(tap_statistics(batch.last_hidden[rows].unsqueeze(1)))
        statistics.append(torch.cat(parts))
    return statistics
