"""The reader: by id, by shard, by window, through safetensors alone, and from another process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch

from eyas.shards import Dataset, Sample, open_dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import parse_sample_ids, sample_id

TENSORS = ("input_ids", "loss_mask", "features", "last_hidden", "target_top1", "target_lse")
Make = Callable[..., tuple[Path, DatasetIdentity, list[Sample]]]


def test_samples_come_back_to_the_bit(dataset: Make, tiny: type[Any]) -> None:
    folder, identity, samples = dataset()
    found = open_dataset(folder)
    assert found.identity == identity
    assert len(found) == found.num_samples == len(samples)
    assert all(tiny.same(a, b) for a, b in zip(found, samples, strict=True))
    assert all(tiny.same(found.sample(sample.sample_id), sample) for sample in reversed(samples))
    by_shard = [sample for shard in found.iter_shards() for sample in shard]
    assert all(tiny.same(a, b) for a, b in zip(by_shard, samples, strict=True))
    assert [name for shard in found.iter_shards() for name in shard.sample_ids] == [s.sample_id for s in samples]
    assert [shard.path.name for shard in found.iter_shards()] == found.shards


def test_windows_of_rows(dataset: Make, tiny: type[Any]) -> None:
    folder, _, samples = dataset()
    found = open_dataset(folder)
    for whole in samples:
        shard, n = found.locate(whole.sample_id)
        for rows in (slice(0, 2), slice(1, 3), slice(-2, None), slice(2, 2), slice(5, 3), slice(None)):
            expected = {name: getattr(whole, name)[rows].contiguous() for name in TENSORS}
            assert tiny.same(found.shard(shard).sample(n, rows), replace(whole, **expected))
        with pytest.raises(ValueError, match="step"):
            found.shard(shard).sample(n, slice(0, 3, 2))


def test_what_is_not_there(dataset: Make) -> None:
    folder, _, samples = dataset()
    found = open_dataset(folder)
    assert "0" * 16 not in found
    assert samples[0].sample_id in found
    with pytest.raises(KeyError, match="0" * 16):
        found.sample("0" * 16)
    with pytest.raises(IndexError):
        found.shard(0).sample(100)


def test_optional_tensors_may_be_absent(dataset: Make, tiny: type[Any]) -> None:
    folder, _, samples = dataset(last_hidden=None, target_statistics=False)
    found = list(open_dataset(folder))
    assert found[0].last_hidden is None
    assert found[0].target_top1 is None
    assert all(tiny.same(a, b) for a, b in zip(found, samples, strict=True))


def test_writing_into_a_tensor_changes_no_file(dataset: Make, tiny: type[Any]) -> None:
    folder, _, samples = dataset()
    open_dataset(folder).sample(samples[0].sample_id).features.zero_()
    open_dataset(folder).sample(samples[0].sample_id).input_ids.zero_()
    assert tiny.same(open_dataset(folder).sample(samples[0].sample_id), samples[0])


def test_a_dataset_travels_to_a_loaders_worker(dataset: Make, tiny: type[Any]) -> None:
    folder, _, samples = dataset()
    found = open_dataset(folder)
    found.sample(samples[0].sample_id)
    content = pickle.dumps(found)
    assert len(content) < 20_000, "mapped shards must not travel"
    assert tiny.same(pickle.loads(content).sample(samples[3].sample_id), samples[3])


def test_more_shards_than_are_kept_open(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    samples = tiny.samples(identity, 40)
    tiny.write(tmp_path, identity, samples, shard_bytes=1)
    found = open_dataset(tmp_path)
    assert len(found.shards) == 40
    kept = [found.sample(sample.sample_id) for sample in samples]
    assert all(tiny.same(a, b) for a, b in zip(kept, samples, strict=True))


def test_safetensors_alone_reads_a_shard_of_codec_raw(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    samples = tiny.samples(identity)
    tiny.write(tmp_path, identity, samples, shard_bytes=100_000)
    (path,) = (tmp_path / "shards").iterdir()
    tensors = safetensors.torch.load_file(path)
    offsets = tensors["offsets"].tolist()
    for n, sample in enumerate(samples):
        rows = slice(offsets[n], offsets[n + 1])
        found = Sample(
            sample_id=sample.sample_id,
            **{name: tensors[name][rows] for name in TENSORS},
        )
        assert tiny.same(found, sample)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "eyas"
    assert json.loads(metadata["taps"]) == ["after:1", "after:3", "after:4"]
    assert json.loads(metadata["last_hidden"]) == "after:7"
    assert json.loads(metadata["sample_ids"]) == [sample.sample_id for sample in samples]
    assert json.loads(metadata["num_trained_tokens"]) == [int(sample.loss_mask.sum()) for sample in samples]
    assert json.loads(metadata["engine"]) == {"engine": "test"}
    assert set(json.loads(metadata["xxh3"])) == set(tensors)


def test_sample_ids_are_a_digest_of_the_tokens() -> None:
    """Golden: ids made by one version are the ids of every other."""
    input_ids, loss_mask = np.array([1, 2, 49151], np.int32), np.array([0, 1, 1], np.uint8)
    assert sample_id(input_ids, loss_mask) == "10c28ddc4b4fdaef"
    assert sample_id(input_ids.astype(">i4"), loss_mask) == "10c28ddc4b4fdaef"
    assert sample_id(input_ids, np.array([0, 1, 0], np.uint8)) != "10c28ddc4b4fdaef"
    assert sample_id(input_ids[:2], loss_mask[:2]) != "10c28ddc4b4fdaef"
    assert parse_sample_ids(["00000000000000ff", "ff00000000000000"]).tolist() == [255, 255 << 56]
    with pytest.raises(ValueError, match="one length"):
        sample_id(input_ids, loss_mask[:2])


def test_the_public_names() -> None:
    import eyas.shards

    assert {"Dataset", "Sample", "Shard", "open_dataset"} == set(eyas.shards.__all__)
    assert open_dataset.__module__ == Dataset.__module__
    with pytest.raises(AttributeError, match="nothing"):
        eyas.shards.nothing  # noqa: B018
