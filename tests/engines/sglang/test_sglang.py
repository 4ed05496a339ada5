"""`eyas capture --engine sglang` against `--engine transformers`: the same datasets, whatever SGLang does between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eyas.shards import open_dataset
from eyas.shards.rejects import read_rejects
from tests.engines.world import World, assert_canaries, assert_same, capture, capture_command

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

Worlds = Callable[[str], World]
# What SGLang needs where it has no kernels, and little memory.
ON_CPU = (
    "--", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--max-total-tokens", 2048, "--mem-fraction-static", 0.2,
)  # fmt: skip


def sglang(world: World, *options: object) -> tuple[object, ...]:
    return ("--engine", "sglang", "--device", "cpu", *options, *ON_CPU)


@pytest.fixture(autouse=True)
def _cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang binds each worker to cores of its own."""
    if "tp2" in request.node.name:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", ("--batch-tokens", 64), id="llama-chunked"),  # most samples are longer
        pytest.param("llama", ("--batch-tokens", 64, "--tp", 2), id="llama-chunked-tp2"),
        pytest.param("qwen3_moe", ("--batch-tokens", 96), id="qwen3_moe"),
        pytest.param("qwen3_moe", ("--batch-tokens", 96, "--tp", 2), id="qwen3_moe-tp2"),
        pytest.param("smollm2", (), id="smollm2"),
    ],
)
def test_the_dataset_is_transformers(worlds: Worlds, tmp_path: Path, name: str, options: tuple[object, ...]) -> None:
    world = worlds(name)
    result = capture(world, tmp_path / "out", "--taps", world.some_taps, *sglang(world, *options))
    assert result.returncode == 0, result.stderr
    dataset = assert_same(world, tmp_path / "out")
    assert dataset.identity.target == open_dataset(world.reference).identity.target
    made_by = next(iter(dataset.iter_shards())).metadata.engine
    assert made_by["engine"] == "sglang"
    assert made_by["self_test"] == "transformers"
    if "--tp" in options:
        tokens = {0: 0, 1: 0}
        for shard in dataset.iter_shards():
            for sample_id in shard.sample_ids:
                tokens[int(shard.path.name.split("-")[1])] += dataset.sample(sample_id).num_tokens
        assert min(tokens.values()) > 0.4 * sum(tokens.values())
        assert_canaries(tmp_path / "out", workers=2, tp="2")


@pytest.mark.parametrize(
    ("fault", "tp", "message"),
    [
        pytest.param("layers", 1, "what SGLang gives as after:1 is not transformers' after:1", id="layers"),
        pytest.param("rows", 1, "is not transformers'", id="rows"),
        pytest.param("parts", 2, "differs between worker 0 and worker 1 of SGLang", id="parts-tp2"),
    ],
)
def test_a_faulty_engine_is_refused(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, tp: int, message: str
) -> None:
    monkeypatch.setenv("EYAS_TEST_FAULT", fault)
    world = worlds("llama")
    options = sglang(world, "--tp", tp, "--taps", "after:1,after:2,after:5")
    command = capture_command(world, tmp_path / "out", *options)
    faulty = [sys.executable, str(Path(__file__).with_name("faulty.py")), *command[3:]]
    result = subprocess.run(faulty, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 1, result.stderr
    assert message in result.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_model_that_cannot_give_the_taps_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("granite")
    result = capture(world, tmp_path / "out", "--taps", "after:1", *sglang(world))
    assert result.returncode == 1
    assert "GraniteForCausalLM has no set_eagle3_layers_to_capture" in result.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_sample_that_sglang_has_no_room_for_is_rejected(worlds: Worlds, tmp_path: Path) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    little = ("--taps", "after:1,final", "--max-rejects", 1, *sglang(world), "--max-total-tokens", 64)
    result = capture(world, out, *little)
    assert result.returncode == 0, result.stderr
    reasons = read_rejects(out)
    reference = open_dataset(world.reference)
    assert set(reasons) == {sample.sample_id for sample in reference.iter_samples() if sample.num_tokens > 57}
    assert all("SGLang takes 1 to 57 here, by its options or its memory" in reason for reason in reasons.values())
    assert {sample.sample_id for sample in open_dataset(out).iter_samples()} == {
        sample.sample_id for sample in reference.iter_samples()
    } - set(reasons)


def test_options_that_sglang_does_not_know_are_wrong_usage(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("llama")
    result = capture(world, tmp_path / "out", "--taps", "after:1", *sglang(world), "--no-such-option")
    assert result.returncode == 2, result.stderr
    assert "--no-such-option" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_a_kill_loses_and_doubles_nothing_tp2(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    options = ("--taps", world.some_taps, "--shard-size", "64KiB", "--batch-tokens", 64)
    process = _started(world, out, *sglang(world, *options, "--tp", 2))
    workers = [child for child in psutil.Process(process.pid).children() if "scheduler" in " ".join(child.cmdline())]
    assert len(workers) == 2
    os.kill(process.pid if victim == "driver" else workers[1].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    if victim == "worker":
        assert "a worker of SGLang ended" in errors
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive, "a worker outlives its driver"
    before = len(open_dataset(out).shards)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    result = capture(world, out, *sglang(world, *options))  # with another tensor-parallel size, too
    assert result.returncode == 0, result.stderr
    assert len(assert_same(world, out).shards) > before
    assert_canaries(out, workers=2, tp="1, 2")


def test_the_end_of_a_process_that_holds_no_model_says_what_is_kept(worlds: Worlds, tmp_path: Path) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    process = _started(
        world, out, *sglang(world, "--taps", world.some_taps, "--shard-size", "64KiB", "--batch-tokens", 64)
    )
    children = {" ".join(child.cmdline()).strip(): child for child in psutil.Process(process.pid).children()}
    children["sglang::scheduler"].suspend()  # or the capture may be through before SGLang misses the other
    children["sglang::detokenizer"].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a process of SGLang ended" in errors
    assert "What was sealed is kept: run the same command again" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_seals_what_is_complete(worlds: Worlds, tmp_path: Path, number: signal.Signals) -> None:
    world, out = worlds("llama"), tmp_path / "out"
    options = sglang(world, "--taps", world.some_taps, "--shard-size", "64KiB", "--batch-tokens", 64)
    process = _started(world, out, *options)
    os.killpg(process.pid, number)  # as a terminal and a job scheduler do
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert not open_dataset(out).problems
    assert capture(world, out, "--taps", world.some_taps).returncode == 0  # transformers goes on
    assert_same(world, out)
    assert_canaries(out, workers=1, builds=2, tp="1")


def _started(world: World, out: Path, *options: object) -> subprocess.Popen[str]:
    """A capture of which some shards are sealed."""
    process = subprocess.Popen(
        capture_command(world, out, *options), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 250
    while len(list((out / "shards").glob("w-*"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process
