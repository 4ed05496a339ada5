"""Kill one training run again and again at random moments, and see that it ends in the weights of an unkilled one.

Long run, with a histogram of what the kills hit:

    PYTHONPATH=typings python tests/train/kills.py --kills 50

The suite runs a few kills of it (test_kills.py).
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eyas.train.metrics import read_metrics
from tests.kill import kill_all
from tests.train.tiny_run import assert_same_tensors, last_tensors, make_inputs, train_command

STAGES = (
    "before the first step",
    "a checkpoint was half written or half removed",
    "a line of metrics was torn",
    "between checkpoints",
    "a checkpoint was the newest thing",
)
TIMES = ("seconds", "data_wait", "tokens_per_second")


def kill_once(command: list[str], run: Path, delay_seconds: float) -> str | None:
    """Run ``command``, SIGKILL it and its ranks ``delay_seconds`` after its first step or checkpoint of this start;
    returns the stage that it hit, or None if it had ended by itself."""
    before = _mark(run)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while _mark(run) == before and process.poll() is None:
            time.sleep(0.001)
        time.sleep(delay_seconds)
    finally:
        running = kill_all(process)
    return _stage(run) if running else None


def _mark(run: Path) -> tuple[int, int]:
    """Changes as soon as a start has cut metrics back, made a step or a checkpoint."""
    path = run / "metrics.jsonl"
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return stat.st_size, stat.st_ino


def _stage(run: Path) -> str:
    """What the kill left behind."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    if any(name.startswith(".tmp-") for name in names):
        return STAGES[1]
    content = (run / "metrics.jsonl").read_bytes() if (run / "metrics.jsonl").exists() else b""
    if content and not content.endswith(b"\n"):
        return STAGES[2]
    steps = [record["step"] for record in read_metrics(run)]
    if not steps:
        return STAGES[0]
    newest = max((int(name[5:]) for name in names if name.startswith("step-")), default=0)
    return STAGES[4] if newest == steps[-1] else STAGES[3]


def compare(reference: Path, killed: Path) -> None:
    """Same weights, same optimizer, same metrics but for times. Raises AssertionError."""
    assert_same_tensors(last_tensors(reference), last_tensors(killed))
    ours, theirs = (
        [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(run)]
        for run in (reference, killed)
    )
    assert ours == theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    stages: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_inputs(folder)
        # Few steps between checkpoints, so that every kill falls near one and the run still gets on.
        fixed = ("--epochs", 5 * options.kills, "--save-every", 5, "--validate-every", 20, "--noise", 0.2)
        subprocess.run(train_command(folder, "reference", *fixed), check=True, capture_output=True)
        while stages.total() < options.kills:
            stage = kill_once(train_command(folder, "killed", *fixed), folder / "killed", draw.uniform(0, 0.4))
            if stage is None:
                raise SystemExit(f"the run ended after {stages.total()} kills: give it more epochs")
            stages[stage] += 1
            print(f"{stages.total():4} killed: {stage}", flush=True)
        subprocess.run(train_command(folder, "killed", *fixed), check=True, capture_output=True)
        compare(folder / "reference", folder / "killed")
        steps = read_metrics(folder / "killed")[-1]["step"]
    print(f"{stages.total()} kills; {steps} steps, the same weights, optimizer state and metrics, bit for bit")
    for stage in STAGES:
        print(f"{stages[stage]:5}  {stage}")


if __name__ == "__main__":
    main()
