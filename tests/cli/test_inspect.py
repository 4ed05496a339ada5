"""`eyas inspect` from outside."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from eyas.cli.main import main
from eyas.shards.identity import create_or_match
from eyas.shards.ledger import read_ledgers
from tests.captured import HIDDEN_SIZE, captured_identity, hashes, make_samples, write_captured

NUM_SAMPLES = 12


@pytest.fixture
def identity():
    return captured_identity(num_samples=NUM_SAMPLES)


@pytest.fixture
def samples(identity):
    return make_samples(identity, NUM_SAMPLES)


@pytest.fixture
def captured(tmp_path: Path, identity, samples) -> Path:
    return write_captured(tmp_path / "captured", identity, samples)


@pytest.fixture
def standard(tmp_path: Path, captured) -> Path:
    result = eyas("standardize", captured, tmp_path / "standard", "--codec", "zstd")
    assert result.exit_code == 0, result.output
    return tmp_path / "standard"


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_report(captured, samples) -> None:
    before = hashes(captured)
    result = eyas("inspect", captured, "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    num_tokens = sum(sample.num_tokens for sample in samples)
    assert (body["num_samples"], body["num_tokens"]) == (NUM_SAMPLES, num_tokens)
    assert body["num_trained_tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert body["num_bytes"] == sum(path.stat().st_size for path in (captured / "shards").iterdir())
    assert body["plain_bytes"] == num_tokens * (5 * HIDDEN_SIZE * 2 + 5 + 8)
    assert [tap["tap"] for tap in body["taps"]] == ["embed", "after:1", "after:3", "after:5", "last_hidden (after:7)"]
    rows = torch.cat([sample.features for sample in samples]).view(num_tokens, 4, HIDDEN_SIZE).float()
    for slot in range(4):
        tap = body["taps"][slot]
        assert tap["mean_norm"] == pytest.approx(float(rows[:, slot].norm(dim=-1).mean()), rel=1e-4)
        assert tap["max_abs"] == pytest.approx(float(rows[:, slot].abs().max()), rel=1e-5)
        assert tap["lowest_mean_norm"] <= tap["mean_norm"] <= tap["highest_mean_norm"]
        assert tap["nonfinite"] == 0
    assert hashes(captured) == before


def test_text(standard) -> None:
    result = eyas("inspect", standard)
    assert result.exit_code == 0, result.output
    for text in ("standard dataset", "some/target", "codec zstd", "compression", "after:5", "problems  0"):
        assert text in result.stdout


def test_an_empty_dataset(tmp_path, identity) -> None:
    create_or_match(tmp_path / "empty", identity)
    assert "samples   0 of 12 prepared" in eyas("inspect", tmp_path / "empty").stdout
    assert eyas("inspect", tmp_path / "empty", "--sample", "first").exit_code == 1
    assert eyas("inspect", tmp_path / "empty", "--plot", tmp_path / "plot.png").exit_code == 1


@pytest.mark.parametrize("which", ["captured", "standard"])
def test_verify_names_every_bad_shard(request, which) -> None:
    dataset = request.getfixturevalue(which)
    good = eyas("inspect", dataset, "--verify")
    assert good.exit_code == 0, good.output
    assert "all as written" in good.stdout
    shards = sorted((dataset / "shards").iterdir())
    for shard in (shards[0], shards[-1]):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    result = eyas("inspect", dataset, "--verify")
    assert result.exit_code == 1
    assert shards[0].name in result.stderr
    assert shards[-1].name in result.stderr
    body = json.loads(eyas("inspect", dataset, "--verify", "--json").stdout)
    assert body["verified"] is False
    assert {problem["where"] for problem in body["bad"]} == {f"shards/{shards[n].name}" for n in (0, -1)}


def test_verify_sees_what_is_missing(captured, standard) -> None:
    gone = sorted((captured / "shards").iterdir())[0]
    gone.unlink()
    result = eyas("inspect", captured, "--verify")
    assert result.exit_code == 1
    assert gone.name in result.stderr
    (standard / "token_counts.safetensors").unlink()
    result = eyas("inspect", standard, "--verify")
    assert result.exit_code == 1
    assert "token_counts.safetensors" in result.stderr


def test_verify_counts_targets_again(standard) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = standard / "token_counts.safetensors"
    with safe_open(path, framework="numpy") as file:
        counts, metadata = file.get_tensor("counts"), file.metadata()
    counts[3] += 1
    save_file({"counts": counts}, path, metadata=metadata)
    result = eyas("inspect", standard, "--verify")
    assert result.exit_code == 1
    assert "differs from the shards" in result.stdout


def test_sample_without_its_tokenizer(captured, samples) -> None:
    result = eyas("inspect", captured, "--sample", samples[4].sample_id, "--json")
    assert result.exit_code == 0, result.output
    sample = json.loads(result.stdout)["sample"]
    assert sample["input_ids"] == samples[4].input_ids.tolist()
    assert sample["loss_mask"] == samples[4].loss_mask.tolist()
    assert sample["text"] is None
    assert "give its tokenizer with --target" in sample["note"]
    text = eyas("inspect", captured, "--sample", "first").stdout
    assert "not decoded" in text
    assert "tokens 0 to" in text


@pytest.mark.parametrize("wanted", ["0" * 16, "last"])
def test_a_sample_that_is_not_there(captured, wanted) -> None:
    result = eyas("inspect", captured, "--sample", wanted)
    assert result.exit_code == 1
    assert f"--sample {wanted}" in result.stderr


def test_sample_decoded_with_its_mask(tmp_path, samples, identity) -> None:
    from eyas.capture.tokenizer import load_tokenizer, tokenizer_identity
    from tests.tiny import make_target

    target = make_target(tmp_path / "target")
    tokenizer = load_tokenizer(target, None, False)
    own = replace(
        identity,
        target=replace(identity.target, name=str(target)),
        tokenizer=tokenizer_identity(target, tokenizer),
    )
    captured = write_captured(tmp_path / "own", own, samples)
    text = eyas("inspect", captured, "--sample", samples[0].sample_id).stdout
    shown, inside = [], 0
    for word in re.findall("[\u27e6\u27e7]|[^\\s\u27e6\u27e7]+", text[text.index("trained\n") + 8 :]):
        if word in "\u27e6\u27e7":
            inside = int(word == "\u27e6")
        else:
            shown.append((word, inside))
    ids, mask = samples[0].input_ids.tolist(), samples[0].loss_mask.tolist()
    assert shown == [(tokenizer.decode([token]), trained) for token, trained in zip(ids, mask, strict=True)]
    assert "is not the dataset's" not in text
    foreign = write_captured(tmp_path / "foreign", identity, samples)
    assert "is not the dataset's" in eyas("inspect", foreign, "--sample", "first", "--target", target).stdout


def test_plot(tmp_path, captured) -> None:
    pytest.importorskip("matplotlib")
    result = eyas("inspect", captured, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    result = eyas("inspect", captured, "--plot", tmp_path / "plot.docx")
    assert result.exit_code == 1
    assert ".png" in result.stderr


def test_plot_without_matplotlib_names_the_extra(tmp_path, captured, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = eyas("inspect", captured, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 1
    assert "pip install 'eyas[plot]'" in result.stderr


def test_a_prepared_folder(tmp_path) -> None:
    (tmp_path / "prepared").mkdir()
    body = {
        "format": "eyas-prepared",
        "format_version": 1,
        "fingerprint": "ab",
        "num_samples": 3,
        "target": "some/target",
    }
    body["counts"] = {"num_samples": 3, "num_tokens": 1234}
    (tmp_path / "prepared/prepared.json").write_text(json.dumps(body))
    result = eyas("inspect", tmp_path / "prepared")
    assert result.exit_code == 0, result.output
    assert "a prepared folder" in result.stdout
    assert "num_tokens: 1,234" in result.stdout
    assert json.loads(eyas("inspect", tmp_path / "prepared", "--json").stdout)["num_samples"] == 3


def test_ledgers_alone_say_what_is_there(captured) -> None:
    for shard in (captured / "shards").iterdir():
        shard.write_bytes(bytes(shard.stat().st_size))
    assert json.loads(eyas("inspect", captured, "--json").stdout)["num_samples"] == read_ledgers(captured).num_samples
