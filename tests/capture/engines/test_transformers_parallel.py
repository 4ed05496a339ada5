"""Tensor-parallel groups and independent groups, as processes on the CPU with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.shards.dataset import Dataset
from eyas.taps.notation import EMBED, FINAL, after
from tests.capture.engines.families import run_capture, token_samples

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = [5, 9, 14, 3, 20, 11, 8, 17, 2, 65]  # the last is too long for the targets
TAPS = (EMBED, after(0), after(2), FINAL)
# Plans that split heads (Llama), experts too (Qwen3-MoE), experts alone (DeepSeek-V3's MLA is replicated), and a
# multimodal wrapper's text model.
FAMILIES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen2_5_VLForConditionalGeneration")


def launch(folder: Path, world_size: int, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run ``jobs`` on ``world_size`` ranks: [rank][job] outcomes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "typings"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.capture.engines.rank", str(folder / "jobs.json")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            _, stderr = rank.communicate(timeout=240)
            assert rank.returncode == 0, stderr[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(world_size)]


def job(target: Path, dataset: Path, **options: Any) -> dict[str, Any]:
    return {
        "target": str(target),
        "dataset": str(dataset),
        "taps": ",".join(map(str, TAPS)),
        "last_hidden": "after:3",
        "lengths": LENGTHS,
        "batch_tokens": 40,
        "tp": 1,
    } | options


def by_id(dataset: Path) -> dict[str, Any]:
    samples = list(Dataset.open(dataset).iter_samples())
    assert len({sample.sample_id for sample in samples}) == len(samples)
    return {sample.sample_id: sample for sample in samples}


def assert_equal_to_one_process(dataset: Path, target: Path, folder: Path) -> None:
    alone = run_capture(target, folder, token_samples(LENGTHS), taps=TAPS, batch_tokens=40)
    captured = by_id(dataset)
    assert captured.keys() == set(alone.sealed_ids)
    for name, sample in captured.items():
        expected = alone.dataset.sample(name)
        for got, wanted in ((sample.features, expected.features), (sample.last_hidden, expected.last_hidden)):
            assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5
        assert torch.equal(sample.target_top1, expected.target_top1)
        torch.testing.assert_close(sample.target_lse, expected.target_lse, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.fixture(scope="module")
def tp_outcomes(
    targets: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Two ranks capture each family with --tp 2, and then are asked for the impossible."""
    folder = tmp_path_factory.mktemp("tp")
    jobs = [job(targets(family), folder / family, tp=2) for family in FAMILIES]
    jobs.append(job(targets("GPT2LMHeadModel"), folder / "gpt2", tp=2))
    jobs.append(job(targets("LlamaForCausalLM"), folder / "tp4", tp=4))
    return folder, launch(folder, 2, jobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_tp_2_equals_one_process_and_both_ranks_write(
    family: str, targets: Callable[[str], Path], tp_outcomes: Any, tmp_path: Path
) -> None:
    folder, outcomes = tp_outcomes
    n = FAMILIES.index(family)
    assert "error" not in outcomes[0][n] | outcomes[1][n]
    tokens = [outcomes[rank][n]["forwarded"] for rank in range(2)]
    assert sum(tokens) == sum(LENGTHS) - 65
    assert max(tokens) <= sum(tokens) * 0.7
    assert not set(outcomes[0][n]["sealed"]) & set(outcomes[1][n]["sealed"])
    assert [len(outcomes[rank][n]["rejected"]) for rank in range(2)] == [1, 0]  # by exactly one rank
    assert_equal_to_one_process(folder / family, targets(family), tmp_path / "alone")


def test_impossible_sizes_end_in_a_clear_error_on_every_rank(tp_outcomes: Any) -> None:
    _, outcomes = tp_outcomes
    for rank in range(2):
        assert "no tensor-parallel plan for gpt2" in outcomes[rank][-2]["error"]
        assert "4" in outcomes[rank][-1]["error"]


def test_independent_groups_cover_every_sample_once(targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets("LlamaForCausalLM")
    outcomes = launch(tmp_path, 2, [job(target, tmp_path / "dp2", batch_tokens=1)])
    sealed = [name for rank in range(2) for name in outcomes[rank][0]["sealed"]]
    assert len(sealed) == len(set(sealed)) == len(LENGTHS) - 1
    assert_equal_to_one_process(tmp_path / "dp2", target, tmp_path / "alone")


def test_two_groups_of_two(targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets("LlamaForCausalLM")
    outcomes = launch(tmp_path, 4, [job(target, tmp_path / "both", tp=2)])
    assert sum(outcomes[rank][0]["forwarded"] for rank in range(4)) == sum(LENGTHS) - 65
    assert_equal_to_one_process(tmp_path / "both", target, tmp_path / "alone")
