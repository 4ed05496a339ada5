"""`eyas train` from outside: arguments, exit status, text, files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from eyas.align.draft import read_draft
from eyas.train.checkpoint import list_checkpoints
from eyas.train.metrics import read_metrics
from eyas.train.run import plan_run, write_run
from tests.captured import hashes
from tests.tiny import make_target
from tests.train.tiny_run import TAPS, eyas, make_inputs, train_arguments, train_command, train_config


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def test_a_run_leaves_a_draft_that_check_accepts(inputs: Path) -> None:
    result = eyas(*train_arguments(inputs, "whole", "--epochs", 2, "--plot", inputs / "curves.png"))
    assert result.exit_code == 0, result.output
    run = inputs / "whole"
    assert "finished after" in result.stdout
    assert "expected accepted length" in result.stdout
    assert "of the targets" in result.stderr
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "run.json", "vocabulary.safetensors", "samples.safetensors", "metrics.jsonl", "metrics.csv", "checkpoints",
    }  # fmt: skip
    best = json.loads((run / "checkpoints" / "best.json").read_bytes())
    draft = run / "checkpoints" / best["checkpoint"] / "draft"
    assert eyas("check", inputs / "standard", "--draft", draft, "--engine", "vllm@0.32.0").exit_code == 0
    found = read_draft(draft)
    identity = json.loads((inputs / "standard" / "dataset.json").read_bytes())
    assert found.config.raw["eyas"] == {"taps": TAPS.split(","), "ttt_steps": 3, "dataset": identity}
    assert found.d2t is not None
    vocabulary = load_file(run / "vocabulary.safetensors")
    assert (found.d2t == vocabulary["d2t"]).all()
    with safe_open(draft / "model.safetensors", framework="numpy") as file:
        names = set(file.keys())
        assert file.get_slice("fc.weight").get_dtype() == "F32"
        assert file.get_slice("lm_head.weight").get_shape() == [64, 32]
    assert "embed_tokens.weight" not in names
    kinds = [record["kind"] for record in read_metrics(run)]
    assert kinds.count("validation") == 2
    assert (inputs / "curves.png").stat().st_size > 10_000


def test_end_tokens_are_in_the_vocabulary_however_rare(inputs: Path) -> None:
    result = eyas(*train_arguments(inputs, "rare", "--draft-vocab-size", 4, "--max-steps", 1))
    assert result.exit_code == 0, result.output
    t2d = load_file(inputs / "rare" / "vocabulary.safetensors")["t2d"]
    assert t2d.sum() == 4
    assert t2d[2], "<|im_end|>"


def test_a_finished_run_is_left_alone(inputs: Path) -> None:
    arguments = train_arguments(inputs, "finished", "--max-steps", 3, "--json")
    first = json.loads(eyas(*arguments).stdout)
    assert (first["step"], first["finished"]) == (3, True)
    before = hashes(inputs / "finished" / "checkpoints" / "step-000003")
    again = eyas(*arguments)
    assert again.exit_code == 0
    assert json.loads(again.stdout)["step"] == 3
    assert hashes(inputs / "finished" / "checkpoints" / "step-000003") == before


def test_json_and_nothing_else_on_stdout(inputs: Path) -> None:
    result = eyas(*train_arguments(inputs, "json", "--max-steps", 2, "--json"))
    summary = json.loads(result.stdout)
    assert summary["best"]["checkpoint"] == "step-000002"
    assert summary["validation"]["accepted_length"] >= 1
    assert summary["stopped"] is None


def test_dry_run_writes_nothing(inputs: Path) -> None:
    result = eyas(*train_arguments(inputs, "dry", "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "64 of 128 ids" in result.stdout
    assert "3 epochs" in result.stdout
    assert not (inputs / "dry").exists()


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--epochs", 2, "--max-steps", 5], 2, "give one of them"),
        (["--step-weights", "1,0.5"], 2, "2 weights for --ttt-steps 3"),
        (["--step-weights", "0,0,0"], 2, "not only 0"),
        (["--draft-vocab-size", 129], 2, "the target has 128"),
        (["--shard", "--optimizer", "muon", "--dp", 2], 2, "muon needs it whole"),
        (["--shard"], 2, "give --dp"),
        (["--validation", "0.9"], 2, "--validation"),
        (["--plot", "curves.txt"], 2, "ends in .png"),
        (["--init-from", "nowhere"], 2, "nowhere"),
        (["--draft-hidden-size", 20], 2, "head"),
        (["--fc-norm", "--serving-engine", "vllm"], 1, "has no fc_norm"),
    ],
)
def test_mistakes(inputs: Path, tmp_path: Path, options: list[object], exit_code: int, message: str) -> None:
    arguments = train_arguments(inputs, "x", *options)
    arguments[2] = tmp_path / "run"
    result = eyas(*arguments)
    assert result.exit_code == exit_code, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_captured_data_is_sent_to_standardize(inputs: Path, tmp_path: Path) -> None:
    result = eyas("train", inputs / "captured", tmp_path / "run", "--target", inputs / "target")
    assert result.exit_code == 1
    assert f"eyas standardize {inputs / 'captured'}" in result.stderr
    assert not (tmp_path / "run").exists()


def test_another_target_is_a_mismatch(inputs: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    result = eyas("train", inputs / "standard", tmp_path / "run", "--target", other, "--draft-vocab-size", 64)
    assert result.exit_code == 3
    assert "target weights" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run(inputs: Path) -> None:
    folder = inputs / "something"
    folder.mkdir()
    (folder / "thesis.tex").write_text("dear to somebody")
    result = eyas(*train_arguments(inputs, "something", "--max-steps", 1))
    assert result.exit_code == 1
    assert "thesis.tex" in result.stderr


def test_other_options_are_refused_with_the_difference(inputs: Path) -> None:
    assert eyas(*train_arguments(inputs, "options", "--max-steps", 2)).exit_code == 0
    before = hashes(inputs / "options")
    result = eyas(*train_arguments(inputs, "options", "--max-steps", 2, "--learning-rate", 1e-4, "--accumulate", 2))
    assert result.exit_code == 1
    assert "--learning-rate was 0.003 and is 0.0001" in result.stderr
    assert "batches_per_step was 1 and is 2" in result.stderr
    assert eyas(*train_arguments(inputs, "options", "--max-steps", 1)).exit_code == 1
    assert hashes(inputs / "options") == before
    longer = eyas(*train_arguments(inputs, "options", "--max-steps", 3, "--keep", 5, "--save-every", 1))
    assert longer.exit_code == 0, longer.output


def test_before_the_first_checkpoint_options_may_change(inputs: Path) -> None:
    """A start that ran out of memory burns no folder."""
    config = train_config(inputs, "burnt", epochs=100)
    (inputs / "burnt").mkdir()
    write_run(config, plan_run(config))
    result = eyas(*train_arguments(inputs, "burnt", "--max-steps", 1, "--draft-vocab-size", 32))
    assert result.exit_code == 0, result.output
    assert load_file(inputs / "burnt" / "vocabulary.safetensors")["t2d"].sum() == 32


def test_changed_data_is_refused(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs, tmp_path / "copy")
    inputs = tmp_path / "copy"
    assert eyas(*train_arguments(inputs, "data", "--max-steps", 2)).exit_code == 0
    moved = inputs / "elsewhere"
    (inputs / "standard").rename(moved)
    arguments = train_arguments(inputs, "data", "--max-steps", 3)
    arguments[1] = moved
    assert eyas(*arguments).exit_code == 0, "the same data at another place"
    shutil.rmtree(inputs / "standard", ignore_errors=True)
    result = eyas("standardize", inputs / "captured", inputs / "standard", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    result = eyas(*train_arguments(inputs, "data", "--max-steps", 4))
    assert result.exit_code == 1
    assert "other data" in result.stderr
    assert "--init-from" in result.stderr


def test_starting_from_a_draft(inputs: Path) -> None:
    assert eyas(*train_arguments(inputs, "first", "--epochs", 3)).exit_code == 0
    arguments = [a for a in train_arguments(inputs, "second", "--max-steps", 1) if a not in ("--draft-vocab-size", 64)]
    result = eyas(*arguments, "--init-from", inputs / "first", "--learning-rate", 1e-9, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["validation"]
    best = json.loads((inputs / "first" / "checkpoints" / "best.json").read_bytes())
    assert found["accepted_length"] == pytest.approx(best["accepted_length"], abs=1e-6)
    refused = eyas(*train_arguments(inputs, "third", "--draft-vocab-size", 32, "--init-from", inputs / "first"))
    assert refused.exit_code == 2
    assert "proposes 64 ids" in refused.stderr
    shutil.rmtree(inputs / "first")
    longer = eyas(*arguments[:-1], 2, "--init-from", inputs / "first", "--learning-rate", 1e-9)
    assert longer.exit_code == 0, "a run that has begun needs no more of the draft it began with"


@pytest.mark.parametrize(
    ("options", "tensor"),
    [
        (["--draft-layers", 2], "layers.1.mlp.up_proj.weight"),
        (["--draft-hidden-size", 16], "embed_tokens.weight"),
        (["--fc-norm", "--norm-output"], "fc_norm.2.weight"),
        (["--norm-before-fc", "--serving-engine", "vllm@0.32.0"], "input_norm.weight"),
    ],
)
def test_other_drafts(inputs: Path, options: list[object], tensor: str) -> None:
    name = " ".join(map(str, options))
    for steps in (3, 5):  # the second goes on with the first
        result = eyas(*train_arguments(inputs, name, "--max-steps", steps, *options))
        assert result.exit_code == 0, result.output
    draft = inputs / name / "checkpoints" / "step-000005" / "draft"
    assert tensor in read_draft(draft).tensors
    arguments = [a for a in train_arguments(inputs, f"{name} again", "--max-steps", 1)
                 if a not in ("--draft-vocab-size", 64)]  # fmt: skip
    again = eyas(*arguments, "--init-from", inputs / name, *options[-2:] if "--serving-engine" in options else ())
    assert again.exit_code == 0, again.output


def test_long_samples_are_cut_or_left_out_and_counted(inputs: Path) -> None:
    for option, word in (("truncate", "cut"), ("skip", "left out")):
        result = eyas(
            *train_arguments(inputs, f"long {option}", "--batch-tokens", 24, "--max-steps", 2, "--overlong", option)
        )
        assert result.exit_code == 0, result.output
        assert f"longer than --batch-tokens: {word}" in result.stderr


def test_max_runtime_saves_and_exits_75(inputs: Path) -> None:
    result = eyas(*train_arguments(inputs, "runtime", "--epochs", 1000, "--max-runtime", 1))
    assert result.exit_code == 75, result.output
    assert "stopped early (max runtime)" in result.stderr
    (newest,) = list_checkpoints(inputs / "runtime")[-1:]
    assert json.loads((newest / "state.json").read_bytes())["step"] == len(
        [record for record in read_metrics(inputs / "runtime") if record["kind"] == "train"]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_75(inputs: Path, number: signal.Signals) -> None:
    run = inputs / f"signal {number.name}"
    process = subprocess.Popen(
        train_command(inputs, run.name, "--epochs", 100_000), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while len(read_metrics(run)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert "stopped early (signal)" in stderr
    assert list_checkpoints(run)


def test_two_runs_into_one_folder_are_refused(inputs: Path) -> None:
    run = inputs / "held"
    process = subprocess.Popen(
        train_command(inputs, run.name, "--epochs", 100_000), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        while not read_metrics(run) and process.poll() is None:
            time.sleep(0.05)
        result = eyas(*train_arguments(inputs, "held", "--epochs", 100_000))
        assert result.exit_code == 1
        assert "is in use by process" in result.stderr
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("file", ["draft/model.safetensors", "optimizer.safetensors"])
def test_a_flipped_byte_in_a_checkpoint_is_named(inputs: Path, file: str) -> None:
    run = f"flipped {file.partition('/')[0]}"
    arguments = train_arguments(inputs, run, "--max-steps", 4, "--save-every", 2)
    assert eyas(*arguments).exit_code == 0
    newest = sorted((inputs / run / "checkpoints").glob("step-*"))[-1]
    content = bytearray((newest / file).read_bytes())
    content[-9] ^= 0x40
    (newest / file).write_bytes(content)
    for again in (train_arguments(inputs, run, "--max-steps", 8, "--save-every", 2),
                  ("export", newest, inputs / f"{run} out", "--engine", "vllm@0.32.0")):  # fmt: skip
        done = eyas(*again)
        assert done.exit_code == 1, done.output
        assert f"{file} is not what was written" in done.output
        assert "remove" in done.output


def test_a_run_that_diverges_fails(inputs: Path) -> None:
    done = eyas(*train_arguments(inputs, "diverged", "--max-steps", 30, "--learning-rate", 1e30, "--clip", 0))
    assert done.exit_code == 1, done.output
    assert "has diverged" in done.output
    assert eyas(*train_arguments(inputs, "no rate", "--learning-rate", "nan")).exit_code == 2


def test_weights_are_readable_as_other_files_are(inputs: Path) -> None:
    assert eyas(*train_arguments(inputs, "modes", "--max-steps", 2)).exit_code == 0
    (checkpoint,) = (inputs / "modes" / "checkpoints").glob("step-*")
    modes = {path.stat().st_mode & 0o777 for path in checkpoint.rglob("*") if path.is_file()}
    assert modes == {(inputs / "standard" / "dataset.json").stat().st_mode & 0o777}
