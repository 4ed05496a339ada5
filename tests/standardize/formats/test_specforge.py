"""SpecForge's layout: what pads its samples, and the whole of an export."""

from __future__ import annotations

import gzip
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.shards.dataset import open_dataset
from eyas.shards.identity import create_or_match
from eyas.shards.writer import ShardWriter
from eyas.standardize.formats.base import ForeignFileError
from eyas.standardize.formats.specforge.write import Writer
from eyas.standardize.formats.write_rows import OtherSamplesError, write_rows

from ...captured import captured_identity, make_samples
from .exchange import detect, open_reader


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


def _save(path: Path, ids: list[int], mask: list[int]) -> None:
    file = {
        "input_ids": torch.tensor(ids),
        "loss_mask": torch.tensor(mask),
        "hidden_state": torch.arange(len(ids) * 2.0).view(1, -1, 2),
        "aux_hidden_state": torch.arange(len(ids) * 6.0).view(1, -1, 6),
    }
    buffer = io.BytesIO()
    torch.save(file, buffer)
    content = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
def test_padding_is_cut_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    samples = {
        "a longest row": ([0, 7, 0, 8, 9], [0, 0, 0, 1, 1], 5),
        "padded": ([0, 7, 8, 0, 0], [0, 0, 1, 0, 0], 3),
        "ends in a target with id 0": ([5, 7, 0, 0, 0], [0, 1, 1, 0, 0], 3),
    }
    for n, (ids, mask, _) in enumerate(samples.values()):
        _save(tmp_path / "rows_0-2000" / f"data_{n}{suffix}", ids, mask)
    reader = open_reader(tmp_path, "specforge")
    for item, (ids, mask, length) in zip(reader.items(), samples.values(), strict=True):
        sample = reader.read(item)
        assert sample.input_ids.tolist() == ids[:length]
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == mask[:length]
        assert sample.last_hidden is not None
        assert sample.features.shape == (length, 3, 2)
        assert sample.features.flatten().tolist() == list(range(length * 6))
        assert sample.last_hidden.flatten().tolist() == list(range(length * 2))


def test_padding_alone_is_no_sample(tmp_path: Path) -> None:
    _save(tmp_path / "rows_0-2000" / "data_0.ckpt", [1, 2], [0, 1])
    _save(tmp_path / "rows_0-2000" / "data_1.ckpt", [0, 0], [0, 0])
    reader = open_reader(tmp_path, "specforge")
    with pytest.raises(ForeignFileError, match="padding alone"):
        reader.read(reader.items()[1])


def test_a_look_tells_the_variants_apart(tmp_path: Path) -> None:
    for name, ids in (("plain/data_0.ckpt", [1, 2]), ("packed/data_0.ckpt.gz", [1, 0])):
        _save(tmp_path / name, ids, [1, 0])
    versions = [detect(tmp_path / name, "specforge") for name in ("plain", "packed")]
    assert [layout.version for layout in versions if layout is not None] == [
        "offline features in .ckpt files",
        "offline features in .ckpt files, compressed and padded",
    ]
