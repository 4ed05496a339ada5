"""validate() catches every single damaged byte, truncation, and a shard of another dataset."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.shards.dataset import Dataset, Shard
from eyas.shards.errors import ShardError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.layout import build_header, read_header
from eyas.shards.ledger import SealedShard
from eyas.shards.validate import validate
from eyas.taps.notation import after


@pytest.fixture
def shard(tmp_path: Path, codec: str, tiny: type[Any]) -> tuple[Path, DatasetIdentity, SealedShard]:
    identity = tiny.identity(codec=codec, hidden_size=2)
    tiny.write(tmp_path, identity, tiny.samples(identity, 2), shard_bytes=10_000)
    entry = Dataset.open(tmp_path).ledgers.entries[0]
    return tmp_path / "shards" / entry.shard, identity, entry


def test_a_whole_shard_passes(shard: tuple[Path, DatasetIdentity, SealedShard]) -> None:
    path, identity, entry = shard
    validate(path, identity, entry)
    validate(path, identity, None)


def test_a_flipped_bit_of_any_byte_is_caught(shard: tuple[Path, DatasetIdentity, SealedShard]) -> None:
    """Without the ledger line: the file's own checksums leave no byte out."""
    path, identity, _ = shard
    content = bytearray(path.read_bytes())
    for at in range(len(content)):
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        with pytest.raises(ShardError):
            validate(path, identity, None)
        content[at] ^= 1 << at % 8


def test_a_truncation_at_any_length_is_caught(shard: tuple[Path, DatasetIdentity, SealedShard]) -> None:
    path, identity, _ = shard
    content = path.read_bytes()
    for length in [*range(0, len(content), 3), len(content) - 1]:
        path.write_bytes(content[:length])
        for check in (lambda: validate(path, identity, None), lambda: Shard(path, identity)):
            with pytest.raises(ShardError):
                check()
    path.write_bytes(content + b"\0")
    with pytest.raises(ShardError):
        validate(path, identity, None)


def test_the_damaged_tensor_is_named(shard: tuple[Path, DatasetIdentity, SealedShard]) -> None:
    path, identity, entry = shard
    content = path.read_bytes()
    for name, place in read_header(path).tensors.items():
        path.write_bytes(content[: place.begin] + bytes([content[place.begin] ^ 1]) + content[place.begin + 1 :])
        with pytest.raises(ShardError) as caught:
            validate(path, identity, entry)
        assert (caught.value.file, caught.value.tensor) == (path, name)
        assert str(path) in str(caught.value)
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"taps": (after(1), after(3), after(5))}, r"taps is .*after:4.*after:5"),
        ({"taps": (after(1), after(3))}, "taps"),
        ({"last_hidden": None}, "last_hidden"),
        ({"dtype": "float16", "codec": "raw"}, "dtype"),
        ({"target_statistics": False}, "another target or tokenizer|tensors"),
    ],
)
def test_a_shard_of_another_dataset_is_refused(
    shard: tuple[Path, DatasetIdentity, SealedShard], change: dict[str, Any], said: str
) -> None:
    path, identity, _ = shard
    with pytest.raises(ShardError, match=said):
        validate(path, replace(identity, **change), None)


def test_a_shard_of_another_target_is_refused_and_of_another_name_or_stage_is_not(
    shard: tuple[Path, DatasetIdentity, SealedShard],
) -> None:
    path, identity, entry = shard
    validate(path, replace(identity, stage="standard", target=replace(identity.target, name="/elsewhere")), entry)
    with pytest.raises(ShardError, match="another target or tokenizer"):
        validate(path, replace(identity, target=replace(identity.target, config_hash="c1")), entry)


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 1},
        {"xxh3": "0" * 16},
        {"num_tokens": 1},
        {"num_trained_tokens": 10_000},
        {"sample_ids": ("0" * 16,)},
        {"statistics": {}},
    ],
)
def test_a_ledger_line_of_another_shard_is_refused(
    shard: tuple[Path, DatasetIdentity, SealedShard], change: dict[str, Any]
) -> None:
    path, identity, entry = shard
    with pytest.raises(ShardError, match=re.escape(path.name)):
        validate(path, identity, replace(entry, **change))


def rewritten(path: Path, changed: Callable[[dict[str, bytearray], dict[str, str]], None]) -> None:
    """Change tensors or metadata and make every checksum right again: what only looking at the values can catch."""
    import json

    import xxhash

    header, content = read_header(path), path.read_bytes()
    tensors = {name: bytearray(content[place.begin : place.end]) for name, place in header.tensors.items()}
    metadata = {key: value for key, value in header.metadata.items() if key != "header_xxh3"}
    changed(tensors, metadata)
    metadata["xxh3"] = json.dumps({name: xxhash.xxh3_64_hexdigest(bytes(body)) for name, body in tensors.items()})
    specs = {name: place.spec for name, place in header.tensors.items()}
    path.write_bytes(build_header(metadata, specs) + b"".join(tensors.values()))


def test_forged_contents_are_caught(shard: tuple[Path, DatasetIdentity, SealedShard]) -> None:
    path, identity, _ = shard
    content = path.read_bytes()

    def other_tokens(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        tensors["input_ids"][0] ^= 1

    def mask_of_two(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        tensors["loss_mask"][0] = 2

    def negative_token(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        tensors["input_ids"][3] = 0x80

    def offsets_that_fall(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        tensors["offsets"][8:16] = np.int64(1 << 40).tobytes()

    def swapped_ids(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        first, second = re.findall("[0-9a-f]{16}", metadata["sample_ids"])
        metadata["sample_ids"] = f'["{second}", "{first}"]'

    def no_ids(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        metadata["sample_ids"] = "[]"

    def ids_that_are_no_strings(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        metadata["sample_ids"] = "[{}, {}]"

    def deep(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        metadata["engine"] = "[" * 100_000

    def missing(tensors: dict[str, bytearray], metadata: dict[str, str]) -> None:
        del metadata["statistics"]

    forgeries = [other_tokens, mask_of_two, negative_token, offsets_that_fall, swapped_ids, no_ids]
    for forge in [*forgeries, ids_that_are_no_strings, deep, missing]:
        path.write_bytes(content)
        rewritten(path, forge)
        with pytest.raises(ShardError):
            validate(path, identity, None)
    path.write_bytes(content)
    rewritten(path, lambda tensors, metadata: None)
    validate(path, identity, None)


def test_a_missing_or_unreadable_file_is_a_shard_error(tmp_path: Path, tiny: type[Any]) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("none.safetensors", "folder.safetensors"):
        with pytest.raises(ShardError, match=name):
            validate(tmp_path / name, tiny.identity(), None)
