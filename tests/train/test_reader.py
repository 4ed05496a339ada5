"""What the read-ahead delivers is what the shards hold, in the order asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.shards.dataset import Dataset
from eyas.shards.errors import ShardError
from eyas.train.reader import BatchReader, Job, ReadBatch
from eyas.train.samples import SampleTable, read_samples
from eyas.train.ttt import loss_rows
from tests.captured import captured_identity, make_samples, write_captured

NUM_SAMPLES = 40
ROWS = 96


@pytest.fixture(params=["raw", "zstd"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    identity = replace(captured_identity(num_samples=NUM_SAMPLES), codec=request.param)
    write_captured(tmp_path / "data", identity, make_samples(identity, NUM_SAMPLES))
    return Dataset.open(tmp_path / "data")


def reader(
    dataset: Dataset, table: SampleTable, jobs: list[list[int]], *, fixed: bool = False, rows: int = ROWS
) -> BatchReader[int]:
    return BatchReader(
        dataset, table, [Job(np.array(samples), n) for n, samples in enumerate(jobs)],
        num_rows=rows, fixed=fixed, device=torch.device("cpu"), dtype=torch.float32, num_steps=3, threads=3,
    )  # fmt: skip


def packed(table: SampleTable, seed: int = 0) -> list[list[int]]:
    """Random samples, about two a batch, many more batches than there are buffers."""
    draw = np.random.default_rng(seed)
    return [draw.choice(len(table), 2, replace=False).tolist() for _ in range(50)]


def assert_holds(read: ReadBatch[int], dataset: Dataset, table: SampleTable, samples: list[int]) -> None:
    batch, begin = read.batch, 0
    for document, index in enumerate(samples):
        sample = dataset.sample(f"{int(table.ids[index]):016x}")
        end = begin + sample.num_tokens
        assert torch.equal(batch.input_ids[begin:end], sample.input_ids.long())
        assert torch.equal(batch.loss_mask[begin:end], sample.loss_mask.bool())
        assert torch.equal(batch.features[begin:end], sample.features.float())
        assert sample.last_hidden is not None
        assert torch.equal(batch.last_hidden[begin:end], sample.last_hidden.float())
        assert batch.target_top1 is not None
        assert sample.target_top1 is not None
        assert torch.equal(batch.target_top1[begin:end], sample.target_top1.long())
        assert batch.document[begin:end].tolist() == [document] * sample.num_tokens
        assert batch.position[begin:end].tolist() == list(range(sample.num_tokens))
        begin = end
    assert batch.num_tokens == begin


def test_the_table_says_where_each_sample_is(dataset: Dataset, tmp_path: Path) -> None:
    table = read_samples(dataset)
    assert len(table) == NUM_SAMPLES
    for n, sample_id in enumerate(table.ids.tolist()):
        assert dataset.locate(f"{sample_id:016x}") == (table.shards[n], table.places[n])
        assert dataset.sample(f"{sample_id:016x}").num_tokens == table.lengths[n]
    table.save(tmp_path / "table")
    again = SampleTable.load(tmp_path / "table")
    assert np.array_equal(again.ids, table.ids)
    assert np.array_equal(again.lengths, table.lengths)


def test_batches_hold_their_samples_in_order(dataset: Dataset) -> None:
    table = read_samples(dataset)
    jobs = packed(table)
    with reader(dataset, table, jobs) as opened:
        for n, read in enumerate(opened):
            assert read.tag == n
            assert_holds(read, dataset, table, jobs[n])
            assert len(read.batch.input_ids) == read.batch.num_tokens
    assert n == len(jobs) - 1


def test_a_fixed_number_of_rows_is_padded(dataset: Dataset) -> None:
    table = read_samples(dataset)
    jobs = packed(table, seed=1)
    with reader(dataset, table, jobs, fixed=True) as opened:
        for read in opened:
            assert_holds(read, dataset, table, jobs[read.tag])
            batch, padding = read.batch, slice(read.batch.num_tokens, None)
            assert len(batch.input_ids) == len(batch.features) == ROWS
            assert (batch.document[padding] == -1).all()
            assert not batch.loss_mask[padding].any()
            assert not batch.features[padding].any()


def test_rows_with_a_loss_are_counted_per_step(dataset: Dataset) -> None:
    table = read_samples(dataset)
    with reader(dataset, table, packed(table, seed=2)) as opened:
        for read in opened:
            batch = read.batch
            assert torch.equal(read.rows, loss_rows(batch.loss_mask, batch.document, multiple=1))
            for k, count in enumerate(read.num_rows):
                assert count == int((batch.loss_mask & (batch.position >= k + 2)).sum())


def test_a_sample_longer_than_the_batch_is_cut(dataset: Dataset) -> None:
    table = read_samples(dataset)
    longest = int(table.lengths.argmax())
    with reader(dataset, table, [[longest]], rows=10) as opened:
        read = next(opened)
    sample = dataset.sample(f"{int(table.ids[longest]):016x}")
    assert torch.equal(read.batch.features, sample.features[:10].float())
    assert read.batch.num_tokens == 10


def test_a_damaged_shard_is_raised_where_its_batch_would_come(dataset: Dataset) -> None:
    table = read_samples(dataset)
    broken = dataset.path / "shards" / dataset.shards[1]
    broken.write_bytes(broken.read_bytes()[:-100])
    good = np.flatnonzero(table.shards != 1)[:3].tolist()
    bad = int(np.flatnonzero(table.shards == 1)[0])
    with reader(dataset, table, [[good[0]], [good[1]], [bad], [good[2]]]) as opened:
        next(opened)
        next(opened)
        with pytest.raises(ShardError, match=dataset.shards[1]):
            next(opened)


def test_closing_early_ends_every_thread(dataset: Dataset) -> None:
    import threading

    table = read_samples(dataset)
    before = threading.active_count()
    with reader(dataset, table, packed(table) * 10) as opened:
        next(opened)
    assert threading.active_count() == before
