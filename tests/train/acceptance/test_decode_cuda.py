"""Decoding and held-out acceptance on a GPU, in the dtype that engines serve in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from eyas.cli.main import main
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TAPS = "after:1,after:3,after:5"


def eyas(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    target = tiny.make_target(path / "target", hidden_size=256, intermediate_size=512)
    tiny.prepare_rows(path / "prepared", target, tiny.tokenized_rows(60, min_tokens=8))
    eyas("capture", path / "prepared", path / "captured", "--target", target, "--taps", TAPS)
    eyas("standardize", path / "captured", path / "standard", "--taps", TAPS)
    eyas("train", path / "standard", path / "run", "--target", target, "--max-steps", 20, "--batch-tokens", 256)
    tiny.write_jsonl(path / "prompts.jsonl", [{"turns": [f"w{n} w{n + 1}", f"w{2 * n}"]} for n in range(6)])
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_output_is_plains_but_for_rounding(dtype: str, folder: Path) -> None:
    report: Any = json.loads(
        eyas(
            "eval", folder / "run", "--decode", folder / "prompts.jsonl", "--dataset", folder / "standard", "--dtype",
            dtype, "--baselines", "--max-new-tokens", 64, "--json", "--steps", "1..4",
        )
    )  # fmt: skip
    assert report["device"] == "cuda"
    for draft in report["decoding"]["drafts"]:
        assert draft["num_unexplained"] == 0
        if dtype == "float32":
            assert draft["num_identical"] == draft["num_turns"]
    assert all(found["accepted_length"] >= 1 for found in report["held_out"].values())


def test_regenerated_answers_are_the_cpus(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"w{n}"}, {"role": "assistant", "content": "w"}]} for n in range(9)
    ]
    source = tiny.write_jsonl(tmp_path / "x.jsonl", rows)
    answers = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        eyas("regenerate", source, out, "--target", folder / "target", "--device", device, "--max-new-tokens", 16)
        answers.append({row["id"]: row["input_ids"] for row in map(json.loads, out.read_text().splitlines())})
    assert answers[0] == answers[1]
