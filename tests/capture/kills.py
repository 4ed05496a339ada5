"""Kill one capture again and again, ranks included, and see that no sample is lost, doubled or wrong.

Long run, with a histogram of the stages that the kills hit:

    PYTHONPATH=typings python tests/capture/kills.py --kills 200

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

from tests.kill import kill_all
from tests.tiny import make_target, tokenized_rows, write_jsonl

BEFORE_TEMPORARY = "before the first temporary shard of the run"
STAGES = (
    BEFORE_TEMPORARY,
    "a temporary shard was open",
    "a shard was renamed, its ledger line missing",
    "a ledger line was torn",
    "shards sealed, none open",
)


def eyas(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]


def capture_command(folder: Path, dataset: str, *options: object) -> list[str]:
    return eyas(
        "capture", folder / "prepared", folder / dataset, "--target", folder / "target",
        "--taps", "embed,after:2,final",
        "--worker", "killed", "--shard-size", "32KiB", *options,
    )  # fmt: skip


def make_inputs(folder: Path, num_samples: int) -> None:
    """A tiny target and ``num_samples`` prepared samples."""
    make_target(folder / "target")
    rows = write_jsonl(folder / "rows.jsonl", tokenized_rows(num_samples))
    prepare = eyas("prepare", rows, folder / "prepared", "--target", folder / "target")
    subprocess.run(prepare, check=True, capture_output=True)


def kill_once(command: list[str], dataset: Path, delay_seconds: float, *, after_temporary: bool) -> str | None:
    """Run ``command``, SIGKILL it and every process under it; returns the stage, or None if it had ended by itself.

    The delay counts from the first change in the shards folder where ``after_temporary``, else from the start.
    """
    shards = dataset / "shards"
    before = _names(shards)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wrote = False
    try:
        while after_temporary and not wrote and process.poll() is None:
            wrote = bool(_names(shards) - before)
            time.sleep(0.001)
        time.sleep(delay_seconds)
    finally:
        running = kill_all(process)
    if not running:
        return None
    return _stage(dataset, before)


def _names(shards: Path) -> set[str]:
    return {entry.name for entry in os.scandir(shards)} if shards.exists() else set()


def _stage(dataset: Path, before: set[str]) -> str:
    """What the kill left behind."""
    now = _names(dataset / "shards")
    if not now - before:
        return BEFORE_TEMPORARY
    ledgers = [path.read_bytes() for path in (dataset / "ledger").glob("*.jsonl")]
    if any(content and not content.endswith(b"\n") for content in ledgers):
        return "a ledger line was torn"
    if any(name.startswith(".tmp-") for name in now):
        return "a temporary shard was open"
    recorded = b"".join(ledgers)
    if any(name.encode() not in recorded for name in now):
        return "a shard was renamed, its ledger line missing"
    return "shards sealed, none open"


def compare(reference: Path, killed: Path, *, exact: bool) -> tuple[int, float]:
    """Every sample of ``reference`` is in ``killed`` exactly once with the same values.

    Returns the number of samples and the largest per-token relative L2 error of the features. Raises AssertionError.
    """
    import torch

    from eyas.shards import open_dataset

    ours, theirs = open_dataset(killed), open_dataset(reference)
    ids = [sample_id for shard in ours.iter_shards() for sample_id in shard.sample_ids]
    expected = [sample_id for shard in theirs.iter_shards() for sample_id in shard.sample_ids]
    assert len(set(ids)) == len(ids), "a sample is doubled"
    assert set(ids) == set(expected), "a sample is lost"
    assert not ours.problems, ours.problems
    worst = 0.0
    for a in theirs.iter_samples():
        b = ours.sample(a.sample_id)
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert a.target_top1 is not None
        assert b.target_top1 is not None
        if exact:
            assert torch.equal(a.features, b.features), a.sample_id
            assert torch.equal(a.target_top1, b.target_top1), a.sample_id
            continue
        error = (a.features - b.features).norm(dim=-1) / a.features.norm(dim=-1)
        worst = max(worst, float(error.max()))
    assert worst < 1e-5, worst
    return len(ids), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--early", type=float, default=0.12, help="share of kills before the first temporary shard")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    stages: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_inputs(folder, options.samples)
        subprocess.run(capture_command(folder, "reference"), check=True, capture_output=True)
        while stages.total() < options.kills:
            groups = draw.choice([(1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
            command = capture_command(
                folder, "killed", "--batch-tokens", draw.choice([64, 256, 1024]), "--tp", groups[0], "--dp", groups[1]
            )
            early = draw.random() < options.early
            delay = draw.uniform(0, 4) if early else draw.uniform(0, 0.15)
            stage = kill_once(command, folder / "killed", delay, after_temporary=not early)
            if stage is None:
                raise SystemExit(f"the capture ended after {stages.total()} kills: give it more --samples")
            stages[stage] += 1
            print(f"{stages.total():4} killed: {stage} (tp {groups[0]}, dp {groups[1]})", flush=True)
        subprocess.run(capture_command(folder, "killed"), check=True)
        num_samples, worst = compare(folder / "reference", folder / "killed", exact=False)
    print(
        f"{stages.total()} kills; {num_samples} samples, none lost, none doubled; worst relative L2 error {worst:.2e}"
    )
    for stage in STAGES:
        print(f"{stages[stage]:5}  {stage}")


if __name__ == "__main__":
    main()
