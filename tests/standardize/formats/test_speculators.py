"""The layout of speculators' trainer: what its own reader gets out of what we write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.shards.dataset import open_dataset
from eyas.shards.identity import DatasetIdentity, create_or_match
from eyas.shards.writer import ShardWriter
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.speculators.write import Writer
from eyas.standardize.formats.write_rows import OtherSamplesError, write_rows
from eyas.taps.notation import FINAL

from ...captured import captured_identity, make_samples


def _write(folder: Path, identity: DatasetIdentity) -> Path:
    create_or_match(folder, identity)
    with ShardWriter(folder, identity=identity, worker="w", metadata={}) as writer:
        for sample in make_samples(identity, identity.prepared.num_samples):
            writer.add(sample)
    return folder


@pytest.fixture
def dataset_folder(tmp_path: Path) -> Path:
    identity = captured_identity(num_samples=5, taps="after:1,after:3,after:5")
    return _write(tmp_path / "standard", replace(identity, stage="standard"))


def test_rows_and_files_hold_the_samples(dataset_folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(dataset_folder)
    order = [sample.sample_id for sample in dataset][::-1]
    d2t, t2d = np.zeros(64, dtype=np.int64), np.ones(64, dtype=bool)
    for _ in range(2):  # the second time nothing is left to do
        write_rows(dataset, tmp_path / "out", Writer(d2t=d2t, t2d=t2d), format="speculators", sample_ids=order)
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert [int(n) for n in rows.with_format(None)["seq_len"]] == [dataset.sample(id).num_tokens for id in order]
    for row, sample_id in enumerate(order):
        sample = dataset.sample(sample_id)
        stored = load_file(tmp_path / "out" / "hidden_states" / f"hs_{row}.safetensors")
        assert torch.equal(stored["token_ids"], rows[row]["input_ids"])  # as their reader compares them
        assert torch.equal(stored["token_ids"], sample.input_ids.long())
        assert torch.equal(rows[row]["loss_mask"], sample.loss_mask.long())
        assert torch.equal(stored["hidden_states"][:, :-1].flatten(1), sample.features)
        assert torch.equal(stored["hidden_states"][:, -1], sample.last_hidden)
    assert np.load(tmp_path / "out" / "d2t-64.npy").dtype == np.int64
    with pytest.raises(OtherSamplesError, match="holds other samples"):
        write_rows(dataset, tmp_path / "out", Writer(), format="speculators", sample_ids=order[1:])


def test_what_is_post_norm_is_refused(tmp_path: Path) -> None:
    identity = replace(captured_identity(num_samples=1, taps="after:1"), stage="standard", last_hidden=FINAL)
    folder = _write(tmp_path / "standard", identity)
    with pytest.raises(FormatError, match="cannot be made pre-norm"):
        write_rows(open_dataset(folder), tmp_path / "out", Writer(), format="speculators")
