"""`eyas regenerate` and `eyas eval` against real vLLM servers, one of which speculates by n-grams.

EYAS_VLLM_PYTHON names the Python of an environment with vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eyas.capture.endpoints.prometheus import parse
from eyas.cli.main import main
from tests import tiny

PYTHON = os.environ.get("EYAS_VLLM_PYTHON", "")
TARGET = Path(os.environ.get("EYAS_TARGET") or Path(__file__).parents[2] / "demo" / "target")
STARTS_WITHIN_SECONDS = 240

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="no Python with vLLM (EYAS_VLLM_PYTHON)"),
    pytest.mark.skipif(not (TARGET / "config.json").exists(), reason="no real target (EYAS_TARGET, make demo)"),
]

QUESTIONS = [
    ["Name three rivers in Europe.", "Which of them is the longest?"],
    ["Repeat after me: one two three four five six seven one two three four five six seven."],
    ["Write a haiku about snow.", "Now one about rain.", "And one about wind."],
    ["What is 17 + 25?"],
]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _serve(tmp_path_factory.mktemp("plain") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _serve(tmp_path_factory.mktemp("speculating") / "log", "--speculative-config", json.dumps(NGRAM)) as url:
        yield url


@contextmanager
def _serve(log: Path, *options: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager", "--port", str(port), *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    with open(log, "wb") as written:
        running = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + STARTS_WITHIN_SECONDS
        while not _answers(url):
            assert running.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def eyas(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_answers_are_those_of_transformers_token_for_token(plain: str, tmp_path: Path) -> None:
    conversations = [
        {"conversations": [{"from": side, "value": text} for text in asked for side in ("human", "gpt")]}
        for asked in QUESTIONS
    ]
    source = tiny.write_jsonl(tmp_path / "x.jsonl", conversations)
    common = ("--target", TARGET, "--temperature", 0, "--max-new-tokens", 40, "--json")
    summary = eyas("regenerate", source, tmp_path / "served", *common, "--endpoint", plain)
    assert summary["endpoints"][0]["gives_tokens"]
    eyas("regenerate", source, tmp_path / "own", *common, "--device", "cpu", "--dtype", "float32")
    served, own = (
        {row["id"]: row for row in map(json.loads, (tmp_path / name).read_text().splitlines())}
        for name in ("served", "own")
    )
    assert served == own
    assert len(served) == len(QUESTIONS)


def test_sampled_answers_follow_from_their_seeds(plain: str, tmp_path: Path) -> None:
    source = tiny.write_jsonl(
        tmp_path / "x.jsonl",
        [
            {"messages": [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": "-"}]}
            for asked in QUESTIONS
        ],
    )
    answers = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        eyas(
            "regenerate", source, tmp_path / name, "--target", TARGET, "--endpoint", plain, "--batch-size", 1,
            "--max-new-tokens", 24, "--temperature", 1.0, "--seed", seed, "--json",
        )  # fmt: skip
        lines = (tmp_path / name).read_text().splitlines()
        answers.append({row["id"]: row["input_ids"] for row in map(json.loads, lines)})
    assert answers[0] == answers[1] != answers[2]


def test_acceptance_is_what_the_server_counts(speculating: str, tmp_path: Path) -> None:
    prompts = tiny.write_jsonl(
        tmp_path / "prompts.jsonl", [{"category": f"c{n % 2}", "turns": asked} for n, asked in enumerate(QUESTIONS)]
    )
    before = _counters(speculating)
    report = eyas(
        "eval", "--endpoint", speculating, "--target", TARGET, "--decode", prompts, "--max-new-tokens", 64, "--json"
    )
    after = _counters(speculating)
    (tally,) = report["decoding"]["drafts"]
    assert report["foreign_requests"] == 0
    assert tally["reached"][0] == after["drafts"] - before["drafts"] > 0
    assert tally["accepted"] == [
        there - then for there, then in zip(after["accepted"], before["accepted"], strict=True)
    ]
    assert tally["accepted_length"] > 1
    assert set(tally["categories"]) == {"c0", "c1"}


def _counters(url: str) -> dict[str, Any]:
    time.sleep(1)
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        found = parse(response.read().decode())
    return {
        "drafts": found.get("vllm:spec_decode_num_drafts_total"),
        "accepted": found.positions("vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    }
