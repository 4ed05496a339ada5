"""Foreign folders at the command line: `eyas standardize` in and out, and `eyas inspect`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from eyas.cli.main import main
from eyas.shards.dataset import Dataset
from tests.tiny import prepare_rows, tokenized_rows
from tests.train.tiny_run import TAPS, make_inputs

NUM_SAMPLES = 30


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, prepared, captured, standard; and the standard dataset in speculators' and vLLM's layouts, without a
    word of eyas in them."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, NUM_SAMPLES)
    for name in ("speculators", "vllm"):
        assert eyas("standardize", folder / "standard", folder / name, "--format", name).exit_code == 0
        shutil.copytree(folder / name, folder / f"{name}-by-others", ignore=shutil.ignore_patterns("eyas.json"))
    return folder


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def check(dataset: Path, original: Path) -> None:
    ours, theirs = Dataset.open(original), Dataset.open(dataset)
    assert theirs.identity.taps == ours.identity.taps
    assert theirs.identity.last_hidden == ours.identity.last_hidden
    assert theirs.identity.tokenizer == ours.identity.tokenizer
    for name in ("config_hash", "model_class", "num_layers", "vocab_size", "final_norm_eps", "logit_scale",
                 "logit_softcap", "lm_head_bias", "lm_head_rows", "weight_dtype", "quantization"):  # fmt: skip
        assert getattr(theirs.identity.target, name) == getattr(ours.identity.target, name), name
    assert set(theirs.sample_ids()) == set(ours.sample_ids())
    for sample in ours:
        found = theirs.sample(sample.sample_id)
        assert torch.equal(found.features, sample.features)
        assert torch.equal(found.last_hidden, sample.last_hidden)


def test_our_own_export_says_its_taps(inputs: Path, tmp_path: Path) -> None:
    result = eyas("standardize", inputs / "speculators", tmp_path / "out", "--target", inputs / "target", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["num_samples"] == NUM_SAMPLES
    assert summary["layout"]["format"] == "speculators"
    check(tmp_path / "out", inputs / "standard")
    assert eyas("inspect", tmp_path / "out", "--verify").exit_code == 0
    assert eyas("check", tmp_path / "out", "--target", inputs / "target").exit_code == 0


@pytest.mark.parametrize(
    "options", [["--taps", TAPS], ["--layers", "2,4,6", "--convention", "vllm@0.32.0"], ["--taps", "identify"]]
)
def test_taps_are_declared_or_found(inputs: Path, tmp_path: Path, options: list[str]) -> None:
    source = inputs / "speculators-by-others"
    result = eyas("standardize", source, tmp_path / "out", "--target", inputs / "target", *options)
    assert result.exit_code == 0, result.output
    assert f"taps {TAPS}, last_hidden after:7" in result.stdout
    check(tmp_path / "out", inputs / "standard")


def test_masks_are_joined_from_the_prepared_folder(inputs: Path, tmp_path: Path) -> None:
    source, target = inputs / "vllm-by-others", inputs / "target"
    without = eyas("standardize", source, tmp_path / "out", "--target", target, "--taps", f"{TAPS},after:7")
    assert without.exit_code == 1
    assert "--prepared" in without.stderr
    options = ["--target", target, "--taps", "identify", "--prepared", inputs / "prepared"]
    result = eyas("standardize", source, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    check(tmp_path / "out", inputs / "standard")


def test_without_a_word_on_the_taps_it_says_what_can_be_said(inputs: Path, tmp_path: Path) -> None:
    source, target = inputs / "speculators-by-others", inputs / "target"
    result = eyas("standardize", source, tmp_path / "out", "--target", target)
    assert result.exit_code == 2
    for text in ("3 slots of features, and a pre-norm last hidden state", "--layers 2,16,29", "--taps identify"):
        assert text in result.stderr
    bare = eyas("standardize", source, tmp_path / "out", "--target", target, "--taps", "2,4,6")
    assert bare.exit_code == 2
    assert "another tensor in every system" in bare.stderr
    assert not (tmp_path / "out").exists()


def test_identify_takes_nothing_that_is_not_certain(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "speculators-by-others", tmp_path / "noise")
    for path in (tmp_path / "noise").rglob("hs_*.safetensors"):
        tensors = load_file(path)
        tensors["hidden_states"][:, 1] = torch.randn_like(tensors["hidden_states"][:, 1])
        save_file(tensors, path)
    result = eyas(
        "standardize", tmp_path / "noise", tmp_path / "out", "--target", inputs / "target", "--taps", "identify"
    )
    assert result.exit_code == 1
    assert "is not certain what slot 1 is" in result.stderr
    assert not (tmp_path / "out").exists()


def test_identify_finds_a_last_hidden_that_is_not_what_the_format_says(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "speculators-by-others", tmp_path / "normed")
    eps = 1e-6
    weight = load_file(inputs / "target" / "model.safetensors")["model.norm.weight"]
    for path in (tmp_path / "normed").rglob("hs_*.safetensors"):
        tensors = load_file(path)
        last = tensors["hidden_states"][:, -1]
        tensors["hidden_states"][:, -1] = weight * last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps)
        save_file(tensors, path)
    arguments = ["standardize", tmp_path / "normed", tmp_path / "out", "--target", inputs / "target"]
    result = eyas(*arguments, "--taps", "identify")
    assert result.exit_code == 0, result.output
    assert f"taps {TAPS}, last_hidden final" in result.stdout


def test_too_many_rejects_fail_the_run_after_the_rest(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "speculators", tmp_path / "bad")
    bad = tmp_path / "bad" / "hidden_states" / "hs_3.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    arguments = ["standardize", tmp_path / "bad", tmp_path / "out", "--target", inputs / "target"]
    result = eyas(*arguments)
    assert result.exit_code == 1
    assert "rejected: " in result.stderr
    assert "hs_3.safetensors: cannot be read, truncated" in result.stderr
    assert "1 of 30 samples were rejected, more than --max-rejects" in result.stderr
    assert Dataset.open(tmp_path / "out").num_samples == NUM_SAMPLES - 1
    assert eyas(*arguments, "--max-rejects", "0.1").exit_code == 0
    looked = eyas("inspect", tmp_path / "bad", "--json")
    assert looked.exit_code == 0
    assert list(json.loads(looked.stdout)["bad"]) == ["hidden_states/hs_3.safetensors"]
    assert eyas("inspect", tmp_path / "bad", "--verify").exit_code == 1


def test_dry_run_writes_nothing(inputs: Path, tmp_path: Path) -> None:
    foreign = eyas("standardize", inputs / "speculators", tmp_path / "out", "--target", inputs / "target", "--dry-run")
    assert foreign.exit_code == 0, foreign.output
    assert f"taps:                      {TAPS}" in foreign.stdout
    out = eyas("standardize", inputs / "standard", tmp_path / "out", "--format", "vllm", "--dry-run")
    assert out.exit_code == 0, out.output
    assert f"{NUM_SAMPLES} left, 0 done" in out.stdout
    assert not (tmp_path / "out").exists()


def test_max_disk_stops_with_75_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    arguments = ["standardize", inputs / "standard", tmp_path / "out", "--format", "vllm", "--max-disk", "100KB"]
    codes = []
    while not codes or codes[-1] == 75:
        codes.append(eyas(*arguments).exit_code)
        for path in (tmp_path / "out").glob("*.safetensors"):
            path.replace(tmp_path / path.name)
    assert codes[-1] == 0
    assert len(codes) > 2
    for path in (inputs / "vllm").glob("*.safetensors"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_draft_vocabulary_goes_along(inputs: Path, tmp_path: Path) -> None:
    arguments = ["standardize", inputs / "standard", tmp_path / "out", "--format", "speculators"]
    refused = eyas(*arguments, "--draft-vocab-size", "64")
    assert refused.exit_code == 2
    assert "--target" in refused.stderr
    result = eyas(*arguments, "--draft-vocab-size", "64", "--target", inputs / "target")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").glob("*.npy")} == {"d2t-64.npy", "t2d-64.npy"}


def test_the_norm_is_applied_with_the_target(inputs: Path, tmp_path: Path) -> None:
    arguments = ["standardize", inputs / "standard", tmp_path / "out", "--format", "specforge"]
    assert "--target" in eyas(*arguments).stderr
    assert eyas(*arguments, "--target", inputs / "target").exit_code == 0
    result = eyas("standardize", tmp_path / "out", tmp_path / "again", "--target", inputs / "target")
    assert result.exit_code == 0, result.output
    assert "last_hidden final" in result.stdout


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("standard", ["--prepared", "prepared"], "--prepared: standard is an eyas dataset"),
        ("standard", ["--max-disk", "1GB"], "--max-disk: standard is an eyas dataset"),
        (
            "standard",
            ["--format", "vllm", "--taps", "after:1"],
            "--taps: with --format the dataset is written as it is",
        ),
        ("vllm", ["--format", "speculators"], "--format: vllm is no eyas dataset"),
        ("vllm", ["--dtype", "float16"], "--dtype: vllm is no eyas dataset"),
        ("vllm", [], "give its --target"),
        ("nowhere", [], "'nowhere' does not exist"),
    ],
)
def test_wrong_usage(inputs: Path, monkeypatch, source: str, options: list[str], message: str) -> None:
    monkeypatch.chdir(inputs)
    result = eyas("standardize", source, "out", *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_describe_prints_a_description(inputs: Path) -> None:
    result = eyas("standardize", "--describe", inputs / "vllm-by-others")
    assert result.exit_code == 0, result.output
    assert "safetensors" in result.stdout


def test_inspect_says_what_a_foreign_folder_is(inputs: Path, tmp_path: Path) -> None:
    result = eyas("inspect", inputs / "speculators-by-others", "--target", inputs / "target")
    assert result.exit_code == 0, result.output
    for text in ("speculators 0.9: Arrow dataset", "3 slots of 32, and a pre-norm last hidden state, float32",
                 "after:1,after:3,after:4: a guess by their number", "30 in 30 files", "of them trained"):  # fmt: skip
        assert text in result.stdout, result.stdout
    nan = tmp_path / "nan"
    shutil.copytree(inputs / "vllm-by-others", nan)
    path = sorted(nan.glob("*.safetensors"))[0]
    tensors = load_file(path)
    tensors["hidden_states"][0, 2, 5] = float("nan")
    save_file(tensors, path)
    body = json.loads(eyas("inspect", nan, "--json").stdout)
    assert body["bad"] == {path.name: "1 values are NaN or Inf"}
    assert [slot["nonfinite"] for slot in body["slots"]] == [0, 0, 1, 0]
    (tmp_path / "empty").mkdir()
    assert "in none of the formats known" in eyas("inspect", tmp_path / "empty").stderr


@pytest.mark.parametrize("command", ["inspect", "status", "check", "train", "eval", "export", "standardize"])
def test_a_path_that_does_not_exist_is_wrong_usage(command: str) -> None:
    more = {"train": ["run", "--target", "."], "export": ["out", "--engine", "vllm"], "standardize": ["out"]}
    assert eyas(command, "/nowhere", *more.get(command, [])).exit_code == 2


def test_tokens_of_other_rows_are_rejected_by_name(inputs: Path, tmp_path: Path) -> None:
    prepare_rows(tmp_path / "others", inputs / "target", tokenized_rows(5, seed=9))
    options = ["--target", inputs / "target", "--taps", f"{TAPS},after:7", "--prepared", tmp_path / "others"]
    result = eyas("standardize", inputs / "vllm-by-others", tmp_path / "out", *options)
    assert result.exit_code == 1
    assert "none of its 30 samples can be used" in result.stderr
    assert "has these" in result.stderr


def test_a_damaged_shard_is_not_handed_on(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "standard", tmp_path / "standard")
    shard = sorted((tmp_path / "standard" / "shards").iterdir())[0]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.unlink()  # it may be a link to the captured one
    shard.write_bytes(content)
    for name in ("speculators", "modelopt"):
        result = eyas("standardize", tmp_path / "standard", tmp_path / name, "--format", name)
        assert result.exit_code == 1
        assert shard.name in result.stderr
        assert not (tmp_path / name / "eyas.json").exists()


def test_taps_that_the_folder_itself_contradicts_are_refused(inputs: Path, tmp_path: Path) -> None:
    for option in (["--taps", "after:2,after:3,after:5"], ["--layers", "1,3,5", "--convention", "vllm@0.32.0"]):
        result = eyas("standardize", inputs / "speculators", tmp_path / "out", "--target", inputs / "target", *option)
        assert result.exit_code == 1
        assert f"says itself that it holds {TAPS}" in result.stderr
        assert not (tmp_path / "out").exists()


def test_a_finished_export_says_what_became_of_its_files(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "speculators", tmp_path / "out")
    again = ["standardize", inputs / "standard", tmp_path / "out", "--format", "speculators"]
    assert "when it was finished" not in eyas(*again).stderr
    file = tmp_path / "out" / "hidden_states" / "hs_3.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    result = eyas(*again)
    assert result.exit_code == 0
    assert "when it was finished" in result.stderr


def test_a_pipe_among_the_files_is_rejected_and_not_waited_for(inputs: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(inputs / "speculators-by-others", source)
    for name in ("hs_0.safetensors", "hs_4.safetensors"):
        (source / "hidden_states" / name).unlink()
        os.mkfifo(source / "hidden_states" / name)
    result = eyas("standardize", source, tmp_path / "out", "--target", inputs / "target", "--taps", TAPS,
                  "--max-rejects", 0.5)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "2 samples were rejected" in result.stderr
    assert "no regular file" in result.stderr
    assert eyas("inspect", source, "--verify").exit_code in (0, 1)


def test_a_missing_mask_is_refused_before_the_target_runs(inputs: Path, tmp_path: Path) -> None:
    result = eyas("standardize", inputs / "vllm-by-others", tmp_path / "out", "--target", inputs / "target", "--taps",
                  "identify")  # fmt: skip
    assert result.exit_code == 1
    assert "--prepared" in result.stderr
    assert "replay" not in result.stderr


def test_an_export_with_the_norm_applied_is_not_gone_on_without_it(inputs: Path, tmp_path: Path) -> None:
    source, out = inputs / "standard", tmp_path / "out"
    assert eyas("standardize", source, out, "--format", "modelopt", "--target", inputs / "target").exit_code == 0
    result = eyas("standardize", source, out, "--format", "modelopt")
    assert result.exit_code == 1
    assert "another export" in result.stderr
