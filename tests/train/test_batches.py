"""Packing, order and the share of each rank: every sample exactly once, whatever the world size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.batches import EpochPlan, pack, plan_epoch, rank_shares
from eyas.train.split import validation_mask

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=1500)


def planned(lengths: list[int], *, batch_tokens: int = 128, seed: int = 0, epoch: int = 0) -> EpochPlan:
    ids = np.arange(len(lengths), dtype=np.uint64) * np.uint64(0x1234567) + np.uint64(1)
    samples = np.arange(len(lengths))
    return plan_epoch(samples, ids, np.array(lengths, np.int32), batch_tokens=batch_tokens, seed=seed, epoch=epoch)


@given(LENGTHS)
def test_every_sample_once_and_no_batch_too_large(lengths: list[int]) -> None:
    plan = planned(lengths)
    assert sorted(plan.members.tolist()) == list(range(len(lengths)))
    cut = np.minimum(lengths, 128)
    for batch in range(plan.num_batches):
        assert 0 < cut[plan.samples(batch)].sum() <= 128


@given(LENGTHS, st.integers(0, 5), st.integers(0, 5))
def test_the_same_seed_and_epoch_give_the_same_batches(lengths: list[int], seed: int, epoch: int) -> None:
    first, again = (planned(lengths, seed=seed, epoch=epoch) for _ in range(2))
    assert np.array_equal(first.members, again.members)
    assert np.array_equal(first.starts, again.starts)


def test_seeds_and_epochs_give_other_orders() -> None:
    lengths = [10] * 400
    orders = {tuple(planned(lengths, seed=seed, epoch=epoch).members) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_fixed_for_good() -> None:
    """Resuming under a later release must find the same batches."""
    assert planned(list(range(20, 40)), seed=7, epoch=1).members.tolist() == EXPECTED


EXPECTED = [1, 19, 18, 10, 13, 17, 16, 2, 5, 15, 14, 12, 0, 11, 9, 8, 6, 7, 4, 3]


def test_batches_are_full() -> None:
    lengths = np.random.default_rng(0).integers(20, 2049, 4000)
    plan = pack(np.arange(4000), lengths.astype(np.int32), 8192)
    assert lengths.sum() / (plan.num_batches * 8192) > 0.995


def test_no_sample_waits_long() -> None:
    """Small ones are not put off for ever by a stream of large ones that fit better."""
    lengths = np.array([1, *[64] * 2000], np.int32)
    plan = pack(np.arange(2001), lengths, 128)
    assert 0 in plan.samples(0)


@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 4), st.data())
def test_ranks_partition_the_same_steps(
    num_batches: int, accumulate: int, world_size: int, data: st.DataObject
) -> None:
    per_step = accumulate * world_size
    first = per_step * data.draw(st.integers(0, num_batches // per_step))
    steps = list(zip(*(
        rank_shares(num_batches, first, per_step, rank=rank, world_size=world_size) for rank in range(world_size)
    ), strict=True))  # fmt: skip
    seen = []
    for number, step in enumerate(steps):
        assert len({len(shares) for shares in step}) == 1, "ranks would wait for each other for ever"
        real = sorted(share.batch for shares in step for share in shares if not share.is_filler)
        start = first + number * per_step
        assert real == list(range(start, min(start + per_step, num_batches)))
        seen += real
    assert seen == list(range(first, num_batches))


@given(st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=300), st.floats(0.01, 0.5))
def test_the_split_of_a_sample_does_not_depend_on_the_others(ids: set[int], share: float) -> None:
    every = np.array(sorted(ids), np.uint64)
    held_out = validation_mask(every, share)
    assert 0 < held_out.sum() < len(every)
    half = every[::2]
    if len(half) >= 2:
        changed = (validation_mask(half, share) != held_out[::2]).sum()
        assert changed <= 1, "only to have one on each side"


def test_the_split_has_the_size_asked_for() -> None:
    ids = np.arange(100_000, dtype=np.uint64)
    assert validation_mask(ids, 0.05).mean() == pytest.approx(0.05, abs=0.003)
    assert not validation_mask(ids, 0).any()
