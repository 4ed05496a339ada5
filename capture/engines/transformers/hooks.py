"""Forward hooks that keep the tensors of the asked taps, without padding, and nothing else.

Shapes: B samples padded to T tokens, N real tokens of the samples that are kept, A taps, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.transformers.locate import TextStack, first_tensor, hidden_argument, whole
from eyas.taps.notation import Tap

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class TapHooks:
    """Hooks for ``taps``; while the text model runs they copy each tap's real rows to its place as it appears.

    Copying at once frees the padded tensor, and a later layer may change it in place.
    """

    def __init__(self, stack: TextStack, taps: Sequence[Tap]) -> None:
        self._handles = ExitStack()
        self._rows: Tensor | None = None
        self._targets: dict[Tap, list[Tensor]] = {}
        for tap in dict.fromkeys(taps):
            module, on_input = _tapped_module(stack, tap)
            handle = (
                module.register_forward_pre_hook(self._input_hook(tap), with_kwargs=True)
                if on_input
                else module.register_forward_hook(self._output_hook(tap))
            )
            self._handles.callback(handle.remove)

    def expect(self, rows: Tensor | None, targets: Sequence[tuple[Tap, Tensor]]) -> None:
        """Before a forward: write rows ``rows`` (int64 [N]; None is all of them) of the flattened [B*T, H] tap into
        each of its targets [N, H], which may be strided. The dtype becomes the target's."""
        self._rows = rows
        self._targets = {}
        for tap, target in targets:
            self._targets.setdefault(tap, []).append(target)

    def missing(self) -> list[Tap]:
        """The taps that the last forward did not reach."""
        return list(self._targets)

    def close(self) -> None:
        """Remove the hooks."""
        self._handles.close()

    def _keep(self, tap: Tap, hidden: Tensor | None) -> None:
        targets = self._targets.pop(tap, None)
        if targets is None:  # a forward that nobody expects anything of, e.g. a probe of the whole model
            return
        assert hidden is not None
        flat = whole(hidden).flatten(0, 1)  # [B*T, H]
        kept = flat if self._rows is None else flat.index_select(0, self._rows)  # [N, H]
        for target in targets:
            target.copy_(kept)

    def _input_hook(self, tap: Tap) -> Any:
        def hook(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(tap, hidden_argument(args, kwargs))

        return hook

    def _output_hook(self, tap: Tap) -> Any:
        def hook(module: Module, args: tuple[Any, ...], output: Any) -> None:
            self._keep(tap, first_tensor(output))

        return hook


def _tapped_module(stack: TextStack, tap: Tap) -> tuple[Module, bool]:
    """The module whose input (True) or output (False) is ``tap``."""
    if tap.kind == "embed":
        return stack.layers[0], True
    if tap.kind == "final":
        return stack.final_norm, False
    return stack.layers[tap.layer], False
