"""`eyas status` from outside: what it prints, from ledgers alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from eyas.cli.main import main
from eyas.shards.identity import create_or_match
from eyas.shards.ledger import SealedShard, WorkerLedger, lock_dataset
from eyas.shards.rejects import append_reject
from tests.captured import captured_identity, hashes, make_samples, write_captured


def status(dataset: Path) -> dict:
    result = CliRunner().invoke(main, ["status", str(dataset), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def sealed(dataset: Path, worker: str, ago: list[float], *, samples_each: int = 2, seconds: float = 10) -> None:
    """Ledger lines of shards sealed so many seconds ago, with files of the right size and no content."""
    with WorkerLedger(dataset, worker) as ledger:
        for n, since in enumerate(ago):
            name = f"{worker}-{n:06d}.safetensors"
            (dataset / "shards" / name).write_bytes(bytes(1000))
            ids = tuple(f"{hash((worker, n, i)) & (1 << 64) - 1:016x}" for i in range(samples_each))
            ledger.append(
                SealedShard(
                    shard=name,
                    num_bytes=1000,
                    xxh3="0" * 16,
                    num_tokens=100,
                    num_trained_tokens=40,
                    sample_ids=ids,
                    statistics={},
                    seconds=seconds,
                    sealed_at=time.time() - since,
                )
            )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    create_or_match(tmp_path / "captured", captured_identity(num_samples=100))
    return tmp_path / "captured"


def test_before_the_first_shard(dataset) -> None:
    body = status(dataset)
    assert (body["num_samples"], body["num_left"], body["num_rejected"]) == (0, 100, 0)
    assert body["samples_per_second"] is None
    assert body["seconds_left"] is None


def test_the_rate_is_that_of_live_workers(dataset) -> None:
    sealed(dataset, "a-0", [20, 10, 0])  # 6 samples in 30 s
    sealed(dataset, "b-0", [20, 10, 0])
    sealed(dataset, "old-0", [9000, 8990])  # ended hours ago
    body = status(dataset)
    assert body["num_samples"] == 16
    assert body["num_left"] == 84
    assert body["samples_per_second"] == pytest.approx(0.4, rel=0.02)
    assert body["tokens_per_second"] == pytest.approx(20, rel=0.02)
    assert body["seconds_left"] == pytest.approx(84 / 0.4, rel=0.02)
    assert [worker["live"] for worker in body["workers"]] == [True, True, False]


def test_a_dataset_that_no_run_holds_is_not_live(dataset) -> None:
    sealed(dataset, "a-0", [20, 10, 0])
    with lock_dataset(dataset):
        assert status(dataset)["workers"][0]["live"]
    body = status(dataset)
    assert (body["workers"][0]["live"], body["samples_per_second"], body["seconds_left"]) == (False, None, None)


def test_a_dataset_whose_run_was_killed_is_not_live(dataset) -> None:
    sealed(dataset, "a-0", [20, 10, 0])
    killed = "import os, sys; from pathlib import Path; from eyas.shards.ledger import lock_dataset\n"
    killed += "with lock_dataset(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(dataset)], check=False)
    assert status(dataset)["is_at_rest"]
    result = CliRunner().invoke(main, ["status", str(dataset)])
    assert "none: no run holds it" in result.output
    assert "a-0: idle" in result.output


def test_time_in_which_a_worker_was_down_is_not_counted(dataset) -> None:
    sealed(dataset, "a-0", [1200, 10, 0])
    assert status(dataset)["samples_per_second"] == pytest.approx(4 / 20, rel=0.02)


def test_rejects_and_problems(dataset) -> None:
    sealed(dataset, "a-0", [3000])
    append_reject(dataset, "a-0", "ab" * 8, "NaN in after:1")
    append_reject(dataset, "a-0", "cd" * 8, "NaN in after:1")
    (dataset / "shards/.tmp-left").touch()
    (dataset / "shards/a-0-000000.safetensors").unlink()
    body = status(dataset)
    assert (body["num_samples"], body["num_rejected"], body["num_left"]) == (0, 2, 98)
    assert {problem["kind"] for problem in body["problems"]} == {"leftover temporary", "line without shard"}
    result = CliRunner().invoke(main, ["status", str(dataset)])
    assert "2 x NaN in after:1" in result.stdout
    assert "shards/a-0-000000.safetensors: line without shard" in result.stdout
    assert result.exit_code == 0


def test_what_a_live_worker_is_writing_is_no_problem(dataset) -> None:
    sealed(dataset, "a-0", [1])
    (dataset / "shards/.tmp-a-0-000001.safetensors").touch()
    assert status(dataset)["problems"] == []


def test_text_of_a_finished_dataset_and_nothing_is_changed(tmp_path) -> None:
    identity = replace(captured_identity(num_samples=5), stage="standard")
    dataset = write_captured(tmp_path / "standard", identity, make_samples(identity, 5))
    before = hashes(dataset)
    result = CliRunner().invoke(main, ["status", str(dataset)])
    assert result.exit_code == 0
    assert "standard, finished, taps" in result.stdout
    assert ": finished, last sealed " in result.stdout
    assert "live" not in result.stdout
    assert not any(worker["live"] for worker in status(dataset)["workers"])
    assert "done      5 of 5 samples (100.0 %)" in result.stdout
    assert "left      0 samples" in result.stdout
    assert "time left 0s" in result.stdout
    assert "problems  0" in result.stdout
    assert hashes(dataset) == before


def test_no_dataset(tmp_path) -> None:
    result = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert result.exit_code == 1
    assert "no eyas dataset" in result.stderr


def test_neither_torch_nor_a_shard_is_opened(dataset) -> None:
    sealed(dataset, "a-0", [3, 2, 1])
    for shard in (dataset / "shards").iterdir():
        shard.chmod(0)
    code = (
        "import sys, builtins; from eyas.cli.main import main\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "try: main(['status', sys.argv[1]])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'heavy import'\n"
        "assert not [path for path in opened if path.endswith('.safetensors')], opened\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(dataset)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
