"""A worker process of SGLang, as far as eyas lives in it: rows of requests become samples, samples become shards.

All members of a tensor-parallel group see the same rows. Each request has one member that keeps and writes it; the
others only take part in what needs every part of lm_head.

Shapes: N rows of a forward, K of them followed by a training target, T tokens of a sample, A taps, H hidden_size.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.sglang.link import (
    EVERY,
    Begin,
    Captured,
    Drop,
    Failed,
    Finish,
    Finished,
    Happened,
    Hello,
    Place,
    Start,
    Tested,
    connect,
    to_array,
)
from eyas.capture.engines.sglang.statistics import PartialHead
from eyas.capture.errors import TargetError
from eyas.capture.pump import CapturedBatch, Piece, Pump
from eyas.shards.sample import TokenSample
from eyas.taps.errors import EyasError
from eyas.taps.notation import parse_tap, parse_taps

if TYPE_CHECKING:
    from torch import Tensor

SECONDS_BETWEEN_REPORTS = 0.2
SECONDS_FOR_A_SAMPLE = 120.0  # its tokens are sent before its request


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of one request in a forward: SGLang prefills a long prompt in several."""

    rid: str
    begin: int  # of the forward's rows
    first: int  # token of the sample
    num_tokens: int


@dataclass(kw_only=True)
class _Pending:
    """A request on its way."""

    sample: TokenSample
    member: int | None
    num_seen: int = 0  # tokens
    tested: list[dict[str, Tensor]] = field(default_factory=list)  # of the self-test: per forward, by column


class Worker:
    """The connection to the driver, and the shard writer."""

    def __init__(self, place: Place) -> None:
        from sglang.srt.distributed import get_tp_group

        self._place = place
        self.group = get_tp_group()
        self.member = int(self.group.rank_in_group)
        self._connection = connect(place)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._pending: dict[str, _Pending] = {}
        self._dropped: set[str] = set()
        self._failed = False
        self._open: ExitStack | None = None
        self._pump: Pump | None = None

    def join(self, *, logit_scale: float, logit_softcap: float | None) -> None:
        """The model is built: tell the driver, and listen to it from now on."""
        hello = Hello(pid=os.getpid(), member=self.member, logit_scale=logit_scale, logit_softcap=logit_softcap)
        self._send(hello)
        threading.Thread(target=self._listen, name="eyas-driver", daemon=True).start()

    def fail(self, error: EyasError) -> None:
        """Tell the driver why nothing can be captured any more. SGLang goes on, to no effect, until it is ended."""
        if not self._failed:
            self._failed = True
            self._send(Failed(why=str(error)))

    def take(
        self,
        chunks: Sequence[Chunk],
        *,
        input_ids: Tensor,
        taps: Sequence[Tensor],
        last_hidden: Tensor | None,
        final: Tensor,
        head: PartialHead | None,
    ) -> None:
        """The tensors of a forward (input_ids [N], each of the others [N, H]) and whose rows they are.

        Called by every member with the same.
        """
        import torch

        if self._failed:
            return
        known = [(chunk, request) for chunk in chunks if (request := self._request(chunk.rid)) is not None]
        for chunk, request in known:
            if chunk.first == 0:  # SGLang may take a request's memory back and start it again
                request.num_seen, request.tested = 0, []
            if chunk.first != request.num_seen:
                raise TargetError(
                    f"SGLang skipped tokens {request.num_seen} to {chunk.first} of a prompt: its prefix cache is in use"
                )
            request.num_seen += chunk.num_tokens
        statistics = None if head is None else self._statistics(known, final, head)
        kept = [(chunk, request) for chunk, request in known if request.member in (None, EVERY, self.member)]
        if kept:
            rows = [np.arange(chunk.begin, chunk.begin + chunk.num_tokens) for chunk, _ in kept]
            index = torch.from_numpy(np.concatenate(rows)).to(final.device, non_blocking=True)  # [K]
            dtype = getattr(torch, self._place.dtype)
            features = torch.empty(len(index), len(taps), self._place.hidden_size, dtype=dtype, device=final.device)
            for a, tensor in enumerate(taps):
                features[:, a] = tensor.index_select(0, index)
            top1, lse = (None, None) if statistics is None else (v.index_select(0, index) for v in statistics)
            batch = CapturedBatch(
                pieces=[
                    Piece(sample=request.sample, begin=chunk.first, num_rows=chunk.num_tokens)
                    for chunk, request in kept
                ],
                features=features,  # [K, A, H]
                last_hidden=None if last_hidden is None else last_hidden.index_select(0, index).to(dtype),  # [K, H]
                target_top1=top1,
                target_lse=lse,
                input_ids=input_ids.index_select(0, index),
            )
            self._keep(kept, batch)
        for chunk, request in known:
            if request.num_seen == request.sample.num_tokens:
                with self._changed:
                    del self._pending[chunk.rid]

    def _keep(self, kept: Sequence[tuple[Chunk, _Pending]], batch: CapturedBatch) -> None:
        """To the writer; in a self-test to the driver. The driver never mixes the two."""
        if kept[0][1].member is None:
            self._keep_tested(kept, batch)
            return
        if self._pump is None:
            raise TargetError("a sample was captured while no shard writer was open: this is a fault of eyas")
        self._pump.put(batch)
        for chunk, request in kept:
            if request.num_seen == request.sample.num_tokens:
                self._send(Captured(rid=chunk.rid))

    def _keep_tested(self, kept: Sequence[tuple[Chunk, _Pending]], batch: CapturedBatch) -> None:
        import torch

        begin = 0
        for chunk, request in kept:
            rows = slice(begin, begin + chunk.num_tokens)
            begin = rows.stop
            columns = {tap: batch.features[rows, a] for a, tap in enumerate(self._place.taps)}
            if batch.last_hidden is not None and self._place.last_hidden is not None:
                columns[self._place.last_hidden] = batch.last_hidden[rows]
            if batch.target_lse is not None:
                columns["target_lse"] = batch.target_lse[rows]
            request.tested.append(columns)
            if request.num_seen < request.sample.num_tokens:
                continue
            whole = {name: to_array(torch.cat([part[name] for part in request.tested])) for name in columns}
            lse = whole.pop("target_lse", None)
            self._send(Tested(rid=chunk.rid, member=self.member, columns=whole, target_lse=lse))

    def _statistics(
        self, known: Sequence[tuple[Chunk, _Pending]], final: Tensor, head: PartialHead
    ) -> tuple[Tensor, Tensor]:
        """target_top1 int32 [N] and target_lse float32 [N] of a forward's rows, those of all members' requests."""
        import torch

        asked = []
        for chunk, request in known:
            targets = request.sample.loss_mask[chunk.first + 1 : chunk.first + chunk.num_tokens + 1]
            asked.append(chunk.begin + np.flatnonzero(targets))
        top1 = torch.full((len(final),), -1, dtype=torch.int32, device=final.device)
        lse = torch.full((len(final),), float("nan"), dtype=torch.float32, device=final.device)
        places = np.concatenate(asked) if asked else np.empty(0, np.int64)  # [K]
        if len(places):
            index = torch.from_numpy(places.astype(np.int64)).to(final.device)
            own_top1, own_lse = head.top1_and_lse(final.index_select(0, index))
            top1.index_copy_(0, index, own_top1)
            lse.index_copy_(0, index, own_lse)
        return top1, lse

    def _request(self, rid: str) -> _Pending | None:
        """The request ``rid``, as the driver announced it; None where it was dropped."""
        deadline = time.monotonic() + SECONDS_FOR_A_SAMPLE
        with self._changed:
            while rid not in self._pending:
                if rid in self._dropped:
                    return None
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TargetError(f"request {rid} was never announced: this is a fault of eyas")
            return self._pending[rid]

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        """Do what the driver says until it is gone; then end, so that nothing is written that nobody supervises."""
        try:
            while True:
                if self._connection.poll(SECONDS_BETWEEN_REPORTS):
                    self._obey(self._connection.recv())
                self._report()
        except (EOFError, OSError):
            self._leave(abort=True)
            os._exit(1)

    def _obey(self, message: Any) -> None:
        if isinstance(message, Begin):
            with self._changed:
                self._pending[message.rid] = _Pending(sample=message.sample, member=message.member)
                self._changed.notify_all()
        elif isinstance(message, Drop):
            with self._changed:
                self._pending.pop(message.rid, None)
                self._dropped.add(message.rid)
                self._changed.notify_all()
        elif isinstance(message, Start):
            self._guarded(lambda: self._start(message))
        elif isinstance(message, Finish):
            self._guarded(lambda: self._finish(abort=message.abort))
            if not message.abort:  # nobody waits for the end of that
                self._send(Finished())

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except EyasError as error:
            self.fail(error)

    def _report(self) -> None:
        def events() -> None:
            for event in self._pump.events() if self._pump is not None else []:
                self._send(Happened(event=event))

        self._guarded(events)

    def _start(self, message: Start) -> None:
        import torch

        stack = ExitStack()
        writer = stack.enter_context(message.sink.open(message.rank, message.metadata))
        device = self.group.device
        last_hidden = self._place.last_hidden
        self._pump = stack.enter_context(
            Pump(
                writer,
                taps=parse_taps(",".join(self._place.taps)),
                last_hidden=None if last_hidden is None else parse_tap(last_hidden),
                device=torch.device(device),
            )
        )
        self._open = stack

    def _finish(self, *, abort: bool) -> None:
        if self._pump is not None and not abort and not self._failed:
            for event in self._pump.finish():
                self._send(Happened(event=event))
        self._leave(abort=abort or self._failed)

    def _leave(self, *, abort: bool) -> None:
        stack, self._open, self._pump = self._open, None, None
        if stack is None:
            return
        if abort:
            stack.__exit__(GeneratorExit, GeneratorExit(), None)
        else:
            stack.close()
