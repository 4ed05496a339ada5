"""The numbers a run writes down, and the file they are in."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from eyas.train.metrics import Acceptance, MetricsWriter, flops, peak_flops, read_metrics
from eyas.train.shape import DraftShape


def test_acceptance_by_hand() -> None:
    # 100 rows; 80 accepted at step 0, 60 of those at step 1 (of 75 that still have a row), 30 of 60 at step 2
    sums = [[50.0, 100, 80, 100, 75.0, 5.0], [40.0, 95, 60, 75, 57.0, 4.0], [30.0, 90, 30, 60, 45.0, 4.0]]
    found = Acceptance.from_sums(sums, [1.0, 0.5, 0.25])
    assert found.acceptance == [0.8, 0.8, 0.5]
    assert found.accepted_length == pytest.approx(1 + 0.8 + 0.64 + 0.32)
    assert found.loss == pytest.approx((50 + 20 + 7.5) / 100)
    assert found.overlap == [0.75, 0.6, 0.5]
    assert found.out_of_vocabulary == 0.05


def test_no_rows_are_no_error() -> None:
    assert Acceptance.from_sums([[0.0] * 6] * 2, [1.0, 1.0]).accepted_length == 1


def line(step: int, kind: str = "train") -> dict[str, object]:
    return {"kind": kind, "step": step, "loss": 0.5, "acceptance": [0.1, 0.2]}


def test_resuming_cuts_what_came_after_and_what_is_torn(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, step=0, tensorboard=False)
    for step in range(1, 6):
        writer.write(line(step))
    writer.write(line(5, "validation"))
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    writer = MetricsWriter(tmp_path, step=3, tensorboard=False)
    writer.write(line(4))
    writer.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0]["acceptance_1"] == "0.2"
    for text in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(text)


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(tmp_path, step=0, tensorboard=True)
    writer.write(line(1))
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "train/acceptance_1" in events.Tags()["scalars"]


def test_operations_of_the_shape_that_was_measured() -> None:
    """A Llama-3.1-8B-shaped draft, 8192 tokens of 2048-token documents, all of them with a loss."""
    shape = DraftShape(
        hidden_size=4096, target_hidden_size=4096, num_taps=3, intermediate_size=14336, num_layers=1, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=None, max_positions=8192,
        vocab_size=128256, draft_vocab_size=32000,
    )  # fmt: skip
    found = flops(shape, num_steps=3, num_tokens=8192, square_tokens=4 * 2048**2, num_rows=8192)
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    by_hand = 2 * (8192 * (2 * 3 * 4096 * 4096 + 9 * layer + 7 * 4096 * 32000) + 3 * 3.5 * 4096 * 4 * 2048**2)
    assert found == pytest.approx(by_hand)


def test_known_cards() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some other card") is None
