"""Run ``eyas ARGUMENTS`` with the fault that EYAS_TEST_FAULT names in the SGLang engine, in SGLang's workers too.

Workers are spawned, and so run this file as a module first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eyas.capture.engines.sglang import hooks, worker
from eyas.cli.main import main


def shift_layers() -> None:
    """SGLang is asked for the layer after each one that is wanted."""
    right = hooks.attach

    def wrong(model: Any, place: Any) -> None:
        right(model, replace(place, aux_ids=tuple(layer_id + 1 for layer_id in place.aux_ids)))

    hooks.attach = wrong


def shift_rows() -> None:
    """Every token is given the taps of the next one."""
    right = worker.Worker.take

    def wrong(self: Any, chunks: Sequence[Any], *, taps: Any, **tensors: Any) -> None:
        right(self, chunks, taps=[tap.roll(-1, 0) for tap in taps], **tensors)

    worker.Worker.take = wrong  # type: ignore[method-assign]


def leave_parts() -> None:
    """The second worker holds a part of each tap, as where an all-reduce is still to come."""
    right = worker.Worker.take

    def wrong(self: Any, chunks: Sequence[Any], *, taps: Any, **tensors: Any) -> None:
        right(self, chunks, taps=[tap * 0.5 for tap in taps] if self.member == 1 else taps, **tensors)

    worker.Worker.take = wrong  # type: ignore[method-assign]


def shift_aux_layers() -> None:
    """SGLang itself: what it gives a draft is taken one layer late."""
    right = hooks.attach

    def wrong(model: Any, place: Any) -> None:
        right(model, place)
        tell = model.set_eagle3_layers_to_capture
        model.set_eagle3_layers_to_capture = lambda ids: tell([layer_id + 1 for layer_id in ids])

    hooks.attach = wrong


FAULTS = {"aux": shift_aux_layers, "layers": shift_layers, "rows": shift_rows, "parts": leave_parts}
FAULTS[os.environ["EYAS_TEST_FAULT"]]()

if __name__ == "__main__":
    main(sys.argv[1:])
