"""What an engine itself feeds a draft, for ``eyas check --engine-live``: the interface, and the engines that have it.

Each engine has a module of its name here: ``open_live`` starts it on the target with the draft's config, as serving
would. Its package is imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.capture.engines.base import EngineSettings, TargetOutline
    from eyas.shards.sample import TokenSample
    from eyas.taps.notation import Tap

LIVE_ENGINES = ("vllm", "sglang")


class CannotFeed(EyasError):
    """What the draft's config asks for is nothing that the engine can feed it, by the engine's own reading."""


@dataclass(frozen=True, kw_only=True)
class LiveStates:
    """What one prefill of a sample of T tokens gave, on the CPU, in the engine's dtype."""

    slots: tuple[Tensor, ...]  # what the draft is fed, in the engine's order: [T, H] each
    taps: Mapping[Tap, Tensor]  # every tap of the same forward, by eyas' own hooks: [T, H] each


class LiveEngine(Protocol):
    """A serving engine that has loaded a target and a draft's config, and tells what it feeds the draft."""

    @property
    def label(self) -> str:
        """System and version, e.g. ``vllm 0.32.0, model runner V1``."""
        ...

    @property
    def release(self) -> str:
        """The version alone."""
        ...

    @property
    def path(self) -> str:
        """Which of the engine's code ran and where the tensors were taken, in words."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The longest sample that goes through in one forward."""
        ...

    def states(self, sample: TokenSample) -> LiveStates:
        """What the engine feeds the draft for ``sample`` in one prefill, without prefix caching."""
        ...


def open_live(
    system: str, settings: EngineSettings, outline: TargetOutline, draft: Path
) -> AbstractContextManager[LiveEngine]:
    """Start ``system`` on ``settings.target`` with the draft in the folder ``draft``. ``settings.taps``: all of them.

    Raises TargetError where it is not installed or does not start, UsageError for options that it refuses.
    """
    module: Any = import_module(f"{__name__}.{system}")
    opened: AbstractContextManager[LiveEngine] = module.open_live(settings, outline, draft)
    return opened
