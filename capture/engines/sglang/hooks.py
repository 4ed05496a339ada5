"""Hooks on SGLang's model, in its worker process: which tensor is which tap, and whose rows are whose.

SGLang keeps the residual apart from the hidden states, may leave a layer's all-reduce to the next layer's norm, and
moves rows between ranks under some layouts, so a layer's output is not ``after:j``. Its own EAGLE-3 capture
(``set_eagle3_layers_to_capture``) takes each of these into account, model by model, and is what a draft is fed when
it is served: ``after:j`` comes from there. What it has no id for is taken where it is whole:

    embed         the input of layer 0
    after:{L-1}   the second output of the final norm, which adds the residual before it normalizes
    final         what the model gives its logits processor

Where that capture is itself what is looked at (the live check), its layer ids must not decide which tensor is which
tap. ``after:j`` is then what layer ``j+1`` captures before it runs, as it would if SGLang's model had asked it to; in
models whose layers cannot be asked, the sum of what layer ``j`` gives.

All are gathered in one place, a hook on the logits processor, which is given ``final``, the captured tensors and the
batch: ``extend_seq_lens_cpu`` rows of request ``rids[n]`` back to back, from its token ``extend_prefix_lens_cpu[n]``
on, then padding.

Shapes: N rows of a forward, H hidden_size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.sglang.link import RID_PREFIX, Place
from eyas.capture.engines.sglang.statistics import PartialHead
from eyas.capture.engines.sglang.worker import Chunk, Worker
from eyas.capture.errors import TargetError
from eyas.taps.errors import EyasError
from eyas.taps.notation import EMBED, FINAL, Tap, after, parse_tap

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def attach(model: Any, place: Place) -> None:
    """Make ``model`` (an SGLang model that is built, its weights not loaded yet) capture what ``place`` says."""
    worker = Worker(place)
    try:
        _Hooks(model, place, worker)
    except EyasError as error:
        worker.fail(error)
        raise


class _Hooks:
    """Lives as long as the model, in its hooks."""

    def __init__(self, model: Any, place: Place, worker: Worker) -> None:
        self._place = place
        self._worker = worker
        self._last = after(place.num_layers - 1)
        self._wanted = [parse_tap(tap) for tap in place.taps]
        if place.last_hidden is not None:
            self._wanted.append(parse_tap(place.last_hidden))
        self._seen: dict[int, tuple[Any, Any]] = {}  # module's id -> its first argument and its output
        self._embed: Tensor | None = None
        self._between: dict[Tap, Tensor] = {}
        self._head: PartialHead | None = None

        processor = _logits_processor(model)
        self._arguments = inspect.signature(type(processor).forward)
        owner, layers = _layers(model, place.num_layers)
        if place.aux_ids:
            setter = getattr(model, "set_eagle3_layers_to_capture", None)
            if setter is None:
                raise TargetError(
                    f"SGLang's {type(model).__name__} has no set_eagle3_layers_to_capture, so it cannot give "
                    f"{', '.join(place.aux_taps)}: capture with --engine transformers or vllm"
                )
            setter(list(place.aux_ids))
        if place.from_layers:
            for j in range(place.num_layers - 1):
                self._capture_between(after(j), layers[j], layers[j + 1])
        if EMBED in self._wanted:
            layers[0].register_forward_pre_hook(self._keep_embed, with_kwargs=True)
        if self._last in self._wanted:
            for child in owner.children():
                if child is not layers:
                    child.register_forward_hook(self._keep_output)
        processor.register_forward_hook(self._on_logits, with_kwargs=True)
        worker.join(
            logit_scale=float(getattr(processor, "logit_scale", None) or 1.0),
            logit_softcap=getattr(processor, "final_logit_softcapping", None),
        )

    def _keep_embed(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The residual add of the layer's own norm writes into it: copied before the layer runs.
        self._embed = _first_rows([*args, *kwargs.values()], self._place.hidden_size).clone()

    def _capture_between(self, tap: Tap, layer: Module, following: Module) -> None:
        def keep(hidden: Tensor) -> None:
            self._between[tap] = hidden.clone()

        # SGLang 0.5.23: a callable (models/llama.py and others), or a collector (models/qwen2_moe.py, deepseek_v2.py).
        for name in ("capture_output", "captured_last_layer_outputs"):
            if name in inspect.signature(following.forward).parameters:

                def ask(
                    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
                ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                    asked = kwargs.get(name)
                    both = _Both(keep, asked if name == "capture_output" else getattr(asked, "capture", None))
                    return args, {**kwargs, name: both}

                following.register_forward_pre_hook(ask, with_kwargs=True)
                return

        def add(module: Module, args: tuple[Any, ...], output: Any) -> None:
            hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
            keep(hidden if residual is None else hidden + residual)

        layer.register_forward_hook(add)

    def _keep_output(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        self._seen[id(module)] = (args[0] if args else None, output)

    def _on_logits(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            self._capture(module, self._arguments.bind(module, *args, **kwargs).arguments)
        except EyasError as error:
            self._worker.fail(error)
        finally:
            self._seen, self._embed, self._between = {}, None, {}

    def _capture(self, module: Module, given: dict[str, Any]) -> None:
        batch, final = given["logits_metadata"], given["hidden_states"]
        rids = getattr(batch, "rids", None)
        if rids is None or not any(str(rid).startswith(RID_PREFIX) for rid in rids):
            return  # a warmup of SGLang's
        if not batch.forward_mode.is_extend():
            return  # the next token of a request that has its rows already
        chunks = []
        begin = 0
        lengths, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        for rid, length, prefix in zip(rids, lengths, prefixes, strict=True):
            if rid.startswith(RID_PREFIX):
                chunks.append(Chunk(rid=rid, begin=begin, first=int(prefix), num_tokens=int(length)))
            begin += int(length)
        tensors = self._tensors(final, given.get("aux_hidden_states"), begin)
        head = None
        if self._place.target_statistics:
            if self._head is None:
                self._head = PartialHead(module, given["lm_head"], self._place.vocab_size, self._worker.group)
            head = self._head
        last_hidden = tensors.pop() if self._place.last_hidden is not None else None
        self._worker.take(
            chunks, input_ids=batch.input_ids, taps=tensors, last_hidden=last_hidden, final=final, head=head
        )

    def _tensors(self, final: Tensor, aux: Any, num_rows: int) -> list[Tensor]:
        """The wanted taps of this forward, each [N or more, H]. Raises TargetError where one is not whole."""
        import torch

        width = self._place.hidden_size
        parts: Sequence[Tensor] = [] if aux is None or self._place.from_layers else list(aux)
        if isinstance(aux, torch.Tensor) and not self._place.from_layers:  # one packed [N, A*H]
            parts = aux.split(width, dim=-1)  # type: ignore[no-untyped-call]
        if len(parts) != len(self._place.aux_taps):
            raise TargetError(
                f"SGLang captured {len(parts)} tensors for the ids {list(self._place.aux_ids)}, expected "
                f"{len(self._place.aux_taps)}: this model reads them in another way than eyas knows"
            )
        have: dict[Tap, Tensor | None] = {
            parse_tap(tap): part for tap, part in zip(self._place.aux_taps, parts, strict=True)
        }
        have |= self._between
        have[FINAL] = final
        have[EMBED] = self._embed
        if self._last in self._wanted:
            have[self._last] = self._before_final_norm(final)
        found = []
        for tap in self._wanted:
            tensor = have[tap]
            if tensor is None or tensor.dim() != 2 or tensor.shape[1] != width or len(tensor) < num_rows:
                shape = "nothing" if tensor is None else f"{list(tensor.shape)}"
                raise TargetError(
                    f"{tap} is {shape} on rank {self._worker.member} of a forward of {num_rows} tokens: with these "
                    f"SGLang options it is spread over ranks, or added up in a fused kernel; expected [{num_rows}, "
                    f"{width}]"
                )
            found.append(tensor)
        return found

    def _before_final_norm(self, final: Tensor) -> Tensor | None:
        """What the module that gave ``final`` normalized: its residual output, or its input where it has none."""
        for given, output in self._seen.values():
            first = output[0] if isinstance(output, tuple) else output
            if first is final or getattr(first, "data_ptr", int)() == final.data_ptr():
                return output[1] if isinstance(output, tuple) else given  # type: ignore[no-any-return]
        return None


class _Both:
    """What a layer of SGLang hands a captured tensor to: our own, and who had asked for it, if anybody had."""

    def __init__(self, keep: Callable[[Tensor], None], asked: Callable[..., None] | None) -> None:
        self._keep = keep
        self._asked = asked

    def __call__(self, hidden: Tensor, **how: Any) -> None:
        self._keep(hidden)
        if self._asked is not None:
            self._asked(hidden, **how)

    capture = __call__


def _logits_processor(model: Any) -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1:
        raise TargetError(
            f"SGLang's {type(model).__name__} has {len(found)} logits processors, expected one: capture with --engine "
            f"transformers or vllm"
        )
    return found[0]


def _layers(model: Any, num_layers: int) -> tuple[Any, Any]:
    """The module that owns the decoder layers, and the list of them."""
    from torch.nn import ModuleList

    found = [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, ModuleList) and len(child) == num_layers and len(list(owner.children())) > 1
    ]
    # A multimodal target's towers may have as many layers: its language model comes with the final norm of the width.
    if len(found) > 1:
        found = [(owner, child) for owner, child in found if hasattr(owner, "embed_tokens")]
    if len(found) != 1:
        raise TargetError(
            f"SGLang's {type(model).__name__} has {len(found)} lists of {num_layers} decoder layers, expected one"
        )
    return found[0]


def _first_rows(values: Sequence[Any], width: int) -> Any:
    """The first tensor [N, width] among ``values``."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == width:
            return value
    raise TargetError(f"the first decoder layer is given no [N, {width}] tensor")
