"""The engines' command lines, and drafts that are not served."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.align.made import HEADS, H, draft_config, make_dataset, make_identity
from tests.serve.folder import Folder

IDS = "eagle_aux_hidden_state_layer_ids"
NUM_LAYERS = 32


@pytest.fixture
def target(folder: Folder) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": NUM_LAYERS,
        "hidden_size": H, "num_attention_heads": HEADS, "vocab_size": 96,
    }  # fmt: skip
    (folder.target / "config.json").write_text(json.dumps(config))
    return folder.target


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "standard", make_identity("after:1,after:15,after:28", num_layers=NUM_LAYERS))


def draft(folder: Path, **ids: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft_config(**ids)))
    return folder


def command(output: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith("command:"))
    return shlex.split(line.removeprefix("command:"))


def test_vllm(folder: Folder, target: Path, tmp_path: Path) -> None:
    head = draft(tmp_path / "draft", **{IDS: [2, 16, 29]})
    result = folder.start("--draft", head, "--tp", 2, "--draft-tokens", 5, "--dry-run", "--", "--enforce-eager")
    assert result.exit_code == 0, result.output
    assert command(result.stdout) == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--host", "127.0.0.1",
        "--port", str(folder.port), "--tensor-parallel-size", "2", "--speculative-config",
        json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}), "--enforce-eager",
    ]  # fmt: skip
    assert "after:1,after:15,after:28" in result.stdout
    assert not folder.path.exists()


def test_a_dry_run_as_json(folder: Folder, target: Path) -> None:
    plain = folder.start("--tp", 2, "--dry-run", "--", "--enforce-eager")
    report = json.loads(folder.start("--tp", 2, "--dry-run", "--json", "--", "--enforce-eager").stdout)
    assert report["options"]["--tp"] == {"value": 2, "source": "given"}
    assert report["options"]["--host"] == {"value": "127.0.0.1", "source": "default"}
    assert report["options"]["--draft"]["value"] is None
    assert report["options"]["run_folder"]["value"] == str(folder.path)
    assert report["options"]["options"]["value"] == ["--enforce-eager"]
    assert shlex.split(report["plan"]["command"]) == command(plain.stdout)


def test_a_probe_runs_in_vllms_workers(folder: Folder, target: Path, tmp_path: Path) -> None:
    options = ["--draft", draft(tmp_path / "draft", **{IDS: [2, 16, 29]}), "--probe"]
    found = command(folder.start(*options, "--dry-run").stdout)
    assert found[-2:] == ["--worker-extension-cls", "eyas.serve.probe.Probe"]
    assert folder.start(*options).exit_code == 0
    assert folder.restart("--no-probe").exit_code == 0
    assert folder.status()["config"]["probe"] is False


def test_sglang(folder: Folder, target: Path, tmp_path: Path) -> None:
    head = draft(tmp_path / "draft", eagle_config={IDS: [1, 15, 28]})
    options = ["--draft", head, "--tp", 2, "--dry-run"]
    start = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), "--host", "127.0.0.1",
        "--port", str(folder.port), "--tp-size", "2", "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(head),
    ]  # fmt: skip
    chain = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    assert command(folder.start(*options, engine="sglang").stdout) == [*start, *chain]
    tree = ["--speculative-eagle-topk", "4", "--speculative_num_draft_tokens=16"]
    assert command(folder.start(*options, "--", *tree, engine="sglang").stdout) == [*start, *chain[:2], *tree]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_with_a_draft_runs(folder: Folder, target: Path, dataset: Path, tmp_path: Path, engine: str) -> None:
    ids = {IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}
    options = ("--draft", draft(tmp_path / "draft", **ids), "--dataset", dataset)
    result = folder.start(*options, engine=engine)
    assert result.exit_code == 0, result.output
    assert f"draft    {tmp_path / 'draft'}, 3 tokens a cycle" in result.stdout
    assert folder.restart("--draft", draft(tmp_path / "better", **ids)).exit_code == 0
    assert folder.status()["config"]["draft"] == str(tmp_path / "better")


def test_a_draft_that_would_be_fed_other_taps_is_not_served(
    folder: Folder, target: Path, dataset: Path, tmp_path: Path
) -> None:
    """The seed of this project: ids written for one engine, read by another."""
    head = draft(tmp_path / "draft", **{IDS: [1, 15, 28]})
    result = folder.start("--draft", head, "--dataset", dataset)
    assert result.exit_code == 3
    assert "every tap is 1 layer too early" in result.stderr
    assert f"{head} is not served" in result.stderr
    assert folder.status()["condition"] == "none" if folder.path.exists() else True


def test_a_reading_that_may_be_wrong_is_not_served(folder: Folder, target: Path, dataset: Path, tmp_path: Path) -> None:
    """vLLM's two model runners read a nested list in two ways, and the config does not say which runs."""
    head = draft(tmp_path / "draft", eagle_config={IDS: [1, 15, 28]})
    assert folder.start("--draft", head, "--dataset", dataset).exit_code == 3


def test_a_draft_of_another_width_is_not_served_and_a_target_that_is_none_neither(
    folder: Folder, target: Path, tmp_path: Path
) -> None:
    head = draft(tmp_path / "draft", **{IDS: [2, 16, 29]}, target_hidden_size=2 * H)
    result = folder.start("--draft", head)
    assert result.exit_code == 3
    assert f"the draft expects taps of width {2 * H}" in result.stderr
    assert folder.start().exit_code == 0
    result = folder.restart("--target", tmp_path)
    assert result.exit_code == 2
    assert "no config.json there" in result.stderr
    assert folder.status()["condition"] == "healthy"


def test_a_refused_draft_leaves_the_running_server_alone(
    folder: Folder, target: Path, dataset: Path, tmp_path: Path
) -> None:
    assert folder.start().exit_code == 0
    pid = folder.status()["pid"]
    head = draft(tmp_path / "draft", **{IDS: [1, 15, 28]})
    assert folder.restart("--draft", head, "--dataset", dataset).exit_code == 3
    assert folder.status()["pid"] == pid


def test_without_a_dataset_what_is_fed_is_shown_and_what_cannot_be_is_refused(
    folder: Folder, target: Path, tmp_path: Path
) -> None:
    elsewhere = draft(tmp_path / "elsewhere", **{IDS: [3, 17, 30]})
    result = folder.start("--draft", elsewhere, "--dry-run", engine="sglang")
    assert result.exit_code == 0
    assert "warning   taps" in result.stdout
    assert "where this engine does not look" in result.stdout
    result = folder.start("--draft", draft(tmp_path / "odd", eagle_config={IDS: [1, 15, 28]}), "--dry-run")
    assert result.exit_code == 0
    assert "model runner V1" in result.stdout
    assert "model runner V2" in result.stdout
    result = folder.start("--draft", draft(tmp_path / "draft", **{IDS: [2, 16, 99]}))
    assert result.exit_code == 3
    assert "nothing it can feed" in result.stderr


def test_another_models_dataset(folder: Folder, target: Path, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "standard", make_identity("after:1,after:15,after:28", num_layers=40))
    result = folder.start("--draft", draft(tmp_path / "draft", **{IDS: [2, 16, 29]}), "--dataset", dataset)
    assert result.exit_code == 3
    assert "the draft was trained on another model's hidden states" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--", "--port=1"], "--port behind --: eyas sets it; give --port before the --"),
        (["--", "--tensor_parallel_size", "2"], "give --tp before the --"),
        (["--", "--uds", "/tmp/socket"], "eyas waits for health by plain HTTP"),
        (["--dataset", "."], "--dataset"),
        (["--probe"], "it needs --engine vllm and --draft"),
        (["--draft", ".", "--", "--speculative-config.method", "ngram"], "--draft sets it; give one of the two"),
    ],
)
def test_contradictions(folder: Folder, options: list[str], said: str) -> None:
    result = folder.start(*options)
    assert result.exit_code == 2
    assert said in result.stderr
