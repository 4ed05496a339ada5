"""Runs speculators 0.9.0's trainer with its own command line, and writes down when its optimizer steps ended.

    python benchmarks/speculators_run.py TIMES.json LAST_STEP --speculator-type eagle3 ...

Every tenth step waits for the GPU, so that the times are those of finished work. It ends after LAST_STEP steps, before
any validation; with 0 it runs to its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

SYNCHRONIZED_EVERY = 10


def run(times: Path, last_step: int, arguments: list[str]) -> None:
    ended: list[tuple[int, float]] = []
    steps = 0
    original = trainer.Trainer._optimizers_step

    def step(self: Any) -> None:
        nonlocal steps
        original(self)
        steps += 1
        if steps % SYNCHRONIZED_EVERY == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended.append((steps, time.time()))
        if steps == last_step:
            write()
            os._exit(0)

    def write() -> None:
        times.write_text(json.dumps({"started": started, "ended": time.time(), "steps": ended}))

    trainer.Trainer._optimizers_step = step
    started = time.time()
    main(TrainConfig.resolve(arguments))
    write()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
