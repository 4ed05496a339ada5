"""What an engine itself captures: the interface by which ``eyas check --engine-live`` compares it with a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

LIVE_ENGINES = ("vllm", "sglang")


class LiveEngine(Protocol):
    """A serving engine that has loaded a target and a draft's config, and tells what it feeds the draft."""

    @property
    def label(self) -> str:
        """System and version, e.g. ``vllm 0.32.0, model runner V1``."""
        ...

    def captured(self, input_ids: Sequence[int]) -> list[Tensor]:
        """What the engine feeds the draft for ``input_ids`` [T] in one prefill, without prefix caching.

        One tensor [T, H] for each slot of the draft's features, in the engine's order and dtype, on the CPU.
        """
        ...


def open_live(system: str, *, target: str, draft: Path) -> AbstractContextManager[LiveEngine]:
    """Start ``system`` on ``target`` with the draft in the folder ``draft``. Raises UsageError where it cannot."""
    raise UsageError(
        f"--engine-live {system}: this release of eyas runs no serving engine; a later one will. Until then --engine "
        f"{system}@VERSION says what its source does with this draft, and --replay what the data are"
    )
