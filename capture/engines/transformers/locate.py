"""Finding the decoder layers, the text model and the final norm of a target by what they do, not by their names.

One short forward with hooks on every module tells them apart: the decoder layers are the ModuleList of
``num_hidden_layers`` entries that are called once each, in order, where every entry's output is the next one's input;
the text model is the module that owns them; the final norm is the module that turns the last layer's output into the
text model's last hidden state.

Shapes: T tokens, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.base import TargetOutline
from eyas.capture.errors import TargetError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module, ModuleList

PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class TextStack:
    """The parts of a target that a capture hooks or calls."""

    text_model: Module  # input_ids [B, T] -> last hidden state [B, T, H], without lm_head
    layers: list[Module]  # L decoder layers
    final_norm: Module
    lm_head: Module  # [N, H] -> [N, rows]
    names: dict[str, str] = field(default_factory=dict)  # part -> its name in the target, for messages


def first_tensor(value: Any) -> Tensor | None:
    """The hidden states among a layer's arguments or outputs: the value itself or the first entry of a tuple."""
    import torch

    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return value if isinstance(value, torch.Tensor) else None


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states among the arguments of a call, positional or by name."""
    return first_tensor(args) if args else first_tensor(kwargs.get("hidden_states"))


def last_hidden_state(output: Any) -> Tensor:
    """Of a text model's output, a ModelOutput or a tuple: [B, T, H]."""
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]  # type: ignore[no-any-return]


def locate(model: Any, outline: TargetOutline) -> TextStack:
    """Find the text stack of ``model``. Runs it once on a few tokens.

    Raises TargetError, naming what was found, where there is no such stack or more than one.
    """
    import torch
    from torch.nn import ModuleList

    probe = probe_ids(outline, model.device)  # int64 [1, T]
    shape = (1, probe.shape[1], outline.hidden_size)
    stacks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ModuleList) and len(module) >= outline.num_layers
    }
    calls: list[_Call] = []
    inner = {id(part) for stack in stacks.values() for layer in stack for part in layer.modules() if part is not layer}
    outer = [module for module in model.modules() if id(module) not in inner]
    try:
        with torch.inference_mode(), _recorded(outer, calls):
            model(input_ids=probe, use_cache=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TargetError(f"{type(model).__name__} fails on {probe.shape[1]} tokens of text alone: {error}") from error
    found = {name: why for name, stack in stacks.items() if (why := _why_no_stack(stack, outline, calls, shape))}
    confirmed = [name for name in stacks if name not in found]
    if len(confirmed) != 1:
        raise TargetError(
            f"{type(model).__name__}: expected one list of {outline.num_layers} decoder layers whose hidden states go "
            f"from each to the next as {list(shape)}, found {len(confirmed)}"
            + (f" ({', '.join(confirmed)})" if confirmed else "")
            + "".join(f"; {name or 'the model itself'}: {why}" for name, why in found.items())
        )
    layers_name = confirmed[0]
    layers = list(stacks[layers_name])[: outline.num_layers]
    text_name = layers_name.rpartition(".")[0]
    text_model = model.get_submodule(text_name)
    norm = _final_norm(model, text_model, layers, calls, shape)
    lm_head = model.get_output_embeddings()
    parts = {"text model": text_model, "final norm": norm, "lm_head": lm_head}
    names = {id(module): name for name, module in model.named_modules()}
    return TextStack(
        text_model=text_model,
        layers=layers,
        final_norm=norm,
        lm_head=lm_head,
        names={"decoder layers": layers_name, **{part: names[id(module)] for part, module in parts.items()}},
    )


def probe_ids(outline: TargetOutline, device: torch.device | str) -> Tensor:
    """A few distinct ids: int64 [1, T], T at most PROBE_TOKENS."""
    import torch

    length = min(PROBE_TOKENS, outline.vocab_size, outline.max_positions or PROBE_TOKENS)
    return torch.arange(length, device=device).flip(0).unsqueeze(0)


@dataclass(frozen=True)
class _Call:
    module: Module
    given: Tensor | None
    returned: Tensor | None


@contextmanager
def _recorded(modules: list[Module], calls: list[_Call]) -> Iterator[None]:
    """Append every call of one of ``modules`` to ``calls``, in order of return.

    The tensors are copies: a module may change its argument in place.
    """

    def copied(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else whole(tensor).clone()

    given: dict[int, list[Tensor | None]] = {}

    def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.setdefault(id(module), []).append(copied(hidden_argument(args, kwargs)))

    def after(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        returned = last_hidden_state(output) if hasattr(output, "last_hidden_state") else first_tensor(output)
        calls.append(_Call(module, given[id(module)].pop(), copied(returned)))

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor where a tensor-parallel plan left one in parts (a DTensor, sharded or partial).

    A collective: every rank of the group calls it in step.
    """
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _why_no_stack(
    stack: ModuleList, outline: TargetOutline, calls: list[_Call], shape: tuple[int, int, int]
) -> str | None:
    """Why ``stack`` is not the list of decoder layers; None where it is."""
    entries = {id(module): j for j, module in enumerate(stack)}
    made = [(entries[id(call.module)], call) for call in calls if id(call.module) in entries]
    order = [j for j, _ in made]
    if order != list(range(outline.num_layers)):
        return f"entries were called in the order {order}"
    for j, call in made:
        for what, tensor in (("input", call.given), ("output", call.returned)):
            if tensor is None or tuple(tensor.shape) != shape:
                return f"the {what} of entry {j} is {'no tensor' if tensor is None else list(tensor.shape)}"
    for (j, call), (_, following) in pairwise(made):
        assert call.returned is not None
        assert following.given is not None
        if not _same(call.returned, following.given):
            return f"the output of entry {j} is not the input of entry {j + 1}"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; a NaN equals a NaN, since a broken target is not for here to refuse."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _final_norm(
    model: Module, text_model: Module, layers: list[Module], calls: list[_Call], shape: tuple[int, int, int]
) -> Module:
    last = next(n for n, call in enumerate(calls) if call.module is layers[-1])
    last_output = calls[last].returned
    end = next((n for n, call in enumerate(calls) if call.module is text_model and n > last), None)
    if end is None or (final := calls[end].returned) is None:
        raise TargetError(
            f"{type(model).__name__}: {type(text_model).__name__}, which owns the decoder layers, is not what runs them"
        )
    assert last_output is not None
    candidates = [
        call.module
        for call in calls[last + 1 : end]
        if call.given is not None
        and call.returned is not None
        and tuple(call.returned.shape) == shape
        and _same(call.given, last_output)
        and _same(call.returned, final)
        and list(call.module.parameters())
    ]
    if not candidates:
        after = ", ".join(type(call.module).__name__ for call in calls[last + 1 : end]) or "nothing"
        raise TargetError(
            f"{type(model).__name__}: expected a final norm between the last decoder layer and the text model's last "
            f"hidden state, and found {after} there: eyas cannot capture a target without one"
        )
    # Calls stand in order of return, so the last is the outermost where one norm wraps another.
    return candidates[-1]
