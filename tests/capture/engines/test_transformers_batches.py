"""Which samples are run together, and how they are padded."""

from __future__ import annotations

import numpy as np
import transformers
from hypothesis import given
from hypothesis import strategies as st

from eyas.capture.engines.transformers.batches import length_boundary, pad, plan_batches, real_rows
from tests.capture.engines.families import token_samples

lengths_lists = st.lists(st.integers(1, 300), max_size=60)


@given(lengths_lists, st.integers(1, 600), st.none() | st.integers(1, 300))
def test_every_row_is_in_one_batch_within_the_budget(
    lengths: list[int], batch_tokens: int, boundary: int | None
) -> None:
    rows = np.arange(len(lengths), dtype=np.int64) * 3 + 7
    batches = plan_batches(rows, np.array(lengths, dtype=np.int64), batch_tokens=batch_tokens, never_across=boundary)
    assert sorted(row for batch in batches for row in batch.rows) == rows.tolist()
    for batch in batches:
        assert [lengths[(row - 7) // 3] for row in batch.rows] == batch.lengths.tolist()
        assert batch.lengths[0] == batch.lengths.max()
        assert len(batch.rows) == 1 or len(batch.rows) * batch.lengths[0] <= batch_tokens
        if boundary is not None:
            assert len({length > boundary for length in batch.lengths}) == 1
    if batches:
        areas = [len(batch.rows) * batch.lengths[0] for batch in batches]
        assert areas[0] == max(areas)


@given(lengths_lists)
def test_the_plan_does_not_depend_on_the_order_of_the_rows(lengths: list[int]) -> None:
    order = np.random.default_rng(len(lengths)).permutation(len(lengths))
    rows, values = np.arange(len(lengths), dtype=np.int64), np.array(lengths, dtype=np.int64)
    plans = [
        [batch.rows.tolist() for batch in plan_batches(a, b, batch_tokens=400)]
        for a, b in ((rows, values), (rows[order], values[order]))
    ]
    assert plans[0] == plans[1]


def test_little_is_padded() -> None:
    lengths = np.random.default_rng(0).integers(10, 2000, 5000)
    batches = plan_batches(np.arange(5000), lengths, batch_tokens=16384)
    area = sum(len(batch.rows) * int(batch.lengths[0]) for batch in batches)
    assert area < 1.02 * lengths.sum()


def test_padding_repeats_the_last_id_and_is_left_out_again() -> None:
    samples = token_samples([3, 5, 1])
    padded = pad(samples)
    assert padded.shape == (3, 5)
    for n, sample in enumerate(samples):
        assert padded[n, : sample.num_tokens].tolist() == sample.input_ids.tolist()
        assert set(padded[n, sample.num_tokens :].tolist()) <= {int(sample.input_ids[-1])}
    rows = real_rows([3, 5, 1], [2, 0], 5)
    assert rows.tolist() == [10, 0, 1, 2]
    assert real_rows([3, 5, 1], [], 5).tolist() == []


def test_only_longrope_has_a_length_boundary() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    assert length_boundary(transformers.LlamaConfig()) is None
    assert length_boundary(transformers.LlamaConfig(rope_parameters=yarn)) is None
    assert length_boundary(transformers.Phi3Config(rope_parameters=long)) == 4096
    assert length_boundary(transformers.GPT2Config()) is None
