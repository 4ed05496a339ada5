"""`eyas capture` from outside: exit statuses, what is printed, what is left on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from eyas.capture.prepared import PreparedSamples
from eyas.cli.main import main
from eyas.shards import open_dataset
from tests.tiny import make_target, prepare_rows, tokenized_rows

NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target`` and ``prepared``."""
    folder = tmp_path_factory.mktemp("inputs")
    make_target(folder / "target")
    prepare_rows(folder / "prepared", folder / "target", tokenized_rows(NUM_SAMPLES))
    return folder


def capture(inputs: Path, out: Path, *options: object) -> Result:
    arguments = ["capture", inputs / "prepared", out, "--target", inputs / "target", "--worker", "w", *options]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ids_of(dataset: Path) -> list[str]:
    return [sample_id for shard in open_dataset(dataset).iter_shards() for sample_id in shard.sample_ids]


def wanted(inputs: Path) -> list[str]:
    samples = PreparedSamples.open(inputs / "prepared")
    return [samples[row].sample_id for row in range(len(samples))]


def test_every_sample_is_captured_once_and_a_second_run_has_nothing_to_do(inputs: Path, tmp_path: Path) -> None:
    first = capture(inputs, tmp_path / "out", "--taps", "default")
    assert first.exit_code == 0, first.output
    assert "60 of 60 samples done, 0 rejected, 0 left" in first.stdout
    dataset = open_dataset(tmp_path / "out")
    assert sorted(ids_of(tmp_path / "out")) == sorted(wanted(inputs))
    assert [str(tap) for tap in dataset.identity.taps] == ["after:1", "after:3", "after:4"]
    assert str(dataset.identity.last_hidden) == "after:7"
    shards = sorted(path.name for path in (tmp_path / "out" / "shards").iterdir())
    again = capture(inputs, tmp_path / "out", "--taps", "default")
    assert again.exit_code == 0, again.output
    assert "captured 0 samples" in again.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "shards").iterdir()) == shards


def test_max_samples_can_be_raised_and_the_batch_size_changed(inputs: Path, tmp_path: Path) -> None:
    assert capture(inputs, tmp_path / "out", "--max-samples", 20).exit_code == 0
    assert sorted(ids_of(tmp_path / "out")) == sorted(wanted(inputs)[:20])
    result = capture(inputs, tmp_path / "out", "--batch-tokens", 40, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["num_done"], summary["num_new_samples"], summary["num_left"]) == (60, 40, 0)
    assert sorted(ids_of(tmp_path / "out")) == sorted(wanted(inputs))


def test_a_time_limit_ends_with_75_and_the_next_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    stopped = capture(inputs, tmp_path / "out", "--max-runtime", "0s")
    assert stopped.exit_code == 75, stopped.output
    assert "run the same command again" in stopped.stderr
    assert capture(inputs, tmp_path / "out").exit_code == 0
    assert sorted(ids_of(tmp_path / "out")) == sorted(wanted(inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--taps", "after:1,after:3,after:5"], "taps is ['after:1', 'after:3', 'after:4'] there and"),
        (["--dtype", "bfloat16"], "dtype is 'float32' there and 'bfloat16' here"),
        (["--last-hidden", "final"], "last_hidden is 'after:7' there and 'final' here"),
        (["--no-target-statistics"], "target_statistics is True there and False here"),
    ],
)
def test_another_identity_is_refused_with_the_difference(
    inputs: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    assert capture(inputs, tmp_path / "out", "--max-samples", 2).exit_code == 0
    refused = capture(inputs, tmp_path / "out", *options)
    assert refused.exit_code == 1
    assert message in refused.stderr
    assert len(ids_of(tmp_path / "out")) == 2


def test_another_target_is_refused(inputs: Path, tmp_path: Path) -> None:
    assert capture(inputs, tmp_path / "out", "--max-samples", 2).exit_code == 0
    make_target(tmp_path / "other", seed=1)
    refused = capture(inputs, tmp_path / "out", "--target", tmp_path / "other")
    assert refused.exit_code == 1
    assert "target.weights_hash" in refused.stderr


def test_other_weights_are_refused_where_nothing_is_left_too(inputs: Path, tmp_path: Path) -> None:
    assert capture(inputs, tmp_path / "out", "--max-samples", 2).exit_code == 0
    make_target(tmp_path / "other", seed=1)
    refused = capture(inputs, tmp_path / "out", "--target", tmp_path / "other", "--max-samples", 2)
    assert refused.exit_code == 1
    assert "target.weights_hash" in refused.stderr


def test_a_few_changed_weights_are_another_target(inputs: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    assert capture(inputs, tmp_path / "out", "--max-samples", 2).exit_code == 0
    changed = make_target(tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"][5:7] *= 3
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    refused = capture(inputs, tmp_path / "out", "--target", changed)
    assert refused.exit_code == 1
    assert "target.weights_hash" in refused.stderr


def test_a_start_that_failed_does_not_burn_the_folder(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").touch()
    assert capture(inputs, tmp_path / "out", "--max-samples", 2).exit_code == 0


def test_another_tokenizer_is_refused(inputs: Path, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    text = (target / "tokenizer.json").read_text()
    (target / "tokenizer.json").write_text(text.replace('"w1"', '"v1"'))
    refused = capture(inputs, tmp_path / "out", "--target", target)
    assert refused.exit_code == 1
    assert "prepare it again with --target" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_dataset_is_left_alone(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    refused = capture(inputs, tmp_path)
    assert refused.exit_code == 1
    assert "give another OUT" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--layers", "1,2,3"], 2, "a bare layer number means another tensor in every system"),
        (["--taps", "1,2,3"], 2, "a bare layer number means another tensor in every system"),
        (["--layers", "2,3,4", "--taps", "default"], 2, "give one of them"),
        (["--taps", "middle"], 2, "expected embed, after:J"),
        (["--last-hidden", "first"], 2, "expected embed, after:J"),
        (["--worker", "../x"], 2, "worker name '../x-0'"),
        (["--worker", ".hidden"], 2, "the first a letter or digit"),
        (["--taps", "after:8"], 2, "tap after:8 does not exist: the target has 8 layers"),
        (["--taps", "after:3,after:1"], 2, "use after:1,after:3"),
        (["--tp", "3"], 1, "4 attention heads"),
        (["--codec", "zstd"], 1, "codec zstd stores bfloat16 only"),
        (["--last-hidden", "after:3"], 1, "expected after:7 or final"),
        (["--shard-size", "many"], 2, "expected a size such as 1GiB"),
        (["--max-runtime", "soon"], 2, "expected a duration such as"),
        (["--target", "/nonexistent"], 2, "/nonexistent: no such folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    inputs: Path, tmp_path: Path, options: list[str], status: int, message: str
) -> None:
    refused = capture(inputs, tmp_path / "out", *options)
    assert refused.exit_code == status, refused.output
    assert message in refused.stderr
    assert not (tmp_path / "out").exists()


def test_convention_numbers_name_the_same_taps(inputs: Path, tmp_path: Path) -> None:
    assert capture(inputs, tmp_path / "a", "--layers", "2,4,5", "--convention", "vllm@0.32.0").exit_code == 0
    assert capture(inputs, tmp_path / "b", "--layers", "1,3,4", "--convention", "sglang@0.5.23").exit_code == 0
    taps = [[str(tap) for tap in open_dataset(tmp_path / name).identity.taps] for name in "ab"]
    assert taps == [["after:1", "after:3", "after:4"]] * 2


def test_dry_run_prints_the_plan_and_writes_nothing(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[capture]\ntaps = ["embed", "final"]\nmax-samples = 7\n')
    arguments = ["--recipe", tmp_path / "recipe.toml", "capture", inputs / "prepared", tmp_path / "out",
                 "--target", inputs / "target", "--max-samples", "9", "--dry-run"]  # fmt: skip
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "embed,final  (recipe)" in result.stdout
    assert "9  (given)" in result.stdout
    assert "9 wanted, 0 done, 0 rejected, 9 left" in result.stdout
    assert not (tmp_path / "out").exists()


def test_rejected_samples_are_listed_counted_and_tried_again_on_request(inputs: Path, tmp_path: Path) -> None:
    rows = tokenized_rows(30)
    rows[4] = {"input_ids": [3] * 600, "loss_mask": [0] * 599 + [1]}  # the target has 512 positions
    prepare_rows(tmp_path / "prepared", inputs / "target", rows)
    arguments = ["capture", tmp_path / "prepared", tmp_path / "out", "--target", inputs / "target"]

    def run(*options: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in [*arguments, *options]])

    failed = run()
    assert failed.exit_code == 1, failed.output
    assert "1 of 30 samples were rejected, more than --max-rejects 0.01 allows (0)" in failed.stderr
    (ledger,) = (tmp_path / "out" / "rejects").glob("*.jsonl")
    assert "600 tokens, and the target's positions allow 1 to 512" in json.loads(ledger.read_text())["reason"]
    allowed = run("--max-rejects", 0.1, "--json")
    assert allowed.exit_code == 0, allowed.output
    summary = json.loads(allowed.stdout)
    assert (summary["num_done"], summary["num_rejected"], summary["num_left"]) == (29, 1, 0)
    retried = run("--max-rejects", 0.1, "--json", "--retry-rejects")
    assert json.loads(retried.stdout)["num_new_samples"] == 0
    assert json.loads(retried.stdout)["num_rejected"] == 1


@pytest.mark.parametrize("processes", [["--tp", "2"], ["--dp", "2"]])
def test_several_processes_capture_what_one_does(inputs: Path, tmp_path: Path, processes: list[str]) -> None:
    import torch

    assert capture(inputs, tmp_path / "one", "--taps", "embed,after:3,final").exit_code == 0
    # Sealing half of it first: the other processes go on where one has stopped.
    assert capture(inputs, tmp_path / "many", "--taps", "embed,after:3,final", "--max-samples", 10).exit_code == 0
    command = [sys.executable, "-m", "eyas.cli.main", "capture", inputs / "prepared", tmp_path / "many",
               "--target", inputs / "target", "--taps", "embed,after:3,final", "--worker", "w",
               "--batch-tokens", "64", *processes]  # fmt: skip
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "60 of 60 samples done" in run.stdout
    one, many = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "many")
    assert sorted(ids_of(tmp_path / "many")) == sorted(wanted(inputs))
    assert {path.name.split("-")[1] for path in (tmp_path / "many" / "shards").iterdir()} == {"0", "1"}
    for sample in one.iter_samples():
        other = many.sample(sample.sample_id)
        assert torch.equal(sample.input_ids, other.input_ids)
        error = (sample.features - other.features).norm(dim=-1) / sample.features.norm(dim=-1)
        assert float(error.max()) < 1e-5


def test_a_signal_seals_what_is_complete_and_exits_75(inputs: Path, tmp_path: Path) -> None:
    rows = tokenized_rows(20_000, seed=3)
    prepare_rows(tmp_path / "prepared", inputs / "target", rows)
    command = [sys.executable, "-m", "eyas.cli.main", "capture", tmp_path / "prepared", tmp_path / "out",
               "--target", inputs / "target", "--batch-tokens", "32", "--shard-size", "16KiB"]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list((tmp_path / "out").glob("ledger/*.jsonl")):
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate()
    assert process.returncode == 75, stderr
    assert "stopped early (signal)" in stderr
    dataset = open_dataset(tmp_path / "out")
    assert not dataset.problems
    assert 0 < dataset.num_samples < 20_000
    assert f"{dataset.num_samples:,} of" in stdout


def test_ranks_that_are_killed_are_named_with_what_is_kept(inputs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eyas.cli.main", "capture", inputs / "prepared", tmp_path / "out",
               "--target", inputs / "target", "--dp", 2]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(ranks := psutil.Process(process.pid).children()) < 2:
        time.sleep(0.01)
    for rank in ranks:  # all: one that is left may wait half a minute for what is gone
        rank.kill()
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert (
        "eyas: rank 0 was ended by SIGKILL (if nobody sent it, for memory). What was written before is kept" in stderr
    )


def test_the_draft_is_checked_before_the_first_token_and_after_the_first_samples(inputs: Path, tmp_path: Path) -> None:
    assert capture(inputs, tmp_path / "first", "--max-samples", 4).exit_code == 0
    export = [
        "export",
        tmp_path / "first",
        tmp_path / "draft",
        "--engine",
        "sglang@0.5.23",
        "--target",
        inputs / "target",
    ]
    exported = CliRunner().invoke(main, [str(argument) for argument in export])
    assert exported.exit_code == 0, exported.output
    options = ["--draft", tmp_path / "draft", "--serving-engine", "sglang@0.5.23"]

    wrong = capture(inputs, tmp_path / "wrong", *options, "--taps", "after:1,after:3,after:5")
    assert wrong.exit_code == 3, wrong.output
    assert "check before the first token" in wrong.stderr
    assert not (tmp_path / "wrong").exists()

    right = capture(inputs, tmp_path / "right", *options)
    assert right.exit_code == 0, right.output
    assert "check after 8 samples" in right.stderr
    assert "replay slot 0" in right.stderr
    assert "60 of 60 samples done" in right.stdout
