"""Finding the decoder layers, the final norm and the logits' layer in a model that vLLM has built.

vLLM's models keep transformers' shape: the language model holds one ModuleList of ``num_hidden_layers`` decoder layers,
and beside it, in the same module, the final norm. That each layer runs once, in order, is checked by every forward
(hooks.py), that they are the target's layers by the self-test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.capture.errors import TargetError

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True)
class ModelStack:
    """The parts of a vLLM model that a capture hooks or calls."""

    model: Module  # what the model runner calls; gives final [N, H]
    layers: list[Module]  # L decoder layers
    final_norm: Module | None  # None: nothing beside the layers looks like one
    logits_processor: Module | None  # vLLM's LogitsProcessor: called with (lm_head, hidden states, bias)


def locate(model: Any, num_layers: int) -> ModelStack:
    """Find the parts of ``model``, the model runner's. Raises TargetError, naming what was found."""
    from torch.nn import ModuleList
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    named = dict(language.named_modules())
    lists = {name: module for name, module in named.items() if isinstance(module, ModuleList)}
    fitting = [name for name, module in lists.items() if len(module) == num_layers]
    # Experts and the like are lists inside a layer.
    outer = [name for name in fitting if not any(name.startswith(f"{other}.") for other in lists if other != name)]
    if len(outer) != 1:
        found = ", ".join(f"{name} ({len(module)})" for name, module in lists.items()) or "none"
        raise TargetError(
            f"vLLM's {type(model).__name__}: expected one list of {num_layers} decoder layers, found {found}"
        )
    owner = named[outer[0].rpartition(".")[0]]
    norms = [child for child in owner.children() if "norm" in type(child).__name__.lower()]
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return ModelStack(
        model=model,
        layers=list(lists[outer[0]]),
        final_norm=norms[-1] if norms else None,
        logits_processor=processors[0] if len(processors) == 1 else None,
    )
