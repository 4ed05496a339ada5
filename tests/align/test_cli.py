"""`eyas check` and `eyas export` from outside: text, JSON, exit statuses, files left behind."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from eyas.taps.notation import after
from tests.align.made import draft_config, draft_tensors, make_dataset, make_draft, make_identity
from tests.align.states import build_target, make_world, store
from tests.tiny import add_tokenizer, make_target

IDS = "eagle_aux_hidden_state_layer_ids"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    identity = make_identity("after:2,after:30,after:58", model_class="KimiK25ForConditionalGeneration", num_layers=61)
    return make_dataset(tmp_path / "kimi", identity)


def draft(folder: Path, ids: list[int]) -> Path:
    return make_draft(folder, draft_config(eagle_config={IDS: ids}), draft_tensors())


@pytest.mark.parametrize(
    ("ids", "options", "status"),
    [([2, 30, 58], [], 3), ([3, 31, 59], [], 0), ([3, 31, 59], ["--strict"], 3)],
)
def test_exit_status(tmp_path: Path, kimi: Path, ids: list[int], options: list[str], status: int) -> None:
    result = run("check", kimi, "--draft", draft(tmp_path / "draft", ids), "--engine", "sglang@0.5.23", *options)
    assert result.exit_code == status, result.output


def test_text_is_plain_and_names_the_mend(tmp_path: Path, kimi: Path) -> None:
    result = run("check", kimi, "--draft", draft(tmp_path / "draft", [2, 30, 58]), "--engine", "sglang@0.5.23")
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("mismatch  taps")
    assert f'sglang@0.5.23: "eagle_config": {{"{IDS}": [3, 31, 59]}}' in result.output
    assert f'vllm: "{IDS}": [3, 31, 59]' in result.output
    assert lines[-1].endswith("1 mismatch, 1 unknown")


def test_json(tmp_path: Path, kimi: Path) -> None:
    result = run(
        "check", kimi, "--draft", draft(tmp_path / "draft", [2, 30, 58]), "--engine", "sglang@0.5.23", "--json"
    )
    body = json.loads(result.output)
    assert result.exit_code == 3
    assert body["counts"]["mismatch"] == 1
    assert body["findings"][0]["source"].startswith("sglang 0.5.13 to 0.5.23, srt/")


def test_the_mend_mends(tmp_path: Path, kimi: Path) -> None:
    """Writing the fragment that check prints into the draft's config makes it pass, for every engine."""
    for engine in ("sglang@0.5.12", "sglang@0.5.23", "vllm@0.24.0", "vllm@0.32.0"):
        folder = make_draft(tmp_path / engine, draft_config(), draft_tensors())
        before = json.loads(run("check", kimi, "--draft", folder, "--engine", engine, "--json").output)
        (taps,) = [finding for finding in before["findings"] if finding["check"] == "taps"]
        line = next(line for line in taps["mend"].splitlines() if line.startswith(f"{engine}: "))
        fragment = json.loads("{" + line.removeprefix(f"{engine}: ") + "}")
        make_draft(folder, {**draft_config(), **fragment})
        assert run("check", kimi, "--draft", folder, "--engine", engine).exit_code == 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--engine", "tgi"], 2, "expected one of sglang, vllm, trtllm, transformers"),
        (["--engine", "sglang@new"], 2, "is no release"),
        (["--draft", "nowhere"], 2, "does not exist"),
        (["--engine-live", "vllm"], 2, "give --target and --draft"),
    ],
)
def test_wrong_usage(kimi: Path, options: list[str], status: int, words: str) -> None:
    result = run("check", kimi, *options)
    assert result.exit_code == status
    assert words in result.output


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("option", ["--engine-live", "--replay-in"])
def test_without_the_engine_the_extra_is_named(
    tmp_path: Path, kimi: Path, monkeypatch: pytest.MonkeyPatch, engine: str, option: str
) -> None:
    _uninstall(monkeypatch)
    result = run("check", kimi, "--draft", draft(tmp_path / "d", [3, 31, 59]), "--target", kimi, option, engine)
    assert result.exit_code == 1
    assert f"pip install 'eyas[{engine}]'" in result.output


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_of_a_draft_for_another_target_the_live_check_says_its_width_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """No engine is started for it: none is installed here."""
    monkeypatch.setattr(f"eyas.capture.engines.{engine}.load.installed_version", lambda: "0.1")
    target = add_tokenizer(build_target(tmp_path / "target", "LlamaForCausalLM"))
    dataset = store(tmp_path / "dataset", make_world(target, "float32", lengths=(24,)), (after(0), after(2)))
    folder = make_draft(tmp_path / "draft", draft_config(target_hidden_size=4096), {})
    options = ("--draft", folder, "--target", target, "--replay", 0, "--engine-live", engine, "--json")
    findings = json.loads(run("check", dataset, *options).stdout)["findings"]
    (live,) = [finding for finding in findings if finding["check"].startswith("live")]
    assert live["status"] == "mismatch"
    assert "width 4096" in live["found"]
    assert "layer" not in live["mend"]


def test_a_flipped_byte_passes_and_check_says_what_would_find_it(tmp_path: Path) -> None:
    target = add_tokenizer(build_target(tmp_path / "target", "LlamaForCausalLM"))
    dataset = store(tmp_path / "dataset", make_world(target, "float32", lengths=(24,)), (after(0), after(2)))
    (shard,) = (dataset / "shards").iterdir()
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    result = run("check", dataset)
    assert result.exit_code == 0, result.output
    said = f"Shards' bytes were not compared with their checksums: eyas inspect {dataset} --verify does"
    assert result.stdout.count(said) == 1
    assert run("inspect", dataset, "--verify").exit_code == 1


def test_a_replay_says_where_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--engine is what will serve: a replay runs in it where it can, and else in transformers."""
    _uninstall(monkeypatch)
    target = add_tokenizer(build_target(tmp_path / "target", "LlamaForCausalLM"))
    dataset = store(tmp_path / "dataset", make_world(target, "float32", lengths=(24,)), (after(0), after(2)))
    result = run("check", dataset, "--target", target, "--engine", "vllm", "--replay", 1)
    assert "ran in transformers: vllm is not installed here" in result.output
    monkeypatch.setattr("eyas.capture.engines.vllm.load.installed_version", lambda: "0.31.0")
    result = run("check", dataset, "--target", target, "--engine", "vllm@0.32.0", "--replay", 1)
    assert "ran in transformers: vllm 0.31.0 is installed here, and not 0.32.0" in result.output
    result = run("check", dataset, "--target", target, "--engine", "vllm@0.32.0", "--replay", 1, "--", "--tp", 2)
    assert result.exit_code == 2
    assert "no serving engine is started" in result.output


def _uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("eyas.capture.engines.vllm.load.version", missing)
    monkeypatch.setattr("eyas.capture.engines.sglang.load.version", missing)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "unreadable"), ("[]", "expected a JSON object"), ("{}", "hidden_size is None"), (None, "no config.json")],
)
def test_a_draft_that_is_none(tmp_path: Path, kimi: Path, content: str | None, words: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    result = run("check", kimi, "--draft", folder)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_truncated_draft(tmp_path: Path, kimi: Path) -> None:
    folder = draft(tmp_path / "draft", [3, 31, 59])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    result = run("check", kimi, "--draft", folder)
    assert result.exit_code == 1
    assert str(weights) in result.output


def test_a_pickle_that_would_run_code(tmp_path: Path, kimi: Path) -> None:
    import os
    import pickle

    folder = make_draft(tmp_path / "draft", draft_config())

    class Attack:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "owned"),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Attack()}))
    result = run("check", kimi, "--draft", folder)
    assert result.exit_code == 1
    assert not (tmp_path / "owned").exists()


def test_a_pickle_of_tensors(tmp_path: Path, kimi: Path) -> None:
    import torch

    folder = make_draft(tmp_path / "draft", draft_config(eagle_config={IDS: [3, 31, 59]}))
    torch.save(draft_tensors(), folder / "pytorch_model.bin")
    assert run("check", kimi, "--draft", folder, "--engine", "sglang@0.5.23").exit_code == 0


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Path]:
    """A dataset of 32 layers and its target's folder."""
    target = make_target(tmp_path / "target", num_layers=32, hidden_size=16, vocab_size=96, num_attention_heads=4)
    identity = make_identity("after:3,after:10,after:20", target={"name": str(target)})
    return make_dataset(tmp_path / "dataset", identity), target


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ("sglang@0.5.23", ["eagle_config", IDS]),
        ("vllm@0.32.0", [IDS]),
        ("vllm", [IDS]),
        ("sglang", ["eagle_config", IDS]),
    ],
)
def test_export_writes_what_the_engine_reads(
    tmp_path: Path, llama: tuple[Path, Path], engine: str, place: list[str]
) -> None:
    dataset, target = llama
    out = tmp_path / "out"
    result = run("export", dataset, out, "--engine", engine, "--target", target, "--draft-vocab-size", 32)
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    value = config
    for key in place:
        value = value[key]
    assert value == ([3, 10, 20] if "sglang" in engine else [4, 11, 21])
    assert config["draft_vocab_size"] == 32
    assert "<- not these taps" in result.output  # the other engine's reading
    checked = run("check", dataset, "--draft", out, "--engine", engine)
    assert checked.exit_code == 0, checked.output


def test_export_tells_trtllm_when_it_starts(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    dataset, target = llama
    result = run("export", dataset, tmp_path / "out", "--engine", "trtllm", "--target", target, "--json")
    body = json.loads(result.output)
    assert body["serving"] == '"speculative_config": {"eagle3_layers_to_capture": [3, 10, 20]}'
    assert IDS not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("taps", "model", "engine", "status", "words"),
    [
        ("after:0,after:10,after:31", "LlamaForCausalLM", "sglang@0.5.23", 1, "cannot be told to feed"),
        ("embed,after:10,after:20", "LlamaForCausalLM", "sglang@0.5.23", 1, "cannot be told to feed"),
        ("after:1,after:10,final", "LlamaForCausalLM", "vllm@0.32.0", 1, "the output of the last norm, has no id"),
        ("after:2,after:10,after:20", "DeepseekV3ForCausalLM", "sglang", 2, "read ids in different ways"),
        ("after:2,after:20", "LlamaForCausalLM", "sglang@0.5.11", 1, "builds its draft for 3 taps"),
        ("after:2,after:10,after:20", "LlamaForCausalLM", "transformers", 2, "serves no draft"),
    ],
)
def test_export_refuses_and_leaves_nothing(
    tmp_path: Path, taps: str, model: str, engine: str, status: int, words: str
) -> None:
    target = make_target(tmp_path / "target", num_layers=32, hidden_size=16, vocab_size=96, num_attention_heads=4)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": [model], "model_type": "-"}))
    dataset = make_dataset(tmp_path / "dataset", make_identity(taps, model_class=model))
    result = run("export", dataset, tmp_path / "out", "--engine", engine, "--target", target)
    assert result.exit_code == status, result.output
    assert words in result.output
    assert not (tmp_path / "out").exists()


def test_export_keeps_a_config_that_is_there(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    dataset, target = llama
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    result = run("export", dataset, tmp_path / "out", "--engine", "vllm", "--target", target)
    assert result.exit_code == 1
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_export_needs_the_target(tmp_path: Path, kimi: Path) -> None:
    result = run("export", kimi, tmp_path / "out", "--engine", "vllm")
    assert result.exit_code == 2
    assert "--target" in result.output
