"""A draft that eyas trained, in vLLM's server: greedy output is plain's, accepted length as `eyas eval` foretold."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eyas.cli.main import main
from tests import tiny
from tests.capture.test_regenerate import questions
from tests.engines.regenerating import CLEAR_MARGIN, margin, rows_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

GREEDY = ("--temperature", 0, "--max-new-tokens", 40)


def eyas(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_accepts_what_eval_foretold_and_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.make_target(tmp_path / "target", num_layers=4, hidden_size=128)
    of_target, on_cpu = ("--target", target), ("--device", "cpu")
    asked = questions(60, turns=1)
    source = tiny.write_jsonl(tmp_path / "questions.jsonl", asked)
    plain = tmp_path / "plain.jsonl"
    eyas("regenerate", source, plain, *of_target, *on_cpu, *GREEDY)
    eyas("prepare", plain, tmp_path / "prepared", *of_target, "--workers", 1)
    eyas(
        "capture",
        tmp_path / "prepared",
        tmp_path / "captured",
        *of_target,
        *on_cpu,
        "--taps",
        "after:0,after:1,after:2",
    )
    eyas("standardize", tmp_path / "captured", tmp_path / "standard", "--taps", "after:0,after:1,after:2")
    eyas("train", tmp_path / "standard", tmp_path / "run", *of_target, *on_cpu, "--epochs", 12, "--batch-tokens", 256,
         "--learning-rate", 3e-3, "--validation", 0)  # fmt: skip
    draft = tmp_path / "draft"
    eyas("export", tmp_path / "run", draft, "--engine", "vllm@0.32.0")
    prompts = tiny.write_jsonl(
        tmp_path / "prompts.jsonl", [{"turns": [row["conversations"][0]["value"]]} for row in asked]
    )
    decode = ("--decode", prompts, "--max-new-tokens", 40, "--json", *of_target)
    foretold = _drafted(eyas("eval", draft, *decode, "--dtype", "float32", *on_cpu, "--engine", "vllm@0.32.0",
                             "--draft-tokens", 3))  # fmt: skip
    assert foretold["accepted_length"] > 1.2

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python, url = os.environ.get("EYAS_VLLM_PYTHON", sys.executable), f"http://127.0.0.1:{port}"
    eyas("serve", "start", tmp_path / "serving", "--engine", "vllm", "--python", python, *of_target, "--draft", draft,
         "--dataset", tmp_path / "standard", "--port", port, "--", "--dtype", "float32", "--enforce-eager")  # fmt: skip
    try:
        served = _drafted(eyas("eval", "--endpoint", url, *decode))
        eyas("regenerate", source, tmp_path / "served.jsonl", *of_target, *GREEDY, "--endpoint", url)
    finally:
        eyas("serve", "stop", tmp_path / "serving")
    assert abs(served["accepted_length"] - foretold["accepted_length"]) < 0.05, (served, foretold)
    answers = rows_of(tmp_path / "served.jsonl")
    clear = {row_id: row for row_id, row in rows_of(plain).items() if margin(target, row) > CLEAR_MARGIN}
    assert len(clear) > 0.8 * len(answers)
    assert {row_id: answers[row_id] for row_id in clear} == clear


def _drafted(report: str) -> Any:
    (found,) = json.loads(report)["decoding"]["drafts"]
    return found
