"""The writer: what goes in comes out, shards are bounded, failures leave nothing corrupt."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.shards.dataset import Dataset
from eyas.shards.errors import HeldError, ShardWriteError
from eyas.shards.identity import DatasetIdentity, create_or_match
from eyas.shards.ledger import SealedShard, read_ledgers, recover
from eyas.shards.sample import Sample
from eyas.shards.statistics import tap_statistics
from eyas.shards.validate import validate
from eyas.shards.writer import ShardWriter
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith(".tmp-")]


@given(data=st.data())
@settings(max_examples=30)
def test_what_goes_in_comes_out_in_any_order_and_shard_size(
    tmp_path_factory: pytest.TempPathFactory, tiny: type[Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    codec = data.draw(st.sampled_from(["raw", "zstd"]))
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"] if codec == "raw" else ["bfloat16"]))
    identity = tiny.identity(
        codec=codec,
        dtype=dtype,
        target_statistics=data.draw(st.booleans()),
        last_hidden=data.draw(st.sampled_from([None, FINAL])),
    )
    samples = data.draw(st.permutations(tiny.samples(identity)))
    tiny.write(folder, identity, samples, shard_bytes=data.draw(st.integers(1, 3000)))
    found = Dataset.open(folder)
    assert not found.problems
    assert found.num_samples == len(samples)
    assert found.num_tokens == sum(sample.num_tokens for sample in samples)
    for sample in samples:
        assert tiny.same(found.sample(sample.sample_id), sample)
    assert [sample.sample_id for sample in found] == [sample.sample_id for sample in samples]
    for entry in found.ledgers.entries:
        validate(folder / "shards" / entry.shard, identity, entry)


def test_shards_are_bounded_and_a_larger_sample_has_its_own(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    small, large = tiny.samples(identity, 8), tiny.sample(identity, 99, 500)
    with ShardWriter(tmp_path, identity=identity, worker="w", shard_bytes=1000, metadata={}) as writer:
        sealed = [shard for sample in [*small[:4], large, *small[4:]] for shard in writer.add(sample)]
        sealed += writer.close()
    by_shard = [shard.sample_ids for shard in sealed]
    assert (large.sample_id,) in by_shard
    assert all(len(ids) > 1 for ids in by_shard if ids != (large.sample_id,))
    token_bytes = 4 + 1 + 4 * 4 * 2 + 4 + 4
    for shard in sealed:
        if shard.sample_ids != (large.sample_id,):
            assert shard.num_tokens * token_bytes <= 1000
    assert [shard.shard for shard in sealed] == [f"w-{seq:06d}.safetensors" for seq in range(len(sealed))]
    assert read_ledgers(tmp_path).entries == sealed


def test_sequence_numbers_go_on(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    samples = tiny.samples(identity, 4)
    for n, sample in enumerate(samples):
        tiny.write(tmp_path, identity, [sample])
        if n == 1:  # a name that was used is not used again, whatever became of the shard
            os.rename(
                tmp_path / "shards/host-0-000001.safetensors", tmp_path / "shards/host-0-000007.safetensors.corrupt"
            )
    names = {path.name for path in (tmp_path / "shards").iterdir()}
    assert names == {
        "host-0-000000.safetensors",
        "host-0-000007.safetensors.corrupt",
        "host-0-000008.safetensors",
        "host-0-000009.safetensors",
    }


def test_an_exception_aborts_and_a_clean_exit_closes(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    sample = tiny.sample(identity, 0, 5)

    def fail() -> None:
        with ShardWriter(tmp_path, identity=identity, worker="w", metadata={}) as writer:
            writer.add(sample)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Dataset.open(tmp_path).num_samples == 0
    assert not list((tmp_path / "shards").iterdir())
    with ShardWriter(tmp_path, identity=identity, worker="w", metadata={}) as writer:
        writer.add(sample)
    assert sample.sample_id in Dataset.open(tmp_path)


def test_a_worker_name_is_held_exclusively(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    with (
        ShardWriter(tmp_path, identity=identity, worker="w", metadata={}),
        pytest.raises(HeldError, match="worker w"),
    ):
        ShardWriter(tmp_path, identity=identity, worker="w", metadata={})
    ShardWriter(tmp_path, identity=identity, worker="w", metadata={}).abort()


@pytest.mark.parametrize("worker", ["", ".", "../x", "a/b", "-", ".tmp-x", "a" * 300, "a\nb"])
def test_worker_names_are_plain(tmp_path: Path, tiny: type[Any], worker: str) -> None:
    with pytest.raises(EyasError, match="worker name"):
        ShardWriter(tmp_path, identity=tiny.identity(), worker=worker, metadata={})


def test_samples_that_do_not_fit_the_dataset_are_refused(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    good = tiny.sample(identity, 0, 5)
    bad = [
        replace(good, features=good.features[:, 1:]),
        replace(good, features=good.features.to(torch.float16)),
        replace(good, last_hidden=None),
        replace(good, target_top1=None),
        replace(good, loss_mask=good.loss_mask[1:]),
        replace(good, sample_id="0" * 16),
        replace(good, input_ids=good.input_ids.long()),
    ]
    with ShardWriter(tmp_path, identity=identity, worker="w", metadata={}) as writer:
        for sample in bad:
            with pytest.raises(ValueError, match=sample.sample_id):
                writer.add(sample)
        writer.add(good)
        with pytest.raises(ValueError, match="already"):
            writer.add(good)
        with pytest.raises(ValueError, match="statistics"):
            writer.add(tiny.sample(identity, 1, 5), torch.zeros(3, 4))
    assert read_ledgers(tmp_path).num_samples == 1


def test_tensors_may_be_views_of_a_batch(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    good = tiny.sample(identity, 0, 5)
    batch = torch.zeros(5, 2, identity.features_width, dtype=torch.bfloat16)
    batch[:, 1] = torch.randn(5, identity.features_width)
    strided = replace(good, features=batch[:, 1])
    assert not strided.features.is_contiguous()
    tiny.write(tmp_path, identity, [strided])
    assert torch.equal(Dataset.open(tmp_path).sample(good.sample_id).features, batch[:, 1])


def test_statistics_given_and_computed_are_the_same(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    samples = tiny.samples(identity, 3)
    statistics = [
        torch.cat(
            [
                tap_statistics(s.features.view(s.num_tokens, 3, 4)),
                tap_statistics(s.last_hidden.view(s.num_tokens, 1, 4)),
            ]
        )
        for s in samples
    ]
    for worker, given_statistics in (("a", statistics), ("b", [None] * 3)):
        with ShardWriter(tmp_path / worker, identity=identity, worker="w", metadata={}) as writer:
            for sample, totals in zip(samples, given_statistics, strict=True):
                writer.add(sample, totals)
    a, b = (read_ledgers(tmp_path / worker).entries[0].statistics for worker in "ab")
    assert a == b
    assert list(a) == ["after:1", "after:3", "after:4", "last_hidden"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_all(folder: Path, identity: DatasetIdentity, samples: list[Sample], sealed: list[SealedShard]) -> None:
    with ShardWriter(folder, identity=identity, worker="host-0", shard_bytes=300, metadata={}) as writer:
        for sample in samples:
            sealed += writer.add(sample)
        sealed += writer.close()


def test_a_file_that_cannot_grow_is_a_clear_error_and_the_run_goes_on_later(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    small, large = tiny.sample(identity, 0, 5), tiny.sample(identity, 1, 5000)
    message = r"host-0-000001\.safetensors.*no space.*same command"
    with file_size_limit(100_000), pytest.raises(ShardWriteError, match=message):
        write_all(tmp_path, identity, [small, large], [])
    found = Dataset.open(tmp_path)
    assert not found.problems
    assert not leftovers(tmp_path)
    assert tiny.same(found.sample(small.sample_id), small)
    tiny.write(tmp_path, identity, [large])
    assert tiny.same(Dataset.open(tmp_path).sample(large.sample_id), large)


@pytest.mark.parametrize("at", [*range(1, 12), 14, 18, 19])
def test_a_full_disk_at_any_write_loses_nothing_sealed(
    tmp_path: Path, tiny: type[Any], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The disk is full in the midst of the n-th write and from there on: of a shard's pieces or of its ledger line."""
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    samples = tiny.samples(identity, 4)
    calls, real_write = 0, os.write

    def full(fd: int, content: Any) -> int:
        nonlocal calls
        calls += 1
        if calls < at:
            return real_write(fd, content)
        if calls == at and len(content) > 1:
            return real_write(fd, bytes(content)[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sealed: list[SealedShard] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ShardWriteError, match="no space left"):
            write_all(tmp_path, identity, samples, sealed)
    assert not leftovers(tmp_path)
    state = read_ledgers(tmp_path)
    assert not [problem for problem in state.problems if problem.kind != "shard without line"]
    assert all(name in state for shard in sealed for name in shard.sample_ids)
    recover(tmp_path, identity)
    known = read_ledgers(tmp_path)
    write_all(tmp_path, identity, [sample for sample in samples if sample.sample_id not in known], [])
    found = Dataset.open(tmp_path)
    assert not found.problems
    assert found.num_samples == len(samples)
    assert all(tiny.same(found.sample(sample.sample_id), sample) for sample in samples)
