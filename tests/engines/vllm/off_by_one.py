"""Run ``eyas ARGUMENTS`` with a fault in the vLLM engine: `off_by_one.py layer|row|aux|disk ARGUMENTS`.

Workers of vLLM are spawned: they run this file as a module, with the same arguments.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from eyas.capture.engines.vllm import hooks, worker
from eyas.cli.main import main
from eyas.shards import writer
from eyas.taps.notation import Tap, after


def shift_layers() -> None:
    """Every after:j is taken after layer j - 1."""
    right = hooks.StepHooks._after_layer
    taps: dict[int, Tap] = {}

    def wrong(self: Any, j: int, tap: Tap | None, *, is_last: bool) -> Callable[..., None]:
        wanted = {tap.layer for tap in (*self._wanted.taps, self._wanted.last_hidden) if tap.kind == "after"}
        taps[j] = after(j + 1)
        return right(self, j, taps[j] if j + 1 in wanted else None, is_last=is_last)

    hooks.StepHooks._after_layer = wrong  # type: ignore[method-assign]


def shift_rows() -> None:
    """Every request's rows are taken to begin one row later."""
    right = worker._Capture._schedule

    def wrong(self: Any) -> Any:
        scheduled = right(self)
        if scheduled is None:
            return None
        return [
            hooks.ScheduledPiece(piece=entry.piece, start=entry.start + 1, is_own=entry.is_own)
            for entry in scheduled[:-1]
        ]

    worker._Capture._schedule = wrong  # type: ignore[method-assign]


def shift_aux_layers() -> None:
    """vLLM itself: what it gives a draft is taken one layer late."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    right = SupportsEagle3.set_aux_hidden_state_layers

    def wrong(self: Any, layers: tuple[int, ...]) -> None:
        right(self, tuple(layer + 1 for layer in layers))

    SupportsEagle3.set_aux_hidden_state_layers = wrong


def fill_disk() -> None:
    """No shard can be written."""

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer._write_new = full


{"layer": shift_layers, "row": shift_rows, "aux": shift_aux_layers, "disk": fill_disk}[sys.argv[1]]()

if __name__ == "__main__":
    main(sys.argv[2:])
