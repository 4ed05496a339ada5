"""The pump: pieces of samples become whole samples, and what is not what it is taken for is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.capture.errors import TargetError
from eyas.capture.pump import CapturedBatch, Piece, Pump
from eyas.shards.ledger import SealedShard
from eyas.shards.sample import Sample, TokenSample, sample_id
from eyas.shards.statistics import tap_statistics
from eyas.taps.notation import after

TAPS, HIDDEN = (after(0), after(2)), 4


class Kept:
    """In place of a shard writer."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self.statistics: dict[str, Tensor] = {}

    def add(self, sample: Sample, statistics: Tensor | None = None) -> list[SealedShard]:
        assert sample.sample_id not in self.samples
        assert statistics is not None
        self.samples[sample.sample_id] = sample
        self.statistics[sample.sample_id] = statistics
        return []

    def close(self) -> list[SealedShard]:
        return []


def token_sample(num_tokens: int, first_id: int) -> TokenSample:
    ids = np.arange(first_id, first_id + num_tokens, dtype=np.int32)
    mask = np.ones(num_tokens, dtype=np.uint8)
    return TokenSample(sample_id=sample_id(ids, mask), input_ids=ids, loss_mask=mask)


def states(sample: TokenSample) -> Tensor:
    """Made-up features of a sample: [T, A, H]"""
    draw = torch.Generator().manual_seed(int(sample.input_ids[0]))
    return torch.randn(sample.num_tokens, len(TAPS), HIDDEN, generator=draw)


def batch(pieces: Sequence[tuple[TokenSample, int, int]], *, shifted: bool = False) -> CapturedBatch:
    """Rows begin to end of each sample."""
    rows = [states(sample)[begin:end] for sample, begin, end in pieces]
    ids = np.concatenate([sample.input_ids[begin:end] for sample, begin, end in pieces])
    num_rows = len(ids)
    return CapturedBatch(
        pieces=[Piece(sample=sample, begin=begin, num_rows=end - begin) for sample, begin, end in pieces],
        features=torch.cat(rows),
        last_hidden=torch.cat(rows)[:, 0],
        target_top1=torch.from_numpy(ids),
        target_lse=torch.zeros(num_rows),
        input_ids=torch.from_numpy(ids + shifted),
    )


def pumped(batches: Sequence[CapturedBatch]) -> Kept:
    kept = Kept()
    with Pump(kept, taps=TAPS, last_hidden=after(2), device=torch.device("cpu")) as pump:
        for captured in batches:
            pump.put(captured)
        assert pump.finish() == []
    return kept


def assert_whole(kept: Kept, samples: Sequence[TokenSample]) -> None:
    assert set(kept.samples) == {sample.sample_id for sample in samples}
    for sample in samples:
        found, expected = kept.samples[sample.sample_id], states(sample)
        assert torch.equal(found.features, expected.flatten(1))
        assert found.last_hidden is not None
        assert torch.equal(found.last_hidden, expected[:, 0])
        assert found.target_top1 is not None
        assert found.target_top1.tolist() == sample.input_ids.tolist()
        totals = torch.cat([tap_statistics(expected), tap_statistics(expected[:, :1])])
        assert torch.allclose(kept.statistics[sample.sample_id], totals)


def test_pieces_become_the_samples_they_are_of() -> None:
    a, b, c = token_sample(7, 10), token_sample(3, 30), token_sample(5, 50)
    assert_whole(
        pumped([batch([(a, 0, 4), (b, 0, 3)]), batch([(a, 4, 6), (c, 0, 1)]), batch([(a, 6, 7), (c, 1, 5)])]), [a, b, c]
    )


def test_a_sample_that_the_engine_starts_over_is_written_once() -> None:
    a, b = token_sample(7, 10), token_sample(3, 30)
    assert_whole(pumped([batch([(a, 0, 4)]), batch([(b, 0, 3), (a, 0, 2)]), batch([(a, 2, 7)])]), [a, b])


def test_a_sample_without_its_last_piece_is_not_written() -> None:
    a, b = token_sample(7, 10), token_sample(3, 30)
    assert_whole(pumped([batch([(a, 0, 4), (b, 0, 3)])]), [b])


def test_pieces_with_a_gap_are_refused() -> None:
    a = token_sample(7, 10)
    with pytest.raises(TargetError, match="went on at token 5, and 4 are here"):
        pumped([batch([(a, 0, 4)]), batch([(a, 5, 7)])])


def test_rows_of_other_tokens_are_refused() -> None:
    with pytest.raises(TargetError, match="does not hold the tokens"):
        pumped([batch([(token_sample(7, 10), 0, 7)], shifted=True)])
