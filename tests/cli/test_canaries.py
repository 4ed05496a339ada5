"""Canaries from outside: what a capture leaves, who carries them along, and what `eyas check` says of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from eyas.capture.canaries import choose_canaries
from eyas.capture.prepared import PreparedSamples
from eyas.cli.main import main
from eyas.shards import open_dataset
from eyas.shards.sample import Sample
from eyas.shards.writer import ShardWriter
from tests.kill import kill_all
from tests.tiny import make_target, prepare_rows, tokenized_rows

NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target`` and ``prepared``."""
    folder = tmp_path_factory.mktemp("inputs")
    make_target(folder / "target")
    prepare_rows(folder / "prepared", folder / "target", tokenized_rows(NUM_SAMPLES, max_tokens=150))
    return folder


@pytest.fixture
def captured(inputs: Path, tmp_path: Path) -> Path:
    result = eyas(*capture_arguments(inputs, tmp_path / "out"))
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def capture_arguments(inputs: Path, out: Path, *options: object) -> list[object]:
    arguments = ["capture", inputs / "prepared", out, "--target", inputs / "target", "--worker", "w"]
    return [*arguments, "--taps", "after:1,after:3,after:4", *options]


def process(arguments: list[object]) -> list[str]:
    return [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]


def line(result: Result, check: str = "canaries") -> str:
    return next(text for text in result.stdout.splitlines() if text.split()[1:2] == [check])


def add_canary(dataset: Path, worker: str, change: Callable[[Sample], Sample]) -> None:
    """Another worker's canary: the first one's, changed."""
    canaries = open_dataset(dataset / "canaries")
    shard = canaries.shard(canaries.shards.index("w-0-000000.safetensors"))
    made_by = {**shard.metadata.engine, "session": f"of-{worker}"}
    with ShardWriter(canaries.path, identity=canaries.identity, worker=worker, metadata=made_by) as writer:
        for sample in shard:
            writer.add(change(sample))


def swapped(sample: Sample) -> Sample:
    """after:1 and after:3 in each other's place."""
    taps = sample.features.view(sample.num_tokens, 3, -1)
    return replace(sample, features=taps[:, [1, 0, 2]].flatten(1).contiguous())


def test_every_worker_of_every_session_has_both_and_they_go_along(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # The second one goes on where the first ended.
    for options in (["--dp", 2, "--max-samples", 15, "--shard-size", "1KiB"], ["--tp", 2]):
        run = subprocess.run(process(capture_arguments(inputs, out, *options)), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    canaries = open_dataset(out / "canaries")
    assert canaries.shards == [f"w-{rank}-{seq:06d}.safetensors" for rank in (0, 1) for seq in (0, 1)]
    first = canaries.shard(0)
    assert [first.sample(n).num_tokens for n in range(len(first))] == [128, 128]
    for shard in canaries.iter_shards():
        assert shard.sample_ids == first.sample_ids
        assert shard.metadata.engine["engine"] == "transformers"
    assert [shard.metadata.engine["tp"] for shard in canaries.iter_shards()] == ["1", "2", "1", "2"]
    assert len({shard.metadata.engine["session"] for shard in canaries.iter_shards()}) == 2
    # No sample of the dataset, whose samples are those that were prepared.
    assert open_dataset(out).num_samples == NUM_SAMPLES
    assert not set(first.sample_ids) & set(open_dataset(out).sample_ids())

    checked = eyas("check", out, "--target", inputs / "target")
    assert checked.exit_code == 0, checked.output
    assert line(checked).startswith("ok")
    assert "4 by 2 workers, 1 build (transformers" in line(checked)
    assert "tp 1, 2: alike; most differs" in line(checked)

    for _ in range(2):  # the second run has nothing to do
        assert eyas("standardize", out, tmp_path / "standard", "--taps", "after:1,after:4").exit_code == 0
    assert eyas("upload", tmp_path / "standard", tmp_path / "uploaded").exit_code == 0
    for carried in (tmp_path / "standard", tmp_path / "uploaded"):
        assert open_dataset(carried / "canaries").shards == canaries.shards
        assert "4 by 2 workers" in line(eyas("check", carried))
        assert open_dataset(carried).num_samples == NUM_SAMPLES


def test_the_same_two_whatever_the_order_and_the_number_of_prepared_samples_that_are_wanted(inputs: Path) -> None:
    prepared = PreparedSamples.open(inputs / "prepared")

    class Reversed:
        sample_ids, lengths = prepared.sample_ids[::-1], prepared.lengths[::-1]

        def __getitem__(self, row: int) -> object:
            return prepared[len(prepared) - 1 - row]

    chosen = choose_canaries(prepared, 128)
    assert [canary.num_tokens for canary in chosen] == [128, 128]
    assert [canary.sample_id for canary in choose_canaries(Reversed(), 128)] == [c.sample_id for c in chosen]  # type: ignore[arg-type]


def test_a_worker_that_is_off_by_a_layer_is_named_with_the_tap_that_it_gives(captured: Path) -> None:
    add_canary(captured, "x-0", swapped)
    result = eyas("check", captured)
    assert result.exit_code == 3
    assert line(result).startswith("mismatch")
    assert "x-0 (transformers" in line(result)
    assert "differs from w-0" in line(result)
    assert "after:1 by" in line(result)
    assert "is the first's after:3" in line(result)
    assert "which of the two is wrong they cannot tell" in result.stdout


def test_a_worker_that_is_off_in_one_of_its_sessions_is_named_by_it_and_the_mend_leaves_the_others(
    inputs: Path, tmp_path: Path
) -> None:
    out, sizes = tmp_path / "out", ("--shard-size", "16KiB")
    assert eyas(*capture_arguments(inputs, out, "--max-samples", 10, *sizes)).exit_code == 0
    before = set(open_dataset(out).shards)
    add_canary(out, "w-0", swapped)
    assert eyas(*capture_arguments(inputs, out, "--max-samples", 20, *sizes)).exit_code == 0
    (out / "canaries" / "shards" / "w-0-000002.safetensors").unlink()  # what follows is of the session before it
    result = eyas("check", out)
    assert result.exit_code == 3
    assert "w-0 in session of-w-0 (transformers" in line(result)
    assert "differs from w-0 in session 20" in line(result)
    written = [f"{out}/shards/{shard}" for shard in open_dataset(out).shards if shard not in before]
    assert f": mv {' '.join(written)} {out}/canaries/shards/w-0-000001.safetensors ELSEWHERE" in result.stdout


def test_where_the_first_is_wrong_it_is_named_and_not_the_others(captured: Path) -> None:
    right = open_dataset(captured / "canaries").shard(0)
    samples, made_by = list(right), right.metadata.engine
    identity = open_dataset(captured).identity
    shutil.rmtree(captured / "canaries" / "shards")
    shutil.rmtree(captured / "canaries" / "ledger")
    for worker, change in (("bad-0", swapped), ("w-0", lambda sample: sample), ("w-1", lambda sample: sample)):
        with ShardWriter(captured / "canaries", identity=identity, worker=worker, metadata=made_by) as writer:
            for sample in samples:
                writer.add(change(sample))
    result = eyas("check", captured)
    assert result.exit_code == 3
    assert "bad-0 (transformers" in line(result)
    assert "differs from w-0" in line(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, last_hidden=s.last_hidden * 1.01), "after:7 by 0.01"),
        (lambda s: replace(s, target_lse=s.target_lse + 0.1), "target_lse by 0.1"),
        (lambda s: replace(s, target_top1=(s.target_top1 + 1) % 128), "target_top1 by 1"),
        (lambda s: replace(s, features=torch.full_like(s.features, float("nan"))), "after:1 by nan"),
    ],
)
def test_what_else_may_differ(captured: Path, change: Callable[[Sample], Sample], message: str) -> None:
    add_canary(captured, "x-0", change)
    result = eyas("check", captured)
    assert result.exit_code == 3
    assert message in line(result)


def test_another_build_may_differ_by_more_than_another_worker(captured: Path) -> None:
    def off(sample: Sample) -> Sample:
        return replace(sample, features=sample.features * (1 + 3e-4))

    canaries = open_dataset(captured / "canaries")
    made_by = {**canaries.shard(0).metadata.engine, "engine": "vllm", "vllm": "0.32.0"}
    with ShardWriter(canaries.path, identity=canaries.identity, worker="v-0", metadata=made_by) as writer:
        for sample in canaries.shard(0):
            writer.add(off(sample))
    assert "2 by 2 workers, 2 builds" in line(eyas("check", captured))
    add_canary(captured, "x-0", off)
    result = eyas("check", captured)
    assert result.exit_code == 3
    assert "x-0 (transformers" in line(result)


def test_a_damaged_canary_is_unknown_and_left_out_of_a_standard_dataset(captured: Path, tmp_path: Path) -> None:
    add_canary(captured, "x-0", lambda sample: sample)
    path = captured / "canaries" / "shards" / "x-0-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    result = eyas("check", captured)
    assert result.exit_code == 0
    assert "1 of its canaries cannot be read" in result.stdout
    verified = eyas("inspect", captured, "--verify")
    assert verified.exit_code == 1
    assert "canaries/shards/x-0-000000.safetensors" in verified.output
    standardized = eyas("standardize", captured, tmp_path / "standard")
    assert standardized.exit_code == 0, standardized.output
    assert "this canary is left out" in standardized.stderr
    assert open_dataset(tmp_path / "standard" / "canaries").shards == ["w-0-000000.safetensors"]


def test_a_dataset_from_before_there_were_any_is_resumed_and_checked(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert eyas(*capture_arguments(inputs, out, "--max-samples", 5, "--worker", "old")).exit_code == 0
    shutil.rmtree(out / "canaries")
    assert "canaries" not in eyas("check", out).stdout
    assert eyas(*capture_arguments(inputs, out)).exit_code == 0
    assert open_dataset(out).num_samples == NUM_SAMPLES
    result = eyas("check", out)
    assert result.exit_code == 0
    assert "1 by 1 worker, 1 build" in line(result)
    assert "old-0 captured samples and no canary" in result.stdout
    shutil.rmtree(out / "canaries")
    assert "none, of 2 workers" in eyas("check", out).stdout


def test_a_kill_while_they_are_written_leaves_nothing_behind(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shards = out / "canaries" / "shards"
    run = subprocess.Popen(
        process(capture_arguments(inputs, out, "--dp", 2)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while run.poll() is None and not any(shards.glob("*")) and not any(shards.glob(".tmp-*")):
        time.sleep(0.001)
    assert kill_all(run)
    (shards / ".tmp-w-1-000000.safetensors").write_bytes(b"half")
    assert eyas(*capture_arguments(inputs, out)).exit_code == 0
    assert not list(shards.glob(".*"))
    assert open_dataset(out).num_samples == NUM_SAMPLES
    result = eyas("check", out)
    assert result.exit_code == 0
    assert line(result).startswith("ok")
