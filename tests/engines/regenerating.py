"""`eyas regenerate` by a serving engine, stopped and killed on the way, against engine transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.capture.test_regenerate import questions
from tests.tiny import write_jsonl

NUM_CONVERSATIONS = 80
CLEAR_MARGIN = 1e-3  # of a chosen token's logit over the next: rounding moves these logits by 1e-5


def assert_greedy_answers_are_transformers(
    target: Path, folder: Path, engine: Sequence[object], options: Sequence[object], tp2: Mapping[str, str]
) -> None:
    """Three starts of the engine: one told to end by SIGTERM to its whole process group, one killed with two workers
    (``tp2`` in its environment), and one that goes on to the end. ``options``: the engine's own."""
    source = write_jsonl(folder / "questions.jsonl", questions(NUM_CONVERSATIONS))
    reference, out = folder / "reference.jsonl", folder / "out.jsonl"
    assert _started(source, reference, target, ["--device", "cpu"]).wait(timeout=200) == 0
    expected = {row_id: row for row_id, row in rows_of(reference).items() if margin(target, row) > CLEAR_MARGIN}
    assert len(expected) > 0.8 * NUM_CONVERSATIONS
    assert {row["finish"] for row in expected.values()} == {"stop", "length"}
    assert max(len(row["messages"]) for row in expected.values()) > 2

    few = [*engine, "--batch-size", 3, "--", *options]  # at a time, so that some are left
    process = _answering(source, out, target, few)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 75
    before = rows_of(out)
    assert 0 < len(before) < NUM_CONVERSATIONS

    process = _answering(source, out, target, [*engine, "--tp", 2, *few[len(engine) :]], **tp2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=100)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "a worker outlives its driver"
    assert len(before) < len(out.read_bytes().splitlines()) < NUM_CONVERSATIONS

    process = _started(source, out, target, [*engine, "--", *options])
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert len(out.read_text().splitlines()) == NUM_CONVERSATIONS
    found = rows_of(out)
    assert {row_id: found[row_id] for row_id in expected} == expected


def margin(target: Path, row: Mapping[str, Any]) -> float:
    """By how much each token of the answers was the best, at least."""
    from transformers import AutoModelForCausalLM

    ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["loss_mask"], dtype=torch.bool)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(target)(ids).logits[0, :-1]  # [T - 1, V]
    best = logits[mask[1:]].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def _started(source: Path, out: Path, target: Path, options: Sequence[object], **environment: str) -> Any:
    arguments = ["regenerate", source, out, "--target", target, "--temperature", 0, "--dtype", "float32",
                 "--max-new-tokens", 40, *options]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def _answering(source: Path, out: Path, target: Path, options: Sequence[object], **environment: str) -> Any:
    """Started, and some of its answers are there."""
    size = out.stat().st_size if out.exists() else 0
    process = _started(source, out, target, options, **environment)
    deadline = time.monotonic() + 250
    while not (out.exists() and out.stat().st_size > size + 2000):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process
