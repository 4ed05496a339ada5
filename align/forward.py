"""The target's forward as the replay runs it: hooks of its own on every layer, one sample at a time, nothing batched.

Independent of the capture on purpose: no padding, no batches, no pump, the whole model and not only its text stack. Of
the transformers engine only the loading and the place of the layers are shared, and the latter is proven by a probe.

Shapes: T tokens of one sample, L layers, H hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.transformers.load import load_model, read_outline, text_config
from eyas.capture.engines.transformers.locate import TextStack, first_tensor, hidden_argument, locate
from eyas.capture.engines.transformers.statistics import Head, find_head
from eyas.taps.notation import FINAL, Tap, all_taps

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

_KEPT_BYTES = 1 << 30  # of replayed taps that are kept rather than run again
# Of a device's free memory: float32 weights may take this share, else the checkpoint's own dtype is run.
_FLOAT32_SHARE = 0.4

# Change(module of a decoder layer) -> what undoes it: applied while that layer runs (align/weights.py).
Change = Callable[["Module"], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class LayerPieces:
    """What one decoder layer added to the residual stream, and its other intermediate tensors, float32 [T, H]."""

    into: Tensor  # the residual stream before the layer
    out: Tensor  # and after it
    children: dict[str, Tensor] = field(default_factory=dict)  # child module's name -> its output


class Replayed:
    """A target that gives all taps of a sample; what else it can do is ReplayTarget's."""

    name: str
    outline: TargetOutline

    def __init__(self) -> None:
        self._kept: dict[bytes, Tensor] = {}

    @property
    def num_layers(self) -> int:
        return self.outline.num_layers

    @property
    def hidden_size(self) -> int:
        return self.outline.hidden_size

    @property
    def all_taps(self) -> tuple[Tap, ...]:
        """The L + 2 taps, in the order of every stack that ``taps`` returns."""
        return all_taps(self.num_layers)

    @property
    def has_routers(self) -> bool:
        """Whether this is a mixture of experts: rounding alone may send a token elsewhere there."""
        config = text_config(self.outline.config)
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return any((getattr(config, name, None) or 0) > 1 for name in names)

    @property
    def fp8_activations(self) -> bool:
        """Whether engines run this checkpoint's projections on fp8 inputs, which the replay may not: a rounding of 2 to
        3 % that is none of the states' fault."""
        quantization = getattr(self.outline.config, "quantization_config", None) or {}
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        method = str(quantization.get("quant_method") or "")
        groups = quantization.get("config_groups") or {}
        inputs = any((group or {}).get("input_activations") for group in groups.values())
        return "fp8" in method or inputs or "fp8" in str(quantization.get("quant_algo") or "").lower()

    @property
    def length_changes_states(self) -> bool:
        """Whether a token's states depend on how many tokens follow it: RoPE scalings that pick their factors by the
        length of the sequence. A sample must be replayed whole then."""
        rope = getattr(text_config(self.outline.config), "rope_parameters", None) or {}
        kinds = [rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))]
        return any(kind in ("longrope", "dynamic") for kind in kinds)

    def taps(self, ids: Tensor) -> Tensor:
        """All taps of one sample, int [T] ids -> [L+2, T, H] in the replay's dtype on its device.

        The last ones asked for are kept, up to a gigabyte.
        """
        key = ids.cpu().numpy().tobytes()
        if key not in self._kept:
            self._kept[key] = self.run(ids)
            kept_bytes = sum(stack.nbytes for stack in self._kept.values())
            for old in list(self._kept)[:-1]:
                if kept_bytes <= _KEPT_BYTES:
                    break
                kept_bytes -= self._kept.pop(old).nbytes
        return self._kept[key]

    def run(self, ids: Tensor) -> Tensor:
        """One forward: int [T] ids -> [L+2, T, H]."""
        raise NotImplementedError


class ReplayTarget(Replayed):
    """A loaded target, replayed sample by sample. float32 where that fits the device, else the checkpoint's dtype."""

    def __init__(
        self, target: str, *, revision: str | None = None, trust_remote_code: bool = False, device: str = "auto"
    ) -> None:
        """Load ``target``, a folder or a name on the hub. Raises TargetError."""
        import torch

        super().__init__()
        self.name = target
        self.outline: TargetOutline = read_outline(target, revision=revision, trust_remote_code=trust_remote_code)
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(chosen)
        self.dtype = _replay_dtype(target, self.outline, self.device)
        settings = EngineSettings(
            target=target,
            taps=(FINAL,),
            dtype=self.dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        self.model: Any = load_model(settings, self.outline, device=self.device, quiet=True)
        self.stack: TextStack = locate(self.model, self.outline)

    @cached_property
    def head(self) -> Head:
        """From the final tap to logits."""
        return find_head(self.model, self.stack, self.outline)[0]

    def run(self, ids: Tensor, *, change: Change | None = None, rounding: str | None = None, seed: int = 0) -> Tensor:
        """One forward: int [T] ids -> [L+2, T, H].

        change: applied to each decoder layer before it runs, undone after it. rounding: "bfloat16" or "float16":
        every module's output is rounded to that dtype stochastically, as another kernel would (align/noise.py).
        """
        import torch

        found: list[Tensor | None] = [None] * (self.num_layers + 2)

        def keep(index: int, hidden: Tensor | None) -> None:
            assert hidden is not None
            found[index] = hidden[0].detach().clone()  # [T, H]; a copy, since a model may go on in place

        with ExitStack() as hooks:
            if change is not None:
                for layer in self.stack.layers:
                    _around(hooks, layer, change)
            if rounding is not None:
                _round_outputs(hooks, self.model, self.stack, rounding, seed, self.fp8_activations)
            # Registered last, so that they see what the hooks before made of an output.
            first = self.stack.layers[0]
            _on_input(hooks, first, lambda hidden: keep(0, hidden))
            for j, layer in enumerate(self.stack.layers):
                _on_output(hooks, layer, lambda hidden, index=j + 1: keep(index, hidden))  # type: ignore[misc]
            _on_output(hooks, self.stack.final_norm, lambda hidden: keep(self.num_layers + 1, hidden))
            with torch.inference_mode():
                self.stack.text_model(input_ids=ids.long().to(self.device)[None], use_cache=False)
        assert all(tensor is not None for tensor in found), "a layer did not run"
        return torch.stack([tensor for tensor in found if tensor is not None])

    def pieces(self, ids: Tensor, layers: Sequence[int]) -> dict[int, LayerPieces]:
        """Residual before and after, and the children's outputs, of each of ``layers`` for one sample."""
        import torch

        children: dict[int, dict[str, Tensor]] = {j: {} for j in layers}
        into: dict[int, Tensor] = {}
        out: dict[int, Tensor] = {}
        num_tokens = len(ids)

        def keep_child(j: int, name: str, value: Any) -> None:
            hidden = first_tensor(value)
            if hidden is not None and hidden.numel() == num_tokens * self.hidden_size:
                children[j][name] = hidden.detach().reshape(num_tokens, self.hidden_size).float()

        with ExitStack() as hooks:
            for j in layers:
                layer = self.stack.layers[j]
                _on_input(hooks, layer, lambda hidden, j=j: into.__setitem__(j, hidden[0].float().clone()))  # type: ignore[misc]
                _on_output(hooks, layer, lambda hidden, j=j: out.__setitem__(j, hidden[0].float().clone()))  # type: ignore[misc]
                for name, child in layer.named_children():
                    handle = child.register_forward_hook(
                        lambda module, args, output, j=j, name=name: keep_child(j, name, output)
                    )
                    hooks.callback(handle.remove)
            with torch.inference_mode():
                self.stack.text_model(input_ids=ids.long().to(self.device)[None], use_cache=False)
        return {j: LayerPieces(into=into[j], out=out[j], children=children[j]) for j in layers}

    def calls(self, ids: Tensor, layer: int, child: str) -> Callable[[], Tensor]:
        """Run one sample and return a function that runs child ``child`` of layer ``layer`` again, with the arguments
        it was called with: -> float32 [T, H]. For tests of what a part of its weights would have given."""
        import torch

        module = self.stack.layers[layer].get_submodule(child)
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )
        try:
            with torch.inference_mode():
                self.stack.text_model(input_ids=ids.long().to(self.device)[None], use_cache=False)
        finally:
            handle.remove()
        args, kwargs = seen[0]

        def again() -> Tensor:
            with torch.inference_mode():
                output = first_tensor(module(*args, **kwargs))
            assert output is not None
            return output.reshape(len(ids), self.hidden_size).float()

        return again


def _replay_dtype(target: str, outline: TargetOutline, device: torch.device) -> str:
    import torch

    folder = Path(target)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else None
    if outline.dtype == "float32" or num_bytes is None or getattr(outline.config, "quantization_config", None):
        return outline.dtype
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory_bytes()
    return "float32" if 2 * num_bytes <= _FLOAT32_SHARE * free else outline.dtype


def _free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _on_input(hooks: ExitStack, module: Module, keep: Callable[[Any], None]) -> None:
    def hook(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(hidden_argument(args, kwargs))

    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _on_output(hooks: ExitStack, module: Module, keep: Callable[[Any], None]) -> None:
    hooks.callback(module.register_forward_hook(lambda module, args, output: keep(first_tensor(output))).remove)


def _around(hooks: ExitStack, layer: Module, change: Change) -> None:
    undo: list[Callable[[], None]] = []

    def before(module: Module, args: Any) -> None:
        undo.append(change(module))

    def after(module: Module, args: Any, output: Any) -> None:
        undo.pop()()

    hooks.callback(layer.register_forward_pre_hook(before).remove)
    hooks.callback(layer.register_forward_hook(after).remove)


def _round_outputs(
    hooks: ExitStack, model: Module, stack: TextStack, dtype_name: str, seed: int, fp8_inputs: bool
) -> None:
    """Every module without children, and every decoder layer, gives its output rounded to a random neighbour; with
    fp8_inputs, every projection takes its input in fp8."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    spacing = torch.finfo(dtype).eps  # relative distance of neighbours just above a power of two
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        uniform = torch.rand(
            tensor.shape, generator=generators[tensor.device], device=tensor.device, dtype=torch.float32
        )
        return (tensor.float() * (1 + spacing * (uniform - 0.5))).to(dtype).to(tensor.dtype)

    def hook(module: Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return rounded(output)
        if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
            return rounded(output[0]), *output[1:]
        return None

    layers = {id(layer) for layer in stack.layers}
    for module in model.modules():
        if id(module) in layers or not any(True for _ in module.children()):
            hooks.callback(module.register_forward_hook(hook).remove)
        if fp8_inputs and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            hooks.callback(module.register_forward_pre_hook(_through_fp8).remove)


def _through_fp8(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A projection's input as an engine with fp8 activations gives it: e4m3, one scale per token."""
    import torch

    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    scale = args[0].abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (args[0].float() / scale).to(torch.float8_e4m3fn).float().mul(scale).to(args[0].dtype), *args[1:]


@contextmanager
def masked(parameter: Tensor, mask: Tensor) -> Iterator[None]:
    """``parameter`` with the entries where ``mask`` (broadcastable) is False set to zero, for the time of the block."""
    kept = parameter.data
    parameter.data = kept * mask.to(kept.dtype)
    try:
        yield
    finally:
        parameter.data = kept
