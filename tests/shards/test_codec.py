"""Codecs: lossless for every bit pattern, windows alone, and nothing but a clear error from damaged bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.codec import CODECS
from eyas.shards.dataset import Dataset, Shard
from eyas.shards.errors import ShardError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.layout import TensorPlace, read_header
from eyas.shards.sample import Sample

Bytes = npt.NDArray[np.uint8]


def stored(codec: str, samples: list[Bytes], threads: int = 1) -> dict[str, Bytes]:
    with ThreadPoolExecutor(threads) as pool:
        encoder = CODECS[codec].Encoder("features", pool)
        for sample in samples:
            encoder.add(sample)
        pieces = encoder.finish()
    return {name: np.concatenate([piece.reshape(-1) for piece in parts]) for name, parts in pieces.items()}


def bounds(samples: list[Bytes]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])


def test_every_bfloat16_pattern_survives(codec: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2").reshape(256, 256)
    samples = [patterns.view(np.uint8), patterns.T.copy().view(np.uint8)]
    tensors, offsets = stored(codec, samples), bounds(samples)
    CODECS[codec].check("features", tensors, offsets, 512)
    for n, sample in enumerate(samples):
        assert np.array_equal(CODECS[codec].decode("features", tensors, offsets, 512, n, slice(0, 256)), sample)


@given(data=st.data())
def test_samples_and_windows_survive(data: st.DataObject) -> None:
    codec = CODECS[name := data.draw(st.sampled_from(sorted(CODECS)))]
    width = data.draw(st.integers(1, 9))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    samples = [generator.integers(0, 256, (t, 2 * width), dtype=np.uint8) for t in lengths]
    tensors, offsets = stored(name, samples, threads=2), bounds(samples)
    codec.check("features", tensors, offsets, 2 * width)
    n = data.draw(st.integers(0, len(samples) - 1))
    start = data.draw(st.integers(0, lengths[n]))
    stop = data.draw(st.integers(start, lengths[n]))
    rows = codec.decode("features", tensors, offsets, 2 * width, n, slice(start, stop))
    assert np.array_equal(rows, samples[n][start:stop])


def test_blocks_of_many_rows_survive() -> None:
    """More rows than one block of the plane split, and a width that does not divide it."""
    sample = np.random.default_rng(0).integers(0, 256, (2000, 2 * 333), dtype=np.uint8)
    tensors = stored("zstd", [sample])
    assert np.array_equal(CODECS["zstd"].decode("features", tensors, bounds([sample]), 666, 0, slice(0, 2000)), sample)


@pytest.mark.parametrize("threads", [1, 3])
def test_samples_that_come_before_and_after_the_medians_survive(codec: str, threads: int) -> None:
    """Long and short ones, and rows with gaps between them, as slices of a wider batch have."""
    generator = np.random.default_rng(0)
    lengths = [1, 300, 7, 900, 2, 1500, 1]
    samples = [generator.integers(0, 256, (length, 3 * 64), dtype=np.uint8)[:, 64:128] for length in lengths]
    tensors, offsets = stored(codec, samples, threads), bounds(samples)
    CODECS[codec].check("features", tensors, offsets, 64)
    for n, sample in enumerate(samples):
        found = CODECS[codec].decode("features", tensors, offsets, 64, n, slice(0, len(sample)))
        assert np.array_equal(found, sample), n


def test_exponents_near_a_channels_median_compress() -> None:
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((512, 256)) * np.exp(generator.standard_normal(256) * 3)).astype("<f4")
    sample = np.ascontiguousarray(rows.view("<u4") >> 16).astype("<u2").view(np.uint8)
    assert sample.size / sum(tensor.size for tensor in stored("zstd", [sample]).values()) > 1.4


# Written once and never again: what was made must be readable for ever. Two samples, of 2 and 1 tokens, width 3.
GOLDEN = {
    "features.frames": "0000000000000000 0f00000000000000 0f00000000000000"
    "1500000000000000 0c00000000000000 2100000000000000",
    "features.medians": "7f 80 00",
    "features.zst": "28b52ffd200631000000 0000807f0000 800140808028 b52ffd2003190000 81ff01 007f7f",
}
GOLDEN_ROWS = [[[0x3F80, 0xC000, 0x0001], [0x7FC0, 0xFF80, 0x8000]], [[0x0000, 0x3FFF, 0x00FF]]]


def test_golden_bytes_decode() -> None:
    tensors = {name: np.frombuffer(bytes.fromhex(text), np.uint8) for name, text in GOLDEN.items()}
    offsets = np.array([0, 2, 3])
    CODECS["zstd"].check("features", tensors, offsets, 6)
    for n, rows in enumerate(GOLDEN_ROWS):
        found = CODECS["zstd"].decode("features", tensors, offsets, 6, n, slice(0, len(rows)))
        assert found.view("<u2").tolist() == rows


def test_golden_bytes_decode_without_eyas() -> None:
    """As docs/format.md says it, in a few lines that share nothing with the codec."""
    zst, medians = bytes.fromhex(GOLDEN["features.zst"]), bytes.fromhex(GOLDEN["features.medians"])
    frames = np.frombuffer(bytes.fromhex(GOLDEN["features.frames"]), "<i8").reshape(2, 3).tolist()
    for (begin, length, raw), rows in zip(frames, GOLDEN_ROWS, strict=True):
        exponents = zstandard.ZstdDecompressor().decompress(zst[begin : begin + length])
        for i, pattern in enumerate(value for row in rows for value in row):
            exponent, sign = (exponents[i] + medians[i % 3]) % 256, zst[raw + i]
            assert (sign & 0x80) << 8 | exponent << 7 | sign & 0x7F == pattern


def test_one_sample_needs_only_its_bytes(
    tmp_path: Path, dataset: Callable[..., tuple[Path, DatasetIdentity, list[Sample]]], codec: str, tiny: type[Any]
) -> None:
    """Every byte of the other samples' wide rows is overwritten; this one still reads right."""
    folder, identity, samples = dataset()
    path = folder / "shards" / Dataset.open(folder).shards[0]
    n, shard = 1, Shard(path, identity)
    assert len(shard) > 2, "a sample before and one after"
    content = bytearray(path.read_bytes())
    for name in identity.wide_tensors:
        begin, end, place = sample_bytes(path, shard, name, n, codec)
        content[place.begin : begin] = b"\xa5" * (begin - place.begin)
        content[end : place.end] = b"\xa5" * (place.end - end)
    (tmp_path / path.name).write_bytes(content)
    expected = next(sample for sample in samples if sample.sample_id == shard.sample_ids[n])
    assert tiny.same(Shard(tmp_path / path.name, identity).sample(n), expected)


def test_damaged_wide_bytes_give_other_values_or_a_shard_error(
    tmp_path: Path, dataset: Callable[..., tuple[Path, DatasetIdentity, list[Sample]]]
) -> None:
    """Reading proves no checksum (validate does), but never crashes and never returns another shape."""
    folder, identity, _ = dataset()
    path = folder / "shards" / Dataset.open(folder).shards[0]
    header, content = read_header(path), path.read_bytes()
    damaged = tmp_path / path.name
    for name, place in header.tensors.items():
        if name.startswith("features"):
            for at in range(place.begin, place.end):
                damaged.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
                try:
                    shard = Shard(damaged, identity)
                    for n in range(len(shard)):
                        num_tokens = int(shard.offsets[n + 1] - shard.offsets[n])
                        assert shard.sample(n).features.shape == (num_tokens, identity.features_width)
                except ShardError:
                    continue


def test_forged_frame_size_takes_no_memory() -> None:
    """A frame that claims 2 GB is refused by its header."""
    sample = np.zeros((4, 6), np.uint8)
    tensors = stored("zstd", [sample])
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    frames = np.array([[0, len(bomb), len(bomb)]], "<i8")
    forged = tensors | {
        "features.zst": np.concatenate([np.frombuffer(bomb, np.uint8), np.zeros(12, np.uint8)]),
        "features.frames": frames.view(np.uint8).reshape(-1),
    }
    with pytest.raises(ValueError, match="1048576"):
        CODECS["zstd"].decode("features", forged, bounds([sample]), 6, 0, slice(0, 4))


def sample_bytes(path: Path, shard: Shard, name: str, n: int, codec: str) -> tuple[int, int, TensorPlace]:
    """Where sample n of ``name`` lies in the file, and the tensor that it is in."""
    tensors, content = read_header(path).tensors, path.read_bytes()
    if codec == "raw":
        row_bytes = tensors[name].spec.shape[1] * 2
        begin, end = (tensors[name].begin + row * row_bytes for row in shard.offsets[n : n + 2].tolist())
        return begin, end, tensors[name]
    index, place = tensors[f"{name}.frames"], tensors[f"{name}.zst"]
    starts = np.frombuffer(content[index.begin : index.end], "<i8").reshape(-1, 3)[:, 0]
    return place.begin + int(starts[n]), place.begin + int(starts[n + 1]), place
