"""AdamW and Muon over float32 master weights, the schedule, and gradient clipping. Nothing here waits for the GPU.

Where the model computes in bfloat16, its parameters are working copies: gradients are added to the masters' float32
gradients after each backward pass, and the updated masters are rounded into the copies after each step. Elsewhere the
parameters are the masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eyas.taps.errors import UsageError
from eyas.train.muon import Muon

BETAS = (0.9, 0.95)
EPS = 1e-8
MUON_MOMENTUM = 0.95


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """What an update depends on besides the gradient."""

    optimizer: Literal["adamw", "muon"]
    learning_rate: float  # the highest; Muon's update is scaled to AdamW's size, so that one rate serves both
    schedule: Literal["cosine", "linear", "constant"]
    warmup: float  # share of the run in which the rate rises from 0
    weight_decay: float
    clip: float | None  # norm of the gradient at most; None: not clipped

    def __post_init__(self) -> None:
        if not math.isfinite(self.learning_rate):
            raise UsageError(f"--learning-rate {self.learning_rate}: expected a number")


def learning_rate(options: OptimizerOptions, progress: float) -> float:
    """The rate after ``progress`` (0 to 1) of the run: up in a line, then down to 0 by the schedule."""
    if progress < options.warmup:
        return options.learning_rate * progress / options.warmup
    rest = (progress - options.warmup) / max(1.0 - options.warmup, 1e-12)
    factor = {
        "cosine": 0.5 * (1 + math.cos(math.pi * min(rest, 1.0))),
        "linear": 1.0 - min(rest, 1.0),
        "constant": 1.0,
    }[options.schedule]
    return options.learning_rate * factor


class DraftOptimizer:
    """Updates the trainable parameters of a module. Muon takes the matrices, AdamW the rest."""

    def __init__(self, module: nn.Module, options: OptimizerOptions) -> None:
        self._options = options
        self._working = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: _master(p) for name, p in self._working.items()}
        self._rounded = [name for name, p in self._working.items() if self.masters[name] is not p]
        muon = [n for n, p in self.masters.items() if options.optimizer == "muon" and _is_hidden_matrix(n, p)]
        self._names = {"muon": muon, "adamw": [name for name in self.masters if name not in muon]}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if self._names["adamw"]:
            self._optimizers["adamw"] = torch.optim.AdamW(
                [self.masters[name] for name in self._names["adamw"]],
                betas=BETAS,
                eps=EPS,
                weight_decay=options.weight_decay,
                fused=True,
            )
        if muon:
            self._optimizers["muon"] = Muon(
                [self.masters[name] for name in muon],
                lr=options.learning_rate,
                momentum=MUON_MOMENTUM,
                weight_decay=options.weight_decay,
            )

    def accumulate(self) -> None:
        """Add the working copies' gradients to the masters' and drop them; call it after each backward pass."""
        grads = [grad for name in self._rounded if (grad := self._working[name].grad) is not None]
        if not grads:
            return
        masters = [self.masters[name] for name in self._rounded if self._working[name].grad is not None]
        if masters[0].grad is None:
            for master in masters:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([_grad(master) for master in masters], grads)
        else:
            torch._foreach_add_([_grad(master) for master in masters], grads)
        for name in self._rounded:
            self._working[name].grad = None

    def step(self, rate: float, scale: Tensor) -> Tensor:
        """One update by the gradients times ``scale`` (a scalar on the device); returns their norm before clipping."""
        masters = [master for master in self.masters.values() if master.grad is not None]
        grads = [_grad(master) for master in masters]
        norm = _full(nn.utils.get_total_norm(grads)) * scale
        factor = scale
        if self._options.clip is not None:
            factor = scale * (self._options.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([_local(grad) for grad in grads], factor)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.round()
        return norm

    def round(self) -> None:
        """Round the masters into the working copies."""
        if not self._rounded:
            return
        with torch.no_grad():
            torch._foreach_copy_(
                [self._working[name] for name in self._rounded], [self.masters[name] for name in self._rounded]
            )

    def state(self) -> dict[str, Tensor]:
        """The optimizers' states, whole, on the CPU: ``<kind>.<parameter>``. Every rank of a sharded run calls it."""
        return {
            f"{kind}.{name}": full_tensor(value)
            for which, optimizer in self._optimizers.items()
            for name in self._names[which]
            for kind, value in optimizer.state[self.masters[name]].items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of state(), before the first step."""
        for which, optimizer in self._optimizers.items():
            for name in self._names[which]:
                master = self.masters[name]
                kinds = {key.partition(".")[0] for key in state if key.partition(".")[2] == name}
                optimizer.state[master] = {
                    kind: _like(master, state[f"{kind}.{name}"], is_count=kind == "step") for kind in kinds
                }


def full_tensor(value: Any) -> Tensor:
    """A whole tensor on the CPU, gathered where it is sharded."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.as_tensor(whole).detach().cpu()


def copy_full(target: Tensor, whole: Tensor) -> None:
    """Write the whole tensor ``whole`` into ``target``, into this rank's part where that is sharded."""
    with torch.no_grad():
        target.copy_(_like(target, whole, is_count=False))


def _like(target: Tensor, whole: Tensor, *, is_count: bool) -> Tensor:
    """``whole`` on the device and with the sharding of ``target``. A step count is a plain scalar."""
    if is_count:
        return whole.to(target.device, copy=True)
    whole = whole.to(target.device, target.dtype, copy=True)
    if not hasattr(target, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    return distribute_tensor(whole, target.device_mesh, target.placements)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _full(value: Tensor) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def _local(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local
