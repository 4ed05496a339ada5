"""Golden files: datasets written once, as docs/format.md says, and read by every later version.

golden/raw must also be written again to the byte. golden/zstd is only read: compressors change their bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard

from eyas.shards.dataset import open_dataset
from eyas.shards.identity import DatasetIdentity, content_hash, create_or_match
from eyas.shards.sample import Sample, sample_id
from eyas.shards.validate import validate
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import FINAL, after

GOLDEN = Path(__file__).parent / "golden"
TOKENS = [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])]


def golden_identity(tiny: type[Any], codec: str) -> DatasetIdentity:
    identity: DatasetIdentity = tiny.identity(hidden_size=2, taps=(after(0), after(6)), last_hidden=FINAL, codec=codec)
    return identity


def golden_samples() -> list[Sample]:
    samples, row = [], 0
    for ids, mask in TOKENS:
        num_tokens = len(ids)
        input_ids, loss_mask = torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)
        rows = torch.arange(row, row + num_tokens)[:, None]  # [T, 1]
        samples.append(
            Sample(
                sample_id=sample_id(input_ids.numpy(), loss_mask.numpy()),
                input_ids=input_ids,
                loss_mask=loss_mask,
                features=(rows * 4 + torch.arange(4) + 1).bfloat16(),  # row r: 4r+1 ... 4r+4
                last_hidden=-(rows * 2 + torch.arange(2)).bfloat16() / 8,
                target_top1=torch.where(
                    loss_mask.roll(-1).bool() & (torch.arange(num_tokens) < num_tokens - 1), 3, -1
                ).int(),
                target_lse=torch.arange(num_tokens) + 0.5,
            )
        )
        row += num_tokens
    return samples


def test_golden_datasets_are_read(tiny: type[Any], codec: str) -> None:
    found = open_dataset(GOLDEN / codec)
    assert found.identity == golden_identity(tiny, codec)
    assert not found.problems
    assert all(tiny.same(a, b) for a, b in zip(found, golden_samples(), strict=True))
    for entry in found.ledgers.entries:
        validate(GOLDEN / codec / "shards" / entry.shard, found.identity, entry)


def test_the_golden_raw_dataset_is_written_again_to_the_byte(
    tmp_path: Path, tiny: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    write(tmp_path, golden_identity(tiny, "raw"))
    for path in ("dataset.json", "ledger/golden-0.jsonl", "shards/golden-0-000000.safetensors"):
        assert (tmp_path / path).read_bytes() == (GOLDEN / "raw" / path).read_bytes(), path


def test_golden_shards_are_read_without_eyas(codec: str) -> None:
    """By what docs/format.md says and numpy, xxhash and zstandard alone."""
    content = (GOLDEN / codec / "shards/golden-0-000000.safetensors").read_bytes()
    line = json.loads((GOLDEN / codec / "ledger/golden-0.jsonl").read_text())
    assert line["num_bytes"] == len(content)
    assert line["xxh3"] == xxhash.xxh3_64_hexdigest(content)

    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    prefix = b'{"__metadata__":{"header_xxh3":"'
    assert header.startswith(prefix)
    start = len(prefix)
    zeroed = header[:start] + b"0" * 16 + header[start + 16 :]
    assert header[start : start + 16].decode() == xxhash.xxh3_64_hexdigest(zeroed)

    table = json.loads(header)
    metadata = table.pop("__metadata__")
    dtypes = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "BF16": "<u2", "U8": "u1"}
    tensors = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        body = content[8 + length + begin : 8 + length + end]
        assert json.loads(metadata["xxh3"])[name] == xxhash.xxh3_64_hexdigest(body)
        tensors[name] = np.frombuffer(body, dtypes[entry["dtype"]]).reshape(entry["shape"])
    assert tensors["offsets"].tolist() == [0, 3, 5]
    assert tensors["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert tensors["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    assert tensors["target_top1"].tolist() == [3, 3, -1, 3, -1]

    if codec == "raw":
        patterns = tensors["features"]
    else:
        rows = []
        for n, (begin, size, raw_begin) in enumerate(tensors["features.frames"].tolist()):
            num_tokens = int(np.diff(tensors["offsets"])[n])
            frame = tensors["features.zst"][begin : begin + size].tobytes()
            deltas = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8).reshape(num_tokens, 4)
            exponents = (deltas + tensors["features.medians"]).astype(np.uint16)  # wraps mod 256
            signs = (
                tensors["features.zst"][raw_begin : raw_begin + num_tokens * 4].reshape(num_tokens, 4).astype(np.uint16)
            )
            rows.append((signs & 0x80) << 8 | exponents << 7 | signs & 0x7F)
        patterns = np.concatenate(rows)
    floats = (patterns.astype("<u4") << 16).view("<f4")  # a bfloat16 is the upper half of a float32
    assert floats.tolist() == (np.arange(20) + 1.0).reshape(5, 4).tolist()


def test_the_golden_content_hash(tiny: type[Any]) -> None:
    assert content_hash(golden_identity(tiny, "raw")) == "082fe64c637af7a48c846bb70a28a9da"


def write(folder: Path, identity: DatasetIdentity) -> None:
    create_or_match(folder, identity)
    with ShardWriter(folder, identity=identity, worker="golden-0", metadata={"engine": "none"}) as writer:
        for sample in golden_samples():
            writer.add(sample)
