"""Forward hooks inside vLLM's worker that keep the tensors of the asked taps, and hand them to the pump.

vLLM's decoder layers give (hidden states, residual) and leave the sum to the next norm, which then changes both in
place: the hook adds them at once, into its own memory. A few models give a sum and something else; which it is, is
learned on the first forward, from which of the two the final norm turns into what the model gives.

Which rows of a forward belong to which request is the model runner's input batch; the token ids of every row are kept
too, and the pump compares them with the sample's.

Shapes: M rows of a forward (all requests, then padding), N of them kept, A taps, H hidden_size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.transformers.locate import first_tensor
from eyas.capture.engines.vllm.locate import ModelStack
from eyas.capture.engines.vllm.statistics import Head, head_of_call, predicting_rows
from eyas.capture.errors import TargetError
from eyas.capture.pump import CapturedBatch, Piece
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is taken from every forward."""

    taps: tuple[Tap, ...]
    last_hidden: Tap | None
    target_statistics: bool
    dtype: torch.dtype
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class ScheduledPiece:
    """A piece of a sample in the forward that comes."""

    piece: Piece
    start: int  # its first row in the forward
    is_own: bool  # whether this worker writes the sample


@dataclass(kw_only=True)
class _Step:
    """One forward."""

    pieces: list[ScheduledPiece]
    rows: Tensor | None  # int64 [N] of the forward's; None: the first num_rows of them
    num_rows: int  # N
    features: Tensor  # [N, A, H]
    last_hidden: Tensor | None  # [N, H]
    targets: dict[Tap, list[Tensor]]
    input_ids: Tensor | None  # [N]
    layers_run: int = 0

    def kept(self, hidden: Tensor) -> Tensor:
        """The kept rows of ``hidden`` [M, ...]."""
        return hidden[: self.num_rows] if self.rows is None else hidden.index_select(0, self.rows)


@dataclass(kw_only=True)
class Learned:
    """What the first forward showed about the model."""

    adds_residual: bool = True  # the sum of a layer's two outputs is the residual stream
    # Of the final norm of after:{L-1}, to what the model gives: median over rows of relative L2. NaN: there is none.
    final_error: float = float("nan")
    head: Head | None = None
    head_error: str = ""
    last_output: Any = field(default=None, repr=False)


class StepHooks:
    """Hooks on a model of vLLM.

    ``schedule`` gives the pieces of the forward that comes, in the order of their rows, or None where it is of no
    interest (a dummy run, or nobody captures). ``take`` is given what was captured.
    """

    def __init__(
        self,
        stack: ModelStack,
        wanted: Wanted,
        *,
        schedule: Callable[[], list[ScheduledPiece] | None],
        take: Callable[[CapturedBatch], None],
    ) -> None:
        self._stack = stack
        self._wanted = wanted
        self._schedule = schedule
        self._take = take
        self._step: _Step | None = None
        self._learning = False
        self.learned = Learned()
        self._handles = ExitStack()
        self._install()

    def learn(self) -> None:
        """Learn from the next forward; nothing is captured of it."""
        self._learning = True

    def close(self) -> None:
        """Remove the hooks."""
        self._handles.close()

    def _install(self) -> None:
        stack, wanted = self._stack, self._wanted
        tapped = {*wanted.taps, *([] if wanted.last_hidden is None else [wanted.last_hidden])}
        first, last = stack.layers[0], len(stack.layers) - 1
        handles = [
            stack.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            stack.model.register_forward_hook(self._after_model),
            first.register_forward_pre_hook(self._before_first_layer, with_kwargs=True),
        ]
        after = {tap.layer: tap for tap in tapped if tap.kind == "after"}
        for j, layer in enumerate(stack.layers):
            handles.append(layer.register_forward_hook(self._after_layer(j, after.get(j), is_last=j == last)))
        if stack.logits_processor is not None:
            handles.append(stack.logits_processor.register_forward_pre_hook(self._before_logits, with_kwargs=True))
        for handle in handles:
            self._handles.callback(handle.remove)

    def _before_model(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step = None
        scheduled = None if self._learning else self._schedule()
        if not scheduled:
            return
        named = _named_arguments(module, args, kwargs)
        self._step = self._new_step(scheduled, named)

    def _new_step(self, scheduled: list[ScheduledPiece], named: Mapping[str, Any]) -> _Step:
        import torch

        wanted = self._wanted
        positions: Tensor = named["positions"]  # [M], or [3, M] with several kinds of positions
        own = [entry for entry in scheduled if entry.is_own]
        num_rows = sum(entry.piece.num_rows for entry in own)
        device = positions.device
        rows = None
        if len(own) < len(scheduled) or [entry.start for entry in own] != _starts([entry.piece for entry in own]):
            index = [np.arange(entry.start, entry.start + entry.piece.num_rows) for entry in own]
            rows = _to_device(np.concatenate(index) if index else np.empty(0, np.int64), device)
        wide: dict[str, Any] = {"dtype": wanted.dtype, "device": device}
        features = torch.empty(num_rows, len(wanted.taps), wanted.hidden_size, **wide)  # [N, A, H]
        targets: dict[Tap, list[Tensor]] = {}
        for a, tap in enumerate(wanted.taps):
            targets.setdefault(tap, []).append(features[:, a])
        last_hidden = None
        if wanted.last_hidden is not None:
            last_hidden = torch.empty(num_rows, wanted.hidden_size, **wide)  # [N, H]
            targets.setdefault(wanted.last_hidden, []).append(last_hidden)
        step = _Step(
            pieces=scheduled,
            rows=rows,
            num_rows=num_rows,
            features=features,
            last_hidden=last_hidden,
            targets=targets,
            input_ids=None,
        )
        if (input_ids := named.get("input_ids")) is not None:
            # Copied: the runner's buffer is filled anew while this forward's rows are on their way.
            step.input_ids = step.kept(input_ids).clone()
        return step

    def _before_first_layer(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from eyas.taps.notation import EMBED

        if self._step is not None and EMBED in self._step.targets:
            named = _named_arguments(module, args, kwargs)
            self._keep(self._step, EMBED, (named["hidden_states"], named.get("residual")))

    def _after_layer(self, j: int, tap: Tap | None, *, is_last: bool) -> Callable[..., None]:
        def hook(module: Module, args: tuple[Any, ...], output: Any) -> None:
            if self._learning and is_last:
                self.learned.last_output = _copied(output)
            step = self._step
            if step is None:
                return
            if step.layers_run != j:
                raise TargetError(f"vLLM ran decoder layer {j} after {step.layers_run} others: expected each in order")
            step.layers_run += 1
            if tap is not None:
                self._keep(step, tap, output)

        return hook

    def _keep(self, step: _Step, tap: Tap, output: Any) -> None:
        """Write the kept rows of ``output`` (a tensor, or hidden states and residual) to the tap's places."""
        import torch

        hidden, residual = _pair(output)
        if residual is not None and self.learned.adds_residual:
            for target in step.targets[tap]:
                torch.add(step.kept(hidden), step.kept(residual), out=target)
        else:
            for target in step.targets[tap]:
                target.copy_(step.kept(hidden))

    def _after_model(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        from eyas.taps.notation import FINAL

        final = first_tensor(output)  # [M, H]
        if final is None:
            raise TargetError(f"vLLM's {type(module).__name__} gives no hidden states")
        if self._learning:
            if self.learned.last_output is not None:
                self._learn_residual(final)
            return
        step, self._step = self._step, None
        if step is None:
            return
        if step.layers_run != len(self._stack.layers):
            raise TargetError(f"a forward ran {step.layers_run} of {len(self._stack.layers)} decoder layers")
        for target in step.targets.get(FINAL, ()):
            target.copy_(step.kept(final))
        top1 = lse = None
        if self._wanted.target_statistics:
            top1, lse = self._target_statistics(step, final)
        if step.num_rows:
            self._take(
                CapturedBatch(
                    pieces=[entry.piece for entry in step.pieces if entry.is_own],
                    features=step.features,
                    last_hidden=step.last_hidden,
                    target_top1=top1,
                    target_lse=lse,
                    input_ids=step.input_ids,
                )
            )

    def _target_statistics(self, step: _Step, final: Tensor) -> tuple[Tensor, Tensor]:
        """target_top1 int32 [N] and target_lse float32 [N]. A collective: all workers take part for all rows."""
        import torch

        head = self.learned.head
        if head is None:
            raise TargetError("target statistics: no forward has shown how this model makes logits")
        top1 = torch.full((step.num_rows,), -1, dtype=torch.int32, device=final.device)
        lse = torch.full((step.num_rows,), float("nan"), dtype=torch.float32, device=final.device)
        asked = predicting_rows([entry.piece for entry in step.pieces], [entry.start for entry in step.pieces])  # [K]
        if not len(asked):
            return top1, lse
        all_top1, all_lse = head.top1_and_lse(final.index_select(0, _to_device(asked, final.device)))
        # Place each asked row has among the kept ones, -1 where another worker keeps it.
        place = np.full(step.pieces[-1].start + step.pieces[-1].piece.num_rows, -1, dtype=np.int64)
        begin = 0
        for entry in step.pieces:
            if entry.is_own:
                num_rows = entry.piece.num_rows
                place[entry.start : entry.start + num_rows] = np.arange(begin, begin + num_rows)
                begin += num_rows
        places = place[asked]
        own = np.flatnonzero(places >= 0)
        if len(own):
            sources, targets = _to_device(own, final.device), _to_device(places[own], final.device)
            top1.index_copy_(0, targets, all_top1.index_select(0, sources))
            lse.index_copy_(0, targets, all_lse.index_select(0, sources))
        return top1, lse

    def _before_logits(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.learned.head is not None or self.learned.head_error:
            return
        try:
            self.learned.head = head_of_call(module, args, kwargs)
        except TargetError as error:
            self.learned.head_error = str(error)

    def _learn_residual(self, final: Tensor) -> None:
        """Which reading of the last layer's output the final norm turns into ``final``."""
        learned, norm = self.learned, self._stack.final_norm
        self._learning = False
        output, learned.last_output = learned.last_output, None
        if norm is None:
            return
        hidden, residual = _pair(output)
        readings = {True: hidden if residual is None else hidden + residual}
        if residual is not None:
            readings[False] = hidden
        errors = {}
        for adds, stream in readings.items():
            normed = first_tensor(norm(stream.clone()))
            assert normed is not None
            distance = (normed.float() - final.float()).norm(dim=-1) / final.float().norm(dim=-1)  # [M]
            errors[adds] = float(distance.nanmedian())
        learned.adds_residual = min(errors, key=lambda adds: errors[adds] if errors[adds] == errors[adds] else 9e9)
        learned.final_error = errors[learned.adds_residual]


def _pair(output: Any) -> tuple[Tensor, Tensor | None]:
    """Hidden states and residual, of a layer's output or arguments."""
    import torch

    hidden = first_tensor(output)
    if hidden is None:
        raise TargetError("a decoder layer of vLLM gives no hidden states")
    second = output[1] if isinstance(output, (tuple, list)) and len(output) > 1 else None
    return hidden, second if isinstance(second, torch.Tensor) and second.shape == hidden.shape else None


def _copied(output: Any) -> Any:
    hidden, residual = _pair(output)
    return hidden.clone(), None if residual is None else residual.clone()


def _named_arguments(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def _starts(pieces: Sequence[Piece]) -> list[int]:
    """Where each of ``pieces`` begins when they stand back to back."""
    return [int(start) for start in np.cumsum([0, *(piece.num_rows for piece in pieces)])[:-1]]


def _to_device(array: Any, device: torch.device) -> Tensor:
    """A NumPy array as a tensor on ``device``, without waiting for the device."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
