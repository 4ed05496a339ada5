"""A few kills of one training run; the long run is tests/train/kills.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.train.kills import compare, kill_once
from tests.train.tiny_run import train_command


def test_killed_runs_end_in_the_same_weights(inputs: Path) -> None:
    fixed = ("--epochs", 12, "--save-every", 3, "--validate-every", 12, "--noise", 0.2)
    subprocess.run(train_command(inputs, "reference", *fixed), check=True, capture_output=True)
    for delay_seconds in (0.02, 0.2):
        stage = kill_once(train_command(inputs, "killed", *fixed), inputs / "killed", delay_seconds)
        assert stage is not None, "the run ended before it was killed"
    last = subprocess.run(train_command(inputs, "killed", *fixed), check=False, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    compare(inputs / "reference", inputs / "killed")
