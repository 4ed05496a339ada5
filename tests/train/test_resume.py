"""Stopping and going on gives the numbers of a run that was never stopped; so does another number of ranks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.train.checkpoint import list_checkpoints
from eyas.train.metrics import read_metrics
from tests.train.tiny_run import assert_same_tensors, last_tensors, run_training, train_command, train_config

TIMES = ("seconds", "data_wait", "tokens_per_second")
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon and accumulation": {"batches_per_step": 3, "optimizer": "muon"},
    "bfloat16 working copies": {"dtype": "bfloat16", "batches_per_step": 2},
    "validation between epochs": {"validate_every": 3, "save_every": 2, "keep": 1, "epochs": None, "max_steps": 11},
}


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(run)]


@pytest.mark.parametrize("name", SETTINGS)
def test_stopped_again_and_again_is_the_same_run(inputs: Path, name: str) -> None:
    changes = dict(SETTINGS[name])
    optimizer = replace(train_config(inputs, "x").optimizer, optimizer=changes.pop("optimizer", "adamw"))
    whole, stopped = (
        train_config(inputs, f"resume {name} {which}", optimizer=optimizer, **changes) for which in ("whole", "stopped")
    )
    reference = run_training(whole)
    assert reference.finished
    starts = 0
    while not (summary := run_training(stopped, stop_after=3)).finished:
        assert summary.stopped == "signal"
        starts += 1
    assert starts > 1
    assert timeless(stopped.run) == timeless(whole.run)
    assert_same_tensors(last_tensors(stopped.run), last_tensors(whole.run))
    assert summary.best == reference.best
    assert (stopped.run / "metrics.csv").read_text().count("\n") == 1 + len(read_metrics(whole.run))


def test_a_stop_during_validation_makes_up_for_it(inputs: Path) -> None:
    changes = {"validation": 0.5, "validate_every": 2, "epochs": None, "max_steps": 4}
    whole, stopped = (train_config(inputs, f"validating {which}", **changes) for which in ("whole", "stopped"))
    run_training(whole)
    # Asked before each step and after each batch of validation: the fourth time is within the first validation.
    assert run_training(stopped, stop_after=4).stopped == "signal"
    assert [line["kind"] for line in read_metrics(stopped.run)] == ["train", "train"]
    assert run_training(stopped).finished
    assert timeless(stopped.run) == timeless(whole.run)


def test_a_finished_run_goes_on_where_epochs_grow(inputs: Path) -> None:
    config = train_config(inputs, "grows", epochs=1)
    first = run_training(config)
    again = run_training(config)
    assert (again.step, again.finished) == (first.step, True)
    longer = run_training(replace(config, epochs=2))
    assert longer.step > first.step
    assert longer.finished


def test_every_step_trains_on_other_samples_and_an_epoch_on_all(inputs: Path) -> None:
    config = train_config(inputs, "tokens", epochs=1, validation=0.0)
    summary = run_training(config)
    lines = read_metrics(config.run)
    assert [line["step"] for line in lines] == list(range(1, summary.step + 1))
    assert sum(line["num_tokens"] for line in lines) == summary.num_tokens
    from eyas.shards import open_dataset

    assert summary.num_tokens == open_dataset(config.dataset).num_tokens


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_two_ranks_are_one_with_twice_the_accumulation(inputs: Path, shard: bool) -> None:
    two = "two ranks" + (" sharded" if shard else "")
    options = ("--epochs", 2, "--noise", 0.2, "--validation", 0.1)
    command = train_command(inputs, two, *options, "--dp", 2, *(["--shard"] if shard else []))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one = f"one rank beside {two}"
    done = subprocess.run(train_command(inputs, one, *options, "--accumulate", 2), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = last_tensors(inputs / two), last_tensors(inputs / one)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=2e-6, msg=name)
    for mine, other in zip(timeless(inputs / two), timeless(inputs / one), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["step"] == other["step"]


def test_another_number_of_ranks_goes_on_with_a_run(inputs: Path) -> None:
    reference = train_config(inputs, "ranks reference", batches_per_step=2)
    run_training(reference)
    changed = replace(reference, run=inputs / "ranks changed")
    assert run_training(changed, stop_after=5).stopped
    options = ("--epochs", 2, "--noise", 0.2, "--validation", 0.1, "--warmup", 0.1, "--weight-decay", 0.01)
    done = subprocess.run(
        train_command(inputs, "ranks changed", *options, "--dp", 2), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = last_tensors(changed.run), last_tensors(reference.run)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=2e-6, msg=name)


def test_the_newest_and_the_best_checkpoint_are_kept(inputs: Path) -> None:
    config = train_config(inputs, "kept", save_every=1, keep=2, validate_every=4, epochs=None, max_steps=10)
    summary = run_training(config)
    assert summary.best is not None
    names = {path.name for path in list_checkpoints(config.run)}
    assert names == {"step-000009", "step-000010", summary.best["checkpoint"]}
    assert not [path for path in (config.run / "checkpoints").iterdir() if path.name.startswith(".")]
