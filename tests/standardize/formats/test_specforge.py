"""The layout of SpecForge's offline trainer: keys and shapes as its reader takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.shards.dataset import open_dataset
from eyas.shards.identity import create_or_match
from eyas.shards.writer import ShardWriter
from eyas.standardize.formats.specforge.write import Writer
from eyas.standardize.formats.write_rows import OtherSamplesError, write_rows

from ...captured import captured_identity, make_samples


def test_files_hold_the_samples_with_the_norm_applied(tmp_path: Path) -> None:
    identity = replace(captured_identity(num_samples=4, taps="after:1,after:3,after:5"), stage="standard")
    create_or_match(tmp_path / "standard", identity)
    with ShardWriter(tmp_path / "standard", identity=identity, worker="w", metadata={}) as writer:
        for sample in make_samples(identity, 4):
            writer.add(sample)
    dataset = open_dataset(tmp_path / "standard")
    order = [sample.sample_id for sample in dataset][::-1]
    d2t, t2d = np.arange(3), np.arange(64) % 2 == 0
    writer = Writer(final_norm=lambda hidden: hidden * 2, d2t=d2t, t2d=t2d)
    for _ in range(2):  # the second time nothing is left to do
        write_rows(dataset, tmp_path / "out", writer, format="specforge", sample_ids=order)
    for row, sample_id in enumerate(order):
        sample = dataset.sample(sample_id)
        path = tmp_path / "out" / "rows_0-2000" / f"data_{row}.ckpt"
        raw = torch.load(path, weights_only=True)
        assert torch.equal(raw["aux_hidden_state"].squeeze(0), sample.features)
        assert torch.equal(raw["hidden_state"].squeeze(0), sample.last_hidden * 2)
        assert torch.equal(raw["input_ids"], sample.input_ids.long())
        assert torch.equal(raw["loss_mask"], sample.loss_mask.long())
        assert path.stat().st_size < 2 * sample.features.nbytes + 10_000  # this sample's rows, not the shard's
    maps = torch.load(tmp_path / "out" / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    assert torch.equal(maps["d2t"], torch.from_numpy(d2t))
    with pytest.raises(OtherSamplesError, match="holds other samples"):
        write_rows(dataset, tmp_path / "out", writer, format="specforge", sample_ids=order[1:])
