"""`eyas capture --engine vllm` against `--engine transformers`: the same datasets, whatever vLLM does in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eyas.shards import open_dataset
from tests.engines.world import World, assert_canaries, assert_same, capture, capture_command
from tests.kill import kill_all

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

Worlds = Callable[[str], World]
# vLLM's CPU kernel of the rotary embedding is wrong for latent attention (0.32.0): its PyTorch code is right.
NATIVE_ROPE = ("--", "--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')
# So little room, and so short chunks, that vLLM gives up samples it has begun (53 times for 24 samples of 145 tokens).
PREEMPTED = (
    "--block-size", 32, "--num-gpu-blocks-override", 20, "--long-prefill-token-threshold", 16,
    "--no-scheduler-reserve-full-isl",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ("--batch-tokens", 64)),  # chunked: most samples are longer
        ("llama", ("--batch-tokens", 256, "--", *PREEMPTED)),
        ("qwen3_moe", ("--batch-tokens", 96)),
        ("deepseek_v3", ("--batch-tokens", 256, *NATIVE_ROPE)),
        ("granite", ()),  # logits are scaled
        ("cohere", ()),  # layers give the residual stream itself, and something else
        ("smollm2", ()),
    ],
)
def test_the_dataset_is_transformers(worlds: Worlds, tmp_path: Path, name: str, options: tuple[object, ...]) -> None:
    world = worlds(name)
    result = capture(world, tmp_path / "out", "--engine", "vllm", "--taps", world.some_taps, *options)
    assert result.returncode == 0, result.stderr
    dataset = assert_same(world, tmp_path / "out")
    assert dataset.identity.target == open_dataset(world.reference).identity.target
    made_by = next(iter(dataset.iter_shards())).metadata.engine
    assert made_by["engine"] == "vllm"
    assert made_by["self_test"] == "transformers"


def test_workers_of_a_tensor_parallel_target_share_the_writing(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("llama")
    options = ("--engine", "vllm", "--tp", 2, "--taps", world.some_taps, "--batch-tokens", 64)
    result = capture(world, tmp_path / "out", *options)
    assert result.returncode == 0, result.stderr
    dataset = assert_same(world, tmp_path / "out")
    tokens = {0: 0, 1: 0}
    for shard in dataset.iter_shards():
        for sample_id in shard.sample_ids:
            tokens[int(shard.path.name.split("-")[1])] += dataset.sample(sample_id).num_tokens
    assert min(tokens.values()) > 0.4 * sum(tokens.values())
    assert_canaries(tmp_path / "out", workers=2, tp="2")


def test_copies_of_the_target_share_the_samples(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("llama")
    options = ("--engine", "vllm", "--dp", 2, "--taps", world.some_taps, "--batch-tokens", 64)
    result = capture(world, tmp_path / "out", *options)
    assert result.returncode == 0, result.stderr
    assert_same(world, tmp_path / "out")
    assert {path.name.split("-")[1] for path in (tmp_path / "out" / "shards").iterdir()} == {"0", "1"}
    assert_canaries(tmp_path / "out", workers=2, tp="1")


def test_a_target_over_two_nodes(worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] - 1
    nodes = []
    for rank in (1, 0):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(rank))
        options = ("--engine", "vllm", "--tp", 2, "--taps", world.some_taps, "--batch-tokens", 64)
        place = ("--", "--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port)
        nodes.append(subprocess.Popen(capture_command(world, out, *options, *place), stderr=subprocess.PIPE, text=True))
    try:
        errors = [node.communicate(timeout=280)[1] for node in reversed(nodes)]
    finally:
        for node in nodes:
            kill_all(node)
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert "node 0 ended with exit status 0" in errors[1]
    assert {path.name.split("-")[1] for path in (out / "shards").iterdir()} == {"0", "1"}
    assert_same(world, out)
    assert_canaries(out, workers=2, tp="2")


def test_a_kernel_that_is_wrong_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    """vLLM 0.32.0's rotary embedding on CPUs, with latent attention: found by this very test of eyas."""
    world = worlds("deepseek_v3")
    result = capture(world, tmp_path / "out", "--engine", "vllm", "--taps", world.some_taps)
    assert result.returncode == 1
    assert "is not transformers' after:" in result.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("layer", "is not transformers' after:1: relative error"), ("row", "does not hold the tokens")],
)
def test_an_engine_that_is_off_by_one_is_refused(worlds: Worlds, tmp_path: Path, fault: str, message: str) -> None:
    world = worlds("llama")
    command = capture_command(world, tmp_path / "out", "--engine", "vllm", "--taps", "after:1,after:2,after:5")
    faulty = [sys.executable, str(Path(__file__).with_name("off_by_one.py")), fault, *command[3:]]
    result = subprocess.run(faulty, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_full_disk_is_told_once_and_as_what_it_is(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("llama")
    options = ("--engine", "vllm", "--tp", 2, "--taps", "after:1", "--max-samples", 4)
    command = capture_command(world, tmp_path / "out", *options)
    full = [sys.executable, str(Path(__file__).with_name("off_by_one.py")), "disk", *command[3:]]
    result = subprocess.run(full, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 1
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "no space left" in message
    assert message.count("run the same command again") == 1


def test_options_that_vllm_does_not_know_are_wrong_usage_before_anything_is_made(
    worlds: Worlds, tmp_path: Path
) -> None:
    result = capture(
        worlds("llama"), tmp_path / "out", "--engine", "vllm", "--taps", "after:1", "--", "--no-such-option"
    )
    assert result.returncode == 2, result.stderr
    assert "--no-such-option: vLLM has no such option" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_a_kill_loses_and_doubles_nothing(worlds: Worlds, tmp_path: Path, victim: str) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    options = ("--engine", "vllm", "--taps", world.some_taps, "--shard-size", "64KiB", "--batch-tokens", 64)
    command = capture_command(world, out, *options, "--tp", 2)
    with open(tmp_path / "errors", "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    _wait_for(lambda: len(list((out / "shards").glob("w-*"))) > 2 or process.poll() is not None)
    workers = [child for child in psutil.Process(process.pid).children() if "Worker_TP" in " ".join(child.cmdline())]
    assert len(workers) == 2
    os.kill(process.pid if victim == "driver" else workers[1].pid, signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    if victim == "worker":
        told = (tmp_path / "errors").read_text().splitlines()
        (message,) = [line for line in told if line.startswith("Error: ")]
        assert "a worker of vLLM ended" in message
        assert "What was sealed is kept: run the same command again" in message
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive, "a worker outlives its driver"
    before = len(open_dataset(out).shards)
    result = capture(world, out, *options)  # with another tensor-parallel size, too
    assert result.returncode == 0, result.stderr
    assert len(assert_same(world, out).shards) > before
    assert_canaries(out, workers=2, tp="1, 2")


def test_a_signal_seals_what_is_complete(worlds: Worlds, tmp_path: Path) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    options = ("--engine", "vllm", "--taps", world.some_taps, "--shard-size", "64KiB", "--batch-tokens", 64)
    process = subprocess.Popen(capture_command(world, out, *options), stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: any((out / "shards").glob("w-*")) or process.poll() is not None)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert not open_dataset(out).problems
    assert capture(world, out, "--taps", world.some_taps).returncode == 0  # transformers goes on
    assert_same(world, out)
    assert_canaries(out, workers=1, builds=2, tp="1")


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
