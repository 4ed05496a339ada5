"""Datasets to a URL and back: the same bytes, after any interruption, and nothing damaged passes for whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from eyas.cli.main import main
from eyas.shards import remote, transfer
from eyas.shards.dataset import Dataset
from eyas.shards.ledger import format_line, parse_ledger, read_ledgers
from eyas.shards.rejects import append_reject, read_rejects
from eyas.shards.remote import STORES, RemoteError, Store, open_store
from eyas.shards.token_counts import count_targets, read_token_counts, write_token_counts
from eyas.shards.validate import validate
from tests.shards.hub import LocalHub, local_hub
from tests.shards.s3 import LocalS3, local_s3

SHARD = "shards/host-0-000001.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    with pytest.MonkeyPatch.context() as patch, local_s3(patch) as s3:
        yield s3


@pytest.fixture
def s3(server: LocalS3) -> LocalS3:
    """A local S3 with an empty bucket."""
    server.empty()
    return server


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """memory://, as one more kind of URL: fsspec's file system of this process."""
    from fsspec.implementations.memory import MemoryFileSystem

    system = MemoryFileSystem()
    system.store.clear()
    monkeypatch.setitem(STORES, "memory", lambda url, path: Store(url, f"/{path}", system))
    monkeypatch.setattr(transfer, "_PAUSE_SECONDS", 0.0)
    return system


@pytest.fixture
def data(tmp_path: Path, tiny: type[Any]) -> Path:
    """Nine samples in three shards, and two rejects."""
    identity = tiny.identity()
    tiny.write(tmp_path / "data", identity, tiny.samples(identity))
    for n in range(2):
        append_reject(tmp_path / "data", "host-0", f"{n:016x}", "too long")
    return tmp_path / "data"


def eyas(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def done(*arguments: object) -> dict[str, Any]:
    """The summary of a transfer that must succeed."""
    result = eyas(*arguments, "--json")
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def files(folder: Path) -> dict[str, object]:
    """Every file of a dataset: its bytes, or, of ledgers, whose order and times are free, what else its lines say."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name != ".lock":
            content = path.read_bytes()
            found[name] = content
            if path.parent.name == "ledger":
                lines, torn = parse_ledger(content, path.stem, name)
                assert not torn
                found[name] = [replace(line, seconds=0.0, sealed_at=0.0) for line in lines]
    return found


def consistent(url: str) -> int:
    """A reader of ``url`` at this moment: every shard that a ledger names is whole. Returns how many there are."""
    store = open_store(url)
    found = transfer._read_end(store)
    if found is None:
        assert not store.sizes("ledger")
        return 0
    assert {problem.kind for problem in found[1].problems} <= {"shard without line", "leftover temporary"}
    for entry in found[1].entries:
        for _ in remote.proven(store.blocks(f"shards/{entry.shard}"), entry, url):
            pass
    return len(found[1].entries)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def standard(folder: Path, tiny: type[Any], num_samples: int = 9) -> Path:
    """A standard dataset with its token counts and canaries."""
    identity = tiny.identity(stage="standard")
    tiny.write(folder, identity, tiny.samples(identity, num_samples))
    tiny.write(folder / "canaries", identity, tiny.samples(identity, 2, first_seed=100))
    entries = read_ledgers(folder).entries
    counts = np.zeros(100, dtype=np.int64)
    for ids, times in count_targets(folder, entries, 100, workers=1):
        counts[ids] += times
    write_token_counts(folder, counts, entries)
    return folder


@pytest.mark.parametrize("scheme", ["s3://bucket", "memory://box", "file://", ""])
def test_up_and_down_again_gives_the_same_bytes(
    scheme: str, s3: LocalS3, memory: Any, tmp_path: Path, tiny: type[Any]
) -> None:
    data = standard(tmp_path / "data", tiny)
    append_reject(data, "host-0", "0" * 16, "too long")
    url = f"{scheme}{tmp_path if scheme in ('', 'file://') else ''}/up/there"
    summary = done("upload", data, url)
    assert (summary["num_placed"], summary["num_samples"], summary["num_there"]) == (3, 9, 0)
    assert consistent(url) == 3
    assert done("upload", data, url, "--verify")["num_verified"] == 3
    done("download", url, tmp_path / "back")
    assert files(tmp_path / "back") == files(data)
    assert read_rejects(tmp_path / "back") == {"0" * 16: "too long"}
    assert read_token_counts(tmp_path / "back").sum() == Dataset.open(data).ledgers.num_trained_tokens
    again = done("download", url, tmp_path / "back")
    assert (again["num_placed"], again["num_there"]) == (0, 3)


def test_a_shard_of_many_parts(s3: LocalS3, tmp_path: Path, tiny: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A multipart upload, whose ETag is compared; a damaged one is given up before it can be seen."""
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 20)
    identity = tiny.identity(hidden_size=1024, dtype="float32", last_hidden=None)
    tiny.write(tmp_path / "data", identity, [tiny.sample(identity, 0, 1000)])  # 12 MB
    (entry,) = read_ledgers(tmp_path / "data").entries
    compared: list[tuple[str, str | None]] = []
    real = remote.S3Store._compare

    def compare(self: Any, entry: Any, info: Any, checksum: str | None) -> None:
        compared.append((info["ETag"].strip('"'), checksum))
        real(self, entry, info, checksum)

    monkeypatch.setattr(remote.S3Store, "_compare", compare)
    done("upload", tmp_path / "data", "s3://bucket/a")
    assert compared[0][0] == compared[0][1]
    assert compared[0][0].endswith("-3")
    done("download", "s3://bucket/a", tmp_path / "back")
    assert files(tmp_path / "back") == files(tmp_path / "data")
    flip(tmp_path / "data/shards" / entry.shard)
    result = eyas("upload", tmp_path / "data", "s3://bucket/b")
    assert result.exit_code == 1
    assert entry.shard in result.output
    assert s3.names("b/shards") == []
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket="bucket")


def test_what_was_stored_with_other_bytes_is_not_believed(
    s3: LocalS3, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ETag that differs proves nothing by itself (encryption): the bytes are read back and decide."""
    etags = iter(['"' + "0" * 32 + '"'] * 3)
    import s3fs

    real = s3fs.S3FileSystem.info

    def info(self: Any, path: str, **options: Any) -> Any:
        found = dict(real(self, path, **options))
        if "/shards/" in path:
            found["ETag"] = next(etags, found["ETag"])
        return found

    monkeypatch.setattr(s3fs.S3FileSystem, "info", info)
    done("upload", data, "s3://bucket/encrypted", "--workers", "1")
    assert len(list(etags)) < 3

    etags = iter(['"' + "0" * 32 + '"'] * 9)
    store, (entry, *_) = open_store("s3://bucket/bad"), read_ledgers(data).entries
    monkeypatch.setattr(type(store), "blocks", lambda self, name: iter([b"other"]))
    content = (data / "shards" / entry.shard).read_bytes()
    with pytest.raises(RemoteError, match="stored with other bytes") as error:
        store.put_shard(entry, data / "shards" / entry.shard, iter([content]))
    assert error.value.transient


def test_it_grows_while_it_is_captured(s3: LocalS3, data: Path, tmp_path: Path, tiny: type[Any]) -> None:
    done("upload", data, "s3://bucket/data")
    done("download", "s3://bucket/data", tmp_path / "back")
    identity = tiny.identity()
    tiny.write(data, identity, tiny.samples(identity, 4, first_seed=20))
    tiny.write(data, identity, tiny.samples(identity, 4, first_seed=30), worker="host-1")
    append_reject(data, "host-1", "f" * 16, "nan")
    (data / "shards/.tmp-host-0-000009.safetensors").write_bytes(b"half")
    (data / "shards/host-0-000008.safetensors").write_bytes(b"not in a ledger yet")
    grown = done("upload", data, "s3://bucket/data")
    assert (grown["num_there"], grown["num_placed"]) == (3, len(read_ledgers(data).entries) - 3)
    assert not [name for name in s3.names() if "tmp" in name or "000008" in name]
    done("download", "s3://bucket/data", tmp_path / "back")
    back = Dataset.open(tmp_path / "back")
    assert back.num_samples == 17
    assert not back.problems
    assert read_rejects(tmp_path / "back").keys() == {"0" * 16, f"{1:016x}", "f" * 16}


def test_two_machines_fill_one_place(memory: Any, data: Path, tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    tiny.write(tmp_path / "other", identity, tiny.samples(identity, 4, first_seed=20), worker="elsewhere-0")
    done("upload", data, "memory://box/data")
    done("upload", tmp_path / "other", "memory://box/data")
    done("download", "memory://box/data", tmp_path / "back")
    assert Dataset.open(tmp_path / "back").num_samples == 13


def test_one_worker_name_for_two_captures_is_refused_by_name(
    memory: Any, data: Path, tmp_path: Path, tiny: type[Any]
) -> None:
    identity = tiny.identity()
    tiny.write(tmp_path / "other", identity, tiny.samples(identity, 4, first_seed=20))
    done("upload", data, "memory://box/data")
    before = dict(memory.store)
    result = eyas("upload", tmp_path / "other", "memory://box/data")
    assert result.exit_code == 1
    assert "host-0-000000.safetensors is another shard of the same name" in result.output
    assert {name: file.getvalue() for name, file in before.items()} == {
        name: file.getvalue() for name, file in memory.store.items()
    }


def test_a_byte_that_flipped_here_is_never_uploaded(s3: LocalS3, data: Path) -> None:
    flip(data / SHARD)
    result = eyas("upload", data, "s3://bucket/data", "--json")
    assert result.exit_code == 1
    assert f"{data}/{SHARD}" in result.stderr
    assert list(json.loads(result.stdout)["failures"]) == ["host-0-000001.safetensors"]
    assert f"data/{SHARD}" not in s3.names()
    assert consistent("s3://bucket/data") == 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_what_is_damaged_there_is_told_by_name_and_mended(damage: str, s3: LocalS3, data: Path, tmp_path: Path) -> None:
    done("upload", data, "s3://bucket/data")
    content = bytearray(s3.get(f"data/{SHARD}"))
    content[len(content) // 2] ^= 1
    if damage == "gone":
        s3.client.delete_object(Bucket="bucket", Key=f"data/{SHARD}")
    else:
        s3.put(f"data/{SHARD}", bytes(content) if damage == "flipped" else bytes(content[:-1]))
    result = eyas("download", "s3://bucket/data", tmp_path / "back")
    assert result.exit_code == 1
    assert "host-0-000001.safetensors" in result.stderr.splitlines()[-1]
    assert sorted(entry.shard[:13] for entry in read_ledgers(tmp_path / "back").entries) == [
        "host-0-000000",
        "host-0-000002",
    ]
    assert not (tmp_path / "back" / SHARD).exists()
    # What the listing shows is mended by any upload; what only the bytes show, by one that reads them.
    mended = done("upload", data, "s3://bucket/data", *["--verify"] * (damage == "flipped"))
    assert mended["num_placed"] == (damage != "flipped")
    assert consistent("s3://bucket/data") == 3
    done("download", "s3://bucket/data", tmp_path / "back")
    assert files(tmp_path / "back") == files(data)


def test_what_came_damaged_once_is_fetched_again(memory: Any, data: Path, tmp_path: Path) -> None:
    done("upload", data, "memory://box/data")
    spoiled = {SHARD}

    class Spoiling(Store):
        def blocks(self, name: str) -> Iterator[bytes]:
            for block in super().blocks(name):
                yield bytes(len(block)) if name in spoiled else block
                spoiled.discard(name)

    STORES["memory"] = lambda url, path: Spoiling(url, f"/{path}", memory)
    result = eyas("download", "memory://box/data", tmp_path / "back")
    assert result.exit_code == 0
    assert "once more" in result.stderr
    assert files(tmp_path / "back") == files(data)


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_kill_at_any_call_is_gone_on_from(
    direction: str, s3: LocalS3, data: Path, tmp_path: Path, tiny: type[Any]
) -> None:
    back, url = tmp_path / "back", "s3://bucket/data"
    if direction == "download":
        done("upload", data, url)
    source, destination = (data, url) if direction == "upload" else (url, back)
    calls: set[str] = set()
    k = 1
    while True:
        command = [sys.executable, Path(__file__).with_name("kill_transfer.py"), k, source, destination]
        child = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, child.stderr
        calls |= {line for line in child.stdout.splitlines() if line.startswith("killed")}
        if direction == "upload":
            consistent(url)
        else:
            identity = Dataset.open(back).identity if (back / "dataset.json").exists() else None
            for entry in read_ledgers(back).entries:
                validate(back / "shards" / entry.shard, identity or tiny.identity(), entry)
        if k % 2:  # from nothing the next time; else the next one is killed in what this one left
            done(direction, source, destination)
            if direction == "upload":
                done("download", url, back)
            assert files(back) == files(data)
            assert not list(back.rglob(".tmp-*"))
            shutil.rmtree(back)
            if direction == "upload":
                s3.empty()
        k += 1 if k < 6 else 3
    assert child.stdout.endswith("done\n")
    assert k > 6
    # Two threads share the calls, so which of them is the k-th is not the same each time.
    assert calls == {"killed put_object"} if direction == "upload" else len(calls) > 2


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_signal_stops_it_with_75_and_the_next_run_goes_on(
    direction: str, s3: LocalS3, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direction == "download":
        done("upload", data, "s3://bucket/data")
    real, shards = Store.blocks, iter(range(9))

    def blocks(self: Store, name: str) -> Iterator[bytes]:
        if name.startswith("shards/") and next(shards) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the main thread looks at the signal five times a second
        yield from real(self, name)

    arguments = [direction, data, "s3://bucket/data"]
    if direction == "download":
        arguments = [direction, "s3://bucket/data", tmp_path / "back"]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "blocks", blocks)
        result = eyas(*arguments, "--workers", "1")
    assert result.exit_code == 75, result.output
    assert "run the same command again" in result.stderr
    summary = done(*arguments)
    assert summary["num_there"] >= 1
    assert summary["num_there"] + summary["num_placed"] == 3


def test_errors_that_pass_are_tried_again_and_told(memory: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"n": 4}
    real = memory.pipe_file

    def pipe_file(path: str, value: bytes, **options: Any) -> None:
        if "/shards/" in path and faults["n"]:
            faults["n"] -= 1
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        real(path, value, **options)

    monkeypatch.setattr(memory, "pipe_file", pipe_file)
    result = eyas("upload", data, "memory://box/data", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert f"memory://box/data/{SHARD.replace('1.', '0.')}: ConnectionResetError" in result.stderr
    assert "try 4 of 6" in result.stderr
    faults["n"] = 100
    memory.store.clear()
    result = eyas("upload", data, "memory://box/data")
    assert result.exit_code == 1
    assert "Given up after 6 tries" in result.stderr
    assert "run the same command again" in result.stderr


def test_another_dataset_there_is_refused_with_the_differences(
    memory: Any, data: Path, tmp_path: Path, tiny: type[Any]
) -> None:
    done("upload", data, "memory://box/data")
    identity = tiny.identity(dtype="float32")
    tiny.write(tmp_path / "other", identity, tiny.samples(identity, 2))
    for arguments in (("upload", tmp_path / "other", "memory://box/data"),
                      ("download", "memory://box/data", tmp_path / "other")):  # fmt: skip
        before = files(tmp_path / "other")
        result = eyas(*arguments)
        assert result.exit_code == 1
        assert "dtype is 'bfloat16' there and 'float32' here" in result.stderr or (
            "dtype is 'float32' there and 'bfloat16' here" in result.stderr
        )
        assert files(tmp_path / "other") == before


def test_folders_of_something_else_are_refused_by_name(memory: Any, data: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "hs_0.safetensors").write_bytes(b"x")
    memory.pipe_file("/box/foreign/model.bin", b"x")
    for arguments in (
        ("upload", foreign, "memory://box/new"),
        ("upload", data, "memory://box/foreign"),
        ("upload", data, foreign),
        ("download", "memory://box/foreign", tmp_path / "new"),
        ("download", "memory://box/nothing", tmp_path / "new"),
    ):
        result = eyas(*arguments)
        assert result.exit_code == 1, arguments
        assert "no dataset.json there" in result.stderr
        assert ("hs_0.safetensors" in result.stderr) == (foreign in arguments)
    assert [path.name for path in foreign.iterdir()] == ["hs_0.safetensors"]
    assert not (tmp_path / "new").exists()
    assert list(memory.store) == ["/box/foreign/model.bin"]


@pytest.mark.parametrize("name", ["../../escape-000000.safetensors", "/etc/escape-000000.safetensors", "host-0-1.so"])
def test_a_name_that_would_leave_the_folder_is_refused(name: str, memory: Any, data: Path, tmp_path: Path) -> None:
    done("upload", data, "memory://box/data")
    entry = replace(read_ledgers(data).entries[0], shard=name)
    memory.pipe_file("/box/data/ledger/host-0.jsonl", format_line(entry))
    result = eyas("download", "memory://box/data", tmp_path / "deep/back")
    assert result.exit_code == 1
    assert repr(name) in result.stderr
    assert not list(tmp_path.rglob("*escape*"))


def test_other_files_there_are_left_there(memory: Any, data: Path, tmp_path: Path) -> None:
    done("upload", data, "memory://box/data")
    for name in ("ledger/..jsonl", "ledger/.hidden.jsonl", "rejects/../evil.jsonl", "rejects/x.py", "shards/evil.sh"):
        memory.store[f"/box/data/{name}"] = memory.store["/box/data/dataset.json"]
    done("download", "memory://box/data", tmp_path / "back")
    assert files(tmp_path / "back") == files(data)


def test_token_counts_of_other_shards_are_left(memory: Any, tmp_path: Path, tiny: type[Any]) -> None:
    data = standard(tmp_path / "data", tiny)
    identity = tiny.identity(stage="standard")
    tiny.write(data, identity, tiny.samples(identity, 3, first_seed=50))
    result = eyas("upload", data, "memory://box/data")
    assert result.exit_code == 0
    assert "token_counts.safetensors was counted from other shards" in result.stderr
    assert "/box/data/token_counts.safetensors" not in memory.store


def test_dry_run_says_what_would_go_and_changes_nothing(memory: Any, data: Path, tmp_path: Path) -> None:
    result = eyas("upload", data, "memory://box/data", "--dry-run")
    assert result.exit_code == 0
    assert "3 shards" in result.stdout
    assert not memory.store
    done("upload", data, "memory://box/data")
    result = eyas("download", "memory://box/data", tmp_path / "back", "--dry-run")
    assert "3 shards" in result.stdout
    assert not (tmp_path / "back").exists()


def test_a_full_disk_is_told_before_anything_comes(
    memory: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("upload", data, "memory://box/data")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    result = eyas("download", "memory://box/data", tmp_path / "back")
    assert result.exit_code == 1
    assert "the disk has 10 left" in result.stderr
    assert not list((tmp_path / "back/shards").iterdir())


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("s3://bucket/a", "s3fs", "eyas[s3]"), ("gs://bucket/a", "gcsfs", "eyas[gs]")]
)
def test_a_missing_package_is_named_with_its_extra(
    url: str, package: str, extra: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = eyas("upload", data, url)
    assert result.exit_code == 1
    assert f"pip install '{extra}'" in result.stderr


@pytest.mark.parametrize(
    "url", ["ftp://host/a", "s3://", "hf://models/user/name", "hf://datasets/name", "s3://bucket/../a"]
)
def test_urls_that_are_none_are_wrong_usage(url: str, data: Path) -> None:
    result = eyas("upload", data, url)
    assert result.exit_code == 2
    assert url in result.stderr


def test_credentials_and_buckets_in_plain_words(
    s3: LocalS3, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = eyas("upload", data, "s3://no-such-bucket/data")
    assert result.exit_code == 1
    assert "s3://no-such-bucket/data/dataset.json" in result.stderr
    assert "aws s3 mb" in result.stderr
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    result = eyas("download", "s3://bucket/data", tmp_path / "back")
    assert result.exit_code == 1
    assert "Unable to locate credentials" in result.stderr
    assert "AWS_ACCESS_KEY_ID" in result.stderr


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A local hub, for commands in processes of their own (huggingface_hub reads its environment at import)."""
    with local_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_hub_gets_shards_and_the_ledger_that_names_them_in_one_commit(
    hub: LocalHub, tmp_path: Path, tiny: type[Any]
) -> None:
    data, url = standard(tmp_path / "data", tiny), "hf://datasets/user/name/kimi"
    hub.failures = [412, 503]  # somebody else commits; the hub is busy
    up = process("upload", data, url)
    assert up.returncode == 0, up.stderr
    assert "try 1 of 6" in up.stderr
    assert hub.commits[0] == ["kimi/dataset.json"]
    seen: set[str] = set()
    canaries = []
    for commit in hub.commits[1:-1]:
        if commit[0].startswith("kimi/canaries/"):
            canaries.append([name.removeprefix("kimi/canaries/") for name in commit])
            continue
        assert commit[-1] == "kimi/ledger/host-0.jsonl"
        seen |= set(commit[:-1])
    assert seen == {f"kimi/shards/{entry.shard}" for entry in read_ledgers(data).entries}
    assert canaries == [["dataset.json"], ["shards/host-0-000000.safetensors", "ledger/host-0.jsonl"]]
    assert hub.commits[-1] == ["kimi/token_counts.safetensors"]
    down = process("download", url, tmp_path / "back")
    assert down.returncode == 0, down.stderr
    assert files(tmp_path / "back") == files(data)
    again = process("upload", data, url, "--verify", "--json")
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)
    assert (summary["num_there"], summary["num_placed"], summary["num_verified"]) == (3, 0, 3)


def test_the_hub_mends_and_refuses_too(hub: LocalHub, data: Path, tmp_path: Path) -> None:
    assert process("upload", data, "hf://datasets/user/name").returncode == 0
    good = hub.files[SHARD]
    hub.files[SHARD] = good[:-1] + b"?"
    down = process("download", "hf://datasets/user/name", tmp_path / "back")
    assert down.returncode == 1
    assert SHARD in down.stderr
    assert process("upload", data, "hf://datasets/user/name", "--verify").returncode == 0
    assert hub.files[SHARD] == good
    flip(data / "shards/host-0-000002.safetensors")
    hub.files = {".gitattributes": b"", "README.md": b"# A card"}
    up = process("upload", data, "hf://datasets/user/name")
    assert up.returncode == 1
    assert "host-0-000002.safetensors" in up.stderr
    assert sum(name.startswith("shards/") for name in hub.files) == 2
    none = process("upload", data, "hf://datasets/user/other")
    assert none.returncode == 1
    assert "hf repos create user/other --repo-type dataset" in none.stderr
    assert "Traceback" not in none.stderr


def test_a_capture_that_seals_during_an_upload(
    memory: Any, data: Path, tmp_path: Path, tiny: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, real, seeds = tiny.identity(), Store.blocks, iter(range(40, 80, 4))

    def blocks(self: Store, name: str) -> Iterator[bytes]:
        if name.startswith("shards/") and self.folder is not None:
            tiny.write(data, identity, tiny.samples(identity, 4, first_seed=next(seeds)))
            consistent("memory://box/data")
        yield from real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "blocks", blocks)
        result = eyas("upload", data, "memory://box/data", "--workers", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_placed"] == 3
    assert consistent("memory://box/data") == 3
    done("upload", data, "memory://box/data")
    done("download", "memory://box/data", tmp_path / "back")
    assert files(tmp_path / "back") == files(data)


def test_google_cloud_storage(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an emulator, where gcsfs and it are installed: both are heavy, so the extra `dev` has neither."""
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server").create_server(
        "127.0.0.1", 0, in_memory=True, default_bucket="bucket"
    )
    server.start()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_port}")
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "none")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(remote, "_PART_BYTES", 1 << 10)  # gcsfs makes it 256 KiB, and still sends by parts
        assert done("upload", data, "gs://bucket/data", "--verify")["num_verified"] == 3
        done("download", "gs://bucket/data", tmp_path / "back")
        assert files(tmp_path / "back") == files(data)
        result = eyas("upload", data, "gs://no-such-bucket/data")
        assert result.exit_code == 1
        assert "gcloud storage buckets create" in result.stderr
    finally:
        server.stop()
