"""Defects inside a dataset, injected one at a time: each is named, whatever else is checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.align.static import check_static
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from tests.align.made import VOCAB, bad, draft_config, make_dataset, make_draft, make_identity, make_sample

IDENTITY = make_identity("after:1,after:15,after:28")


def samples(identity: DatasetIdentity = IDENTITY, spoil: object = None, *, num: int = 5) -> list[Sample]:
    draw = np.random.default_rng(1)
    return [
        make_sample(identity, draw.integers(0, VOCAB, 20 + n).tolist(), [0] * 8 + [1] * (12 + n), seed=n, spoil=spoil)  # type: ignore[arg-type]
        for n in range(num)
    ]


def nan(features: Tensor) -> None:
    features[3, 1, 2] = torch.nan


def dead(features: Tensor) -> None:
    features[:, 2] = 0


def constant(features: Tensor) -> None:
    features[:, 0] = torch.linspace(-1, 1, features.shape[-1])


def twins(features: Tensor) -> None:
    features[:, 2] = features[:, 1]


@pytest.mark.parametrize(
    ("spoil", "subject", "words"),
    [
        (nan, "NaN and Inf", "after:15: 5 values"),
        (dead, "tap after:28", "nothing but zeros in every shard"),
        (constant, "tap after:1", "every row is the same one"),
        (twins, "taps after:15 and after:28", "they are the same tensor"),
    ],
)
def test_hidden_states_that_carry_nothing(tmp_path: Path, spoil: object, subject: str, words: str) -> None:
    dataset = make_dataset(tmp_path, IDENTITY, samples(spoil=spoil))
    found = bad(check_static(dataset))
    found.pop("mask roles")
    assert found.keys() == {subject}
    assert found[subject].status == "mismatch"
    assert words in found[subject].found


def test_duplicates_across_workers(tmp_path: Path) -> None:
    make_dataset(tmp_path, IDENTITY, samples(), worker="a-0")
    make_dataset(tmp_path, IDENTITY, samples(num=2), worker="b-0")
    finding = bad(check_static(tmp_path))["duplicates"]
    assert finding.status == "warning"
    assert "2 of 7 stored samples" in finding.found


def test_a_sample_without_a_trained_token(tmp_path: Path) -> None:
    whole = [*samples(num=3), make_sample(IDENTITY, [5] * 9, [0] * 9, seed=9)]
    finding = bad(check_static(make_dataset(tmp_path, IDENTITY, whole)))["loss masks"]
    assert finding.status == "warning"
    assert whole[-1].sample_id in finding.found


def test_masks_lost_altogether(tmp_path: Path) -> None:
    empty = [make_sample(IDENTITY, [n] * 9, [0] * 9, seed=n) for n in range(3)]
    assert bad(check_static(make_dataset(tmp_path, IDENTITY, empty)))["loss masks"].status == "mismatch"


def test_sequences_longer_than_the_drafts_positions(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", IDENTITY, samples())
    draft = make_draft(tmp_path / "draft", draft_config(max_position_embeddings=22))
    finding = bad(check_static(dataset, draft=draft))["sequence lengths"]
    assert finding.status == "mismatch"
    assert "2 samples are longer" in finding.found
    assert "24 tokens" in finding.found


def test_a_flipped_byte_in_a_header(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, IDENTITY, samples())
    (shard,) = (dataset / "shards").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)
    assert shard.name in bad(check_static(dataset))["shards"].found


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    make_dataset(tmp_path, IDENTITY, samples(num=2), worker="a-0")
    make_dataset(tmp_path, IDENTITY, samples(num=4), worker="b-0")
    (tmp_path / "shards" / "a-0-000000.safetensors").unlink()
    assert "line without shard" in bad(check_static(tmp_path))["ledgers"].found


def test_nothing_sealed(tmp_path: Path) -> None:
    report = check_static(make_dataset(tmp_path, IDENTITY, []))
    assert report.exit_status() == 3
    assert bad(report)["data"].found == "no sealed shard"
