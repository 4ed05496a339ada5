"""Key-value caches for generation with a transformers target.

Shapes: B samples, T cached tokens, K key-value heads, d head_dim.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from eyas.capture.errors import TargetError

if TYPE_CHECKING:
    from torch import Tensor

SPARE_TOKENS = 64  # a full buffer grows by a quarter, and by this at least


def new_cache(model: Any, *, croppable: bool = False) -> Any:
    """An empty cache of ``model``. Layers of plain full attention append in place instead of copying all they hold.

    croppable: layers of sliding attention keep everything too (their masks hide what has left the window), so that the
    last tokens can be taken back. Raises TargetError where a layer's state cannot be: recurrent ones.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    made = DynamicCache(config=model.config.get_text_config(decoder=True))
    growing = (DynamicLayer, DynamicSlidingWindowLayer) if croppable else (DynamicLayer,)
    made.layers = [_growing_layer()() if type(layer) in growing else layer for layer in made.layers]
    if croppable and (others := {type(layer).__name__ for layer in made.layers if not isinstance(layer, DynamicLayer)}):
        raise TargetError(
            f"{type(model).__name__} caches {', '.join(sorted(others))}, from which tokens cannot be taken back: "
            "expected attention alone"
        )
    return made


def cache_argument(model: Any) -> str:
    """What ``model``'s forward calls its cache: transformers 5.2x renamed ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@cache
def _growing_layer() -> Any:
    """The layer's class, made where transformers is imported at last."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[misc]
        """A DynamicLayer whose ``keys`` and ``values`` [B, K, T, d] are views of buffers with room behind them."""

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self._key_buffer, self._value_buffer = self.keys, self.values

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._key_buffer, self.keys = _append(self._key_buffer, self.keys, key_states)
            self._value_buffer, self.values = _append(self._value_buffer, self.values, value_states)
            return self.keys, self.values

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.is_initialized:
                self.keys, self.values = self.keys[indices], self.values[indices]
                self._key_buffer, self._value_buffer = self.keys, self.values

    return GrowingLayer


def _append(buffer: Tensor, held: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """(buffer, its used part) with ``added`` [B, K, t, d] behind what is held [B, K, T, d]."""
    num_held, num_tokens = held.shape[-2], held.shape[-2] + added.shape[-2]
    if num_tokens > buffer.shape[-2]:
        *outer, _, width = added.shape
        buffer = added.new_empty(*outer, num_tokens + max(SPARE_TOKENS, num_tokens // 4), width)
        buffer[..., :num_held, :] = held
    buffer[..., num_held:num_tokens, :] = added
    return buffer, buffer[..., :num_tokens, :]
