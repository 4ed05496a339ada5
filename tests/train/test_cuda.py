"""The loop on a GPU: compiled, in bfloat16 with float32 masters, read through pinned buffers. `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.shards.dataset import Dataset
from eyas.train.metrics import read_metrics
from eyas.train.reader import BatchReader, Job
from eyas.train.samples import read_samples
from tests.train.tiny_run import make_inputs, run_training, train_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FlexAttention compiles for heads of 16 and wider only."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, hidden_size=64)
    return folder


def test_batches_on_the_gpu_are_those_on_the_cpu(inputs: Path) -> None:
    dataset = Dataset.open(inputs / "standard")
    table = read_samples(dataset)
    draw = np.random.default_rng(0)
    jobs = [Job(draw.choice(len(table), 3, replace=False), n) for n in range(60)]

    def reader(device: str) -> BatchReader[int]:
        return BatchReader(
            dataset, table, jobs, num_rows=128, fixed=True, device=torch.device(device), dtype=torch.float32,
            num_steps=3, threads=4,
        )  # fmt: skip

    with reader("cuda:0") as ours, reader("cpu") as theirs:
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.tag == other.tag
            assert mine.num_rows == other.num_rows
            for name, value in vars(other.batch).items():
                found = vars(mine.batch)[name]
                if isinstance(value, torch.Tensor):
                    assert torch.equal(found.cpu().nan_to_num(), value.nan_to_num()), name
                else:
                    assert found == value
            torch.cuda._sleep(1_000_000)  # the next copies must not reach this batch's memory while it is in use


def test_training_on_the_gpu_follows_the_cpu(inputs: Path) -> None:
    cpu = train_config(inputs, "on a cpu", noise=0.0, epochs=None, max_steps=20)
    run_training(cpu)
    for dtype, tolerance in (("float32", 0.01), ("bfloat16", 0.05)):
        gpu = train_config(
            inputs, f"on a gpu {dtype}", noise=0.0, epochs=None, max_steps=20, device="cuda", dtype=dtype
        )
        summary = run_training(gpu)
        assert summary.finished
        ours, theirs = read_metrics(gpu.run), read_metrics(cpu.run)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], abs=tolerance)


def test_a_stopped_run_goes_on(inputs: Path) -> None:
    config = train_config(
        inputs, "stopped on a gpu", device="cuda", dtype="bfloat16", epochs=None, max_steps=30, batches_per_step=2
    )
    assert run_training(config, stop_after=13).stopped == "signal"
    assert run_training(config).finished
    steps = [line["step"] for line in read_metrics(config.run) if line["kind"] == "train"]
    assert steps == list(range(1, 31))
