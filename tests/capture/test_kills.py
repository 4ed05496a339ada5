"""A few kills of one capture; the long run is tests/capture/kills.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.capture.kills import capture_command, compare, kill_once, make_inputs


def test_killed_captures_end_in_the_same_dataset(tmp_path: Path) -> None:
    make_inputs(tmp_path, num_samples=250)
    fixed = ("--batch-tokens", 1)  # every sample a batch of its own: the same numbers, whatever is left to do
    subprocess.run(capture_command(tmp_path, "reference", *fixed), check=True, capture_output=True)
    for options, delay_seconds in (((), 0.02), (("--dp", 2), 0.1), ((), 0.005)):
        stage = kill_once(
            capture_command(tmp_path, "killed", *fixed, *options),
            tmp_path / "killed",
            delay_seconds,
            after_temporary=True,
        )
        assert stage is not None, "the capture ended before it was killed"
    last = subprocess.run(capture_command(tmp_path, "killed", *fixed), check=False, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert compare(tmp_path / "reference", tmp_path / "killed", exact=True)[0] == 250
