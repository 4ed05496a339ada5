"""A standard dataset of a tiny random target, and runs on it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from eyas.cli.main import main
from eyas.train.loop import TrainSummary, train
from eyas.train.optimizer import OptimizerOptions
from eyas.train.run import TrainConfig, plan_run
from tests.tiny import make_target, prepare_rows, tokenized_rows

TAPS = "after:1,after:3,after:5"


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def make_inputs(folder: Path, num_samples: int = 60, *, max_tokens: int = 40, **config: Any) -> None:
    """``folder``/target (of ``config``), /prepared, /captured and /standard."""
    target = make_target(folder / "target", **config)
    prepare_rows(folder / "prepared", target, tokenized_rows(num_samples, max_tokens=max_tokens))
    captured = folder / "captured"
    for arguments in (
        ("capture", folder / "prepared", captured, "--target", target, "--taps", TAPS, "--shard-size", "64KiB"),
        ("standardize", captured, folder / "standard"),
    ):
        result = eyas(*arguments)
        assert result.exit_code == 0, result.output


def train_command(folder: Path, run: str, *options: object) -> list[str]:
    """`eyas train` for a process of its own."""
    return [sys.executable, "-m", "eyas.cli.main", *map(str, train_arguments(folder, run, *options))]


def train_arguments(folder: Path, run: str, *options: object) -> list[object]:
    return [
        "train", folder / "standard", folder / run, "--target", folder / "target",
        "--draft-vocab-size", 64, "--batch-tokens", 128, "--learning-rate", 3e-3, "--optimizer", "adamw", *options,
    ]  # fmt: skip


def train_config(folder: Path, run: str, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        draft_vocab_size=64, init_from=None, draft_layers=None, draft_hidden_size=None, draft_switches=(),
        serving_engine="vllm@0.32.0", ttt_steps=3, loss="kl", step_weights=(1.0, 1.0, 1.0), batch_tokens=128,
        batches_per_step=1, overlong="truncate",
        optimizer=OptimizerOptions(
            optimizer="adamw", learning_rate=3e-3, schedule="cosine", warmup=0.1, weight_decay=0.01, clip=1.0
        ),
        noise=0.2, validation=0.1, seed=0, dtype="float32", epochs=2, max_steps=None,
        dataset=folder / "standard", run=folder / run, target=folder / "target", trust_remote_code=False,
        validate_every=None, save_every=None, keep=2, device="cpu", shard=False, compile=True, reader_threads=2,
        tensorboard=False, max_runtime_seconds=None,
    )  # fmt: skip
    return replace(config, **changes)


def run_training(config: TrainConfig, *, stop_after: int | None = None) -> TrainSummary:
    """Train in this process; with ``stop_after`` as if a signal came after so many of this start's steps."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return stop_after is not None and asked > stop_after

    return train(config, plan_run(config), should_stop=should_stop, listener=None)


def last_tensors(run: Path) -> dict[str, Tensor]:
    """Weights and optimizer state of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    files = (newest / "draft" / "model.safetensors", newest / "optimizer.safetensors")
    return {f"{path.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if not a[name].equal(b[name])]
    assert not different
