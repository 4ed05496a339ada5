"""Ledgers: every way in which a crash or a hand can leave a dataset folder is told, and mended by recover()."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.dataset import Dataset
from eyas.shards.errors import HeldError, LedgerError, ShardError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.ledger import (
    Problem,
    SealedShard,
    WorkerLedger,
    format_line,
    lock_dataset,
    read_ledgers,
    recover,
)
from eyas.shards.sample import Sample

Made = tuple[Path, DatasetIdentity, list[Sample]]


@pytest.fixture
def made(tmp_path: Path, tiny: type[Any]) -> Made:
    """Nine samples in several shards."""
    identity = tiny.identity()
    samples = tiny.samples(identity)
    tiny.write(tmp_path / "data", identity, samples, shard_bytes=700)
    assert len(Dataset.open(tmp_path / "data").shards) >= 4
    return tmp_path / "data", identity, samples


def kinds(problems: list[Problem]) -> list[tuple[str, str]]:
    return sorted((problem.kind, problem.where) for problem in problems)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ledger(folder: Path) -> Path:
    return folder / "ledger" / "host-0.jsonl"


def name(seq: int, suffix: str = "") -> str:
    return f"shards/host-0-{seq:06d}.safetensors{suffix}"


def torn_line(folder: Path) -> None:
    content = ledger(folder).read_bytes()
    ledger(folder).write_bytes(content[:-40])


def missing_newline(folder: Path) -> None:
    ledger(folder).write_bytes(ledger(folder).read_bytes()[:-1])


def damaged_line(folder: Path) -> None:
    content = bytearray(ledger(folder).read_bytes())
    content[content.index(b'"sample_ids":["') + 17] ^= 1
    ledger(folder).write_bytes(content)


def zeroed_tail(folder: Path) -> None:
    """What some file systems leave after a power cut."""
    content = ledger(folder).read_bytes()
    ledger(folder).write_bytes(content[:-40] + bytes(40))


def leftover(folder: Path) -> None:
    (folder / "shards/.tmp-host-0-000009.safetensors").write_bytes(b"half a shard")


def leftover_identity(folder: Path) -> None:
    (folder / ".tmp-123-abc").write_bytes(b"{")


def line_gone(folder: Path) -> None:
    ledger(folder).write_bytes(b"".join(ledger(folder).read_bytes().splitlines(keepends=True)[1:]))


def ledger_gone(folder: Path) -> None:
    ledger(folder).unlink()


def shard_gone(folder: Path) -> None:
    (folder / name(1)).unlink()


def shard_truncated(folder: Path) -> None:
    os.truncate(folder / name(1), 900)


def damaged_and_lineless(folder: Path) -> None:
    content = bytearray((folder / name(0)).read_bytes())
    content[-1] ^= 1
    (folder / name(0)).write_bytes(content)
    line_gone(folder)


NUM_SHARDS = 4
LAST = f"shards/host-0-{NUM_SHARDS - 1:06d}.safetensors"

# What happened, what read_ledgers says, how many samples still count before and after recover(), what is left after.
CASES: dict[str, tuple[Callable[[Path], None], list[tuple[str, str]], list[tuple[str, str]]]] = {
    "torn line": (torn_line, [("shard without line", LAST), ("torn line", "ledger/host-0.jsonl")], []),
    "no newline": (missing_newline, [("shard without line", LAST), ("torn line", "ledger/host-0.jsonl")], []),
    "damaged line": (damaged_line, [("shard without line", name(0)), ("torn line", "ledger/host-0.jsonl")], []),
    "zeroed tail": (zeroed_tail, [("shard without line", LAST), ("torn line", "ledger/host-0.jsonl")], []),
    "leftover": (leftover, [("leftover temporary", "shards/.tmp-host-0-000009.safetensors")], []),
    "leftover identity": (leftover_identity, [], []),
    "line gone": (line_gone, [("shard without line", name(0))], []),
    "ledger gone": (ledger_gone, [("shard without line", name(seq)) for seq in range(NUM_SHARDS)], []),
    "shard gone": (shard_gone, [("line without shard", name(1))], []),
    "shard truncated": (shard_truncated, [("size differs", name(1))], [("set aside", name(1, ".corrupt"))]),
    "damaged": (damaged_and_lineless, [("shard without line", name(0))], [("set aside", name(0, ".corrupt"))]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_crash_leaves_is_told_then_mended(made: Made, tiny: type[Any], case: str) -> None:
    folder, identity, samples = made
    damage, told, left = CASES[case]
    assert len(Dataset.open(folder).shards) == NUM_SHARDS
    damage(folder)
    before = snapshot(folder)
    state = read_ledgers(folder)
    assert kinds(state.problems) == told
    assert snapshot(folder) == before, "reading changes nothing"
    with lock_dataset(folder):
        done = recover(folder, identity)
    assert {problem.kind for problem in done} >= {kind for kind, _ in told}
    assert not list(folder.rglob(".tmp-*"))
    after = read_ledgers(folder)
    assert kinds(after.problems) == left
    with lock_dataset(folder):
        assert recover(folder, identity) == [], "a second time there is nothing to do"
    missing = [sample for sample in samples if sample.sample_id not in after]
    assert bool(missing) == (case in ("shard gone", "shard truncated", "damaged"))
    tiny.write(folder, identity, missing)
    found = Dataset.open(folder)
    assert found.num_samples == len(samples)
    assert all(tiny.same(found.sample(sample.sample_id), sample) for sample in samples)


def test_a_writer_alone_cuts_a_torn_line_before_it_appends(made: Made, tiny: type[Any]) -> None:
    folder, identity, _ = made
    torn_line(folder)
    tiny.write(folder, identity, [tiny.sample(identity, 77, 4)])
    assert kinds(read_ledgers(folder).problems) == [("shard without line", LAST)]


def test_a_shard_of_another_dataset_is_not_taken_in(made: Made, tmp_path: Path, tiny: type[Any]) -> None:
    folder, identity, samples = made
    other = replace(identity, target=replace(identity.target, config_hash="other"))
    tiny.write(tmp_path / "other", other, tiny.samples(other), worker="elsewhere")
    stray = next((tmp_path / "other/shards").iterdir())
    shutil.copy(stray, folder / "shards" / stray.name)
    (problem,) = recover(folder, identity)
    assert problem.kind == "shard without line"
    assert "another target" in problem.message
    assert (folder / "shards" / f"{stray.name}.corrupt").exists()
    assert read_ledgers(folder).num_samples == len(samples)


def test_a_sample_in_two_ledgers_counts_once_and_is_told(made: Made, tiny: type[Any]) -> None:
    folder, identity, samples = made
    tiny.write(folder, identity, samples[2:5], worker="other-1", shard_bytes=10_000)
    found = Dataset.open(folder)
    assert kinds(found.problems) == [("duplicate sample", "shards/other-1-000000.safetensors")]
    assert "3 of its samples" in found.problems[0].message
    assert found.num_samples == len(samples)
    assert sorted(sample.sample_id for sample in found) == sorted(sample.sample_id for sample in samples)
    assert all(tiny.same(found.sample(sample.sample_id), sample) for sample in samples)


def forged(entry: SealedShard, **changes: Any) -> bytes:
    """A line with a right checksum, whatever it says."""
    body = json.loads(format_line(entry)) | changes
    del body["line_xxh3"]
    return checked(json.dumps(body).encode()[:-1])


def checked(content: bytes) -> bytes:
    return content + b',"line_xxh3":"' + xxhash.xxh3_64_hexdigest(content).encode() + b'"}\n'


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": "../../outside-000000.safetensors"},
        {"shard": "/etc/passwd"},
        {"shard": "sub/host-0-000000.safetensors"},
        {"shard": "other-0-000000.safetensors"},
        {"shard": "host-0-000000.safetensors\0"},
        {"shard": "dataset.json"},
        {"shard": 7},
        {"num_bytes": "many"},
        {"num_tokens": 1.5},
        {"sample_ids": []},
        {"sample_ids": ["xyz"]},
        {"sample_ids": ["zzzzzzzzzzzzzzzz"]},
        {"sample_ids": {"a": 1}},
        {"statistics": 3},
    ],
)
def test_lines_that_no_eyas_wrote_are_refused(made: Made, changes: dict[str, Any]) -> None:
    folder, _, _ = made
    entry = read_ledgers(folder).entries[0]
    ledger(folder).write_bytes(forged(entry, **changes))
    with pytest.raises(LedgerError, match=r"host-0\.jsonl"):
        read_ledgers(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 200_000, b'{"statistics":' * 100_000, b"\xff"])
def test_lines_that_are_no_json_are_refused(made: Made, content: bytes) -> None:
    folder, _, _ = made
    ledger(folder).write_bytes(checked(content))
    with pytest.raises(LedgerError, match=r"host-0\.jsonl"):
        read_ledgers(folder)


@given(text=st.binary(max_size=300))
def test_any_bytes_after_the_ledger_are_a_torn_line(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "ledger").mkdir()
    (folder / "ledger/w.jsonl").write_bytes(text)
    assert {problem.kind for problem in read_ledgers(folder).problems} <= {"torn line"}


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    state = read_ledgers(tmp_path)
    assert (state.num_samples, state.num_tokens, state.num_bytes, state.entries, state.problems) == (0, 0, 0, [], [])
    assert not state.contains(np.array([1], np.uint64)).any()


def test_contains(made: Made) -> None:
    folder, _, samples = made
    state = read_ledgers(folder)
    ids = state.sample_ids()
    assert ids.dtype == np.uint64
    assert (np.diff(ids) > 0).all()
    assert {f"{number:016x}" for number in ids.tolist()} == {sample.sample_id for sample in samples}
    asked = np.array([ids[0], 0, ids[-1], 2**64 - 1], np.uint64)
    assert state.contains(asked).tolist() == [True, False, True, False]
    assert samples[0].sample_id in state
    assert "0" * 16 not in state


def test_reading_ledgers_opens_no_shard_and_imports_no_torch(made: Made) -> None:
    folder, _, samples = made
    for shard in (folder / "shards").iterdir():
        os.truncate(shard, 0) or os.truncate(shard, len_of(shard, folder))  # same sizes, no content
    code = (
        "import sys; from eyas.shards import open_dataset; d = open_dataset(sys.argv[1]);"
        "print(d.num_samples, len(d.problems), [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == f"{len(samples)} 0 []"


def len_of(shard: Path, folder: Path) -> int:
    return next(
        json.loads(line)["num_bytes"]
        for line in ledger(folder).read_bytes().splitlines()
        if json.loads(line)["shard"] == shard.name
    )


HOLD = """
import sys, time
from pathlib import Path
from eyas.shards.ledger import WorkerLedger, lock_dataset
with (lock_dataset(Path(sys.argv[2])) if sys.argv[1] == "dataset" else WorkerLedger(Path(sys.argv[2]), "host-0")):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(made: Made) -> Any:
    """Starts a process that holds the dataset or the worker; ended by the test or at its end."""
    processes = []

    def start(what: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, what, str(made[0])], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_one_run_at_a_time(made: Made, holder: Any) -> None:
    folder, _, _ = made
    process = holder("dataset")
    with pytest.raises(HeldError, match=f"process {process.pid} on {os.uname().nodename}"), lock_dataset(folder):
        pass
    process.kill()
    process.wait()
    with lock_dataset(folder):
        pass


def test_recovery_waits_for_no_writer_that_is_still_alive(made: Made, holder: Any) -> None:
    folder, identity, _ = made
    leftover(folder)
    process = holder("worker")
    with lock_dataset(folder), pytest.raises(HeldError, match="worker host-0"):
        recover(folder, identity)
    assert (folder / "shards/.tmp-host-0-000009.safetensors").exists()
    process.kill()
    process.wait()
    with lock_dataset(folder):
        assert [problem.kind for problem in recover(folder, identity)] == ["leftover temporary"]


def test_a_lock_left_by_a_dead_process_hinders_nobody(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on elsewhere\n")
    with lock_dataset(tmp_path), pytest.raises(HeldError), lock_dataset(tmp_path):
        pass


def test_a_shard_that_changed_after_its_seal_is_refused_by_the_reader(made: Made) -> None:
    folder, _, samples = made
    shards = sorted((folder / "shards").iterdir())
    shutil.copy(shards[0], folder / "keep")
    content = bytearray(shards[0].read_bytes())
    content[60] ^= 1  # in the header
    shards[0].write_bytes(content)
    with pytest.raises(ShardError, match="checksum"):
        Dataset.open(folder).sample(samples[0].sample_id)


def test_the_line_says_when_and_how_long(made: Made) -> None:
    folder, _, samples = made
    entries = read_ledgers(folder).entries
    assert all(abs(entry.sealed_at - time.time()) < 3600 and 0 <= entry.seconds < 3600 for entry in entries)
    assert sum(entry.num_trained_tokens for entry in entries) == sum(int(s.loss_mask.sum()) for s in samples)


def test_a_ledger_can_be_held_without_a_writer(tmp_path: Path, made: Made) -> None:
    """As standardize does, which links shards instead of writing them."""
    folder, _, samples = made
    target = tmp_path / "linked"
    with WorkerLedger(target, "copy") as held:
        for entry in read_ledgers(folder).entries:
            shard = held.shard_name(held.next_seq)
            held.next_seq += 1
            os.link(folder / "shards" / entry.shard, target / "shards" / shard)
            held.append(replace(entry, shard=shard))
    state = read_ledgers(target)
    assert not state.problems
    assert state.num_samples == len(samples)
