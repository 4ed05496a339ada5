"""`eyas standardize` from outside: arguments, exit status, text, files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from eyas.shards.ledger import read_ledgers
from tests.captured import captured_identity, hashes, make_samples, write_captured

NUM_SAMPLES = 12


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    identity = captured_identity(num_samples=NUM_SAMPLES)
    return write_captured(tmp_path / "captured", identity, make_samples(identity, NUM_SAMPLES))


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_json_summary_on_stdout_and_the_rest_on_stderr(tmp_path, captured) -> None:
    result = eyas("standardize", captured, tmp_path / "standard", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["num_samples"] == NUM_SAMPLES
    assert summary["identity"]["stage"] == "standard"
    assert summary["num_linked"] == summary["num_shards"]
    assert "shards to link" in result.stderr


def test_text_summary(tmp_path, captured) -> None:
    result = eyas("standardize", captured, tmp_path / "standard", "--taps", "after:1,after:3", "--codec", "zstd")
    assert result.exit_code == 0, result.output
    assert f"{NUM_SAMPLES} samples" in result.stdout
    assert "taps after:1,after:3, last_hidden after:7, bfloat16, codec zstd" in result.stdout


@pytest.mark.parametrize(
    ("options", "taps"),
    [
        (["--layers", "1,3,5", "--convention", "specforge"], "after:1,after:3,after:5"),
        (["--layers", "0,2,4", "--convention", "vllm@0.32.0"], "embed,after:1,after:3"),
        (["--from-config", "draft", "--convention", "vllm"], "after:1,after:3,after:5"),
    ],
)
def test_layer_numbers_with_their_convention(tmp_path, captured, monkeypatch, options, taps) -> None:
    monkeypatch.chdir(tmp_path)
    Path("draft").mkdir()
    Path("draft/config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}))
    result = eyas("standardize", captured, "standard", *options)
    assert result.exit_code == 0, result.output
    assert f"taps {taps}," in result.stdout


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--layers", "1,3,5"], 2, "--convention"),
        (["--taps", "1,3,5"], 2, "after:1"),
        (["--taps", "after:1", "--layers", "1"], 2, "--taps and --layers"),
        (["--convention", "vllm"], 2, "--convention vllm"),
        (["--taps", "after:1,after:2"], 1, "after:2 was not captured; captured were embed,after:1,after:3,after:5"),
        (["--taps", "after:5,after:1"], 2, "use after:1,after:5"),
        (["--taps", "middle"], 2, "expected embed, after:J"),
        (["--taps", "after:99"], 2, "after:99 does not exist"),
        (["--dtype", "float16", "--codec", "zstd"], 1, "use codec raw"),
        (["--last-hidden", "final"], 1, "final was not captured"),
        (["--workers", "0"], 2, "--workers"),
    ],
)
def test_mistakes(tmp_path, captured, options, exit_code, message) -> None:
    result = eyas("standardize", captured, tmp_path / "standard", *options)
    assert result.exit_code == exit_code, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "standard").exists()


def test_no_dataset(tmp_path) -> None:
    result = eyas("standardize", tmp_path, tmp_path / "standard")
    assert result.exit_code == 1
    assert "no dataset.json is there" in result.stderr


def test_dry_run_writes_nothing(tmp_path, captured) -> None:
    before = hashes(tmp_path)
    result = eyas("standardize", captured, tmp_path / "standard", "--taps", "after:1", "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"{NUM_SAMPLES} left, 0 done" in result.stdout
    assert hashes(tmp_path) == before
    assert not (tmp_path / "standard").exists()


def test_a_corrupt_shard_fails_the_run_by_name_after_the_rest(tmp_path, captured) -> None:
    bad = sorted((captured / "shards").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:-2] + b"xx")
    result = eyas("standardize", captured, tmp_path / "standard", "--json")
    assert result.exit_code == 1
    assert bad.name in result.stderr.splitlines()[-1]
    assert list(json.loads(result.stdout)["failures"]) == [bad.name]
    lost = next(entry for entry in read_ledgers(captured).entries if entry.shard == bad.name)
    assert read_ledgers(tmp_path / "standard").num_samples == NUM_SAMPLES - len(lost.sample_ids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_seals_and_exits_75(tmp_path, number) -> None:
    num_samples = 400
    identity = captured_identity(num_samples=num_samples)
    samples = make_samples(identity, num_samples, max_tokens=200)
    captured = write_captured(tmp_path / "captured", identity, samples, shard_bytes=500_000)
    command = [sys.executable, "-m", "eyas.cli.main", "standardize", str(captured), str(tmp_path / "standard")]
    command += ["--taps", "after:1,after:3", "--shard-size", "20KB", "--workers", "1"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not any(ledger.stat().st_size for ledger in (tmp_path / "standard").glob("ledger/*.jsonl")):
        assert run.poll() is None, run.communicate()
        time.sleep(0.005)
    run.send_signal(number)
    _, stderr = run.communicate()
    assert run.returncode == 75, stderr
    assert "stopped early: run the same command again" in stderr
    state = read_ledgers(tmp_path / "standard")
    assert state.problems == []
    assert 0 < state.num_samples < num_samples
    assert subprocess.run(command, check=False).returncode == 0
    assert read_ledgers(tmp_path / "standard").num_samples == num_samples
