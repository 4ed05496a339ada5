"""The byte layout of a shard: a plain safetensors file.

    0            8                  8+n                                                 num_bytes
    | n: u64 LE  | header: JSON, n  | tensors, back to back, widest alignment first     |

    header   {"__metadata__":{"header_xxh3":"................", ...},"offsets":{"dtype":"I64",...},...}   padded with
             spaces so that the tensors start at a multiple of 8 of the file; with the order, each tensor is aligned
    checks   header_xxh3 covers the header (its own digits as zeros), and the metadata's xxh3 each tensor: no byte of
             the file is outside a checksum

Nothing here reads a tensor, and nothing imports torch. docs/format.md is the specification.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eyas.shards.codec import CODECS
from eyas.shards.errors import ShardError
from eyas.shards.identity import FORMAT_VERSION, DatasetIdentity, content_hash

ITEMSIZE_BYTES = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses more

_PREFIX = b'{"__metadata__":{"header_xxh3":"'
_DIGITS = slice(len(_PREFIX), len(_PREFIX) + 16)


@dataclass(frozen=True)
class TensorSpec:
    """dtype as safetensors names it. A size of -1 is free: it depends on the bytes that a codec made."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file: its bytes are begin:end of the file."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file, checked as safetensors checks it."""

    content: bytes  # the JSON with its padding
    metadata: dict[str, str]
    tensors: dict[str, TensorPlace]  # by position in the file
    num_bytes: int  # of the whole file


@dataclass(frozen=True, kw_only=True)
class ShardMetadata:
    """What a shard's header says beyond the tensors' places, parsed."""

    sample_ids: tuple[str, ...]
    num_trained_tokens: tuple[int, ...]  # per sample
    num_tokens: int
    xxh3: dict[str, str]  # per tensor
    statistics: dict[str, Any]
    engine: dict[str, str]
    seconds: float


def tensor_specs(identity: DatasetIdentity, num_samples: int, num_tokens: int) -> dict[str, TensorSpec]:
    """Every tensor that a shard of ``identity`` holds, and no other."""
    specs = {
        "offsets": TensorSpec("I64", (num_samples + 1,)),
        "input_ids": TensorSpec("I32", (num_tokens,)),
        "loss_mask": TensorSpec("U8", (num_tokens,)),
    }
    if identity.target_statistics:
        specs["target_top1"] = TensorSpec("I32", (num_tokens,))
        specs["target_lse"] = TensorSpec("F32", (num_tokens,))
    for name, width in identity.wide_tensors.items():
        stored = CODECS[identity.codec].stored(name, SAFETENSORS_DTYPE[identity.dtype], num_samples, num_tokens, width)
        specs |= {part: TensorSpec(dtype, shape) for part, (dtype, shape) in stored.items()}
    return specs


def in_file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Widest alignment first, then as listed: with no holes between them, every tensor is then aligned."""
    return sorted(specs, key=lambda name: -ITEMSIZE_BYTES[specs[name].dtype])


def build_header(metadata: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> bytes:
    """The first bytes of a shard, up to the tensors. ``specs`` in file order, without free sizes."""
    body: dict[str, Any] = {"__metadata__": {"header_xxh3": "0" * 16, **metadata}}
    begin = 0
    for name, spec in specs.items():
        end = begin + spec.num_bytes
        body[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    content = json.dumps(body, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    if len(content) > MAX_HEADER_BYTES:
        raise ValueError(f"a shard's header of {len(content)} bytes: safetensors reads at most {MAX_HEADER_BYTES}")
    content = content[: _DIGITS.start] + _header_xxh3(content) + content[_DIGITS.stop :]
    return len(content).to_bytes(8, "little") + content


def read_header(path: Path) -> Header:
    """Read and check the header of any safetensors file. Raises ShardError, as safetensors would refuse it.

    Offsets must be contiguous from 0 to the end of the file, without hole or overlap, and fit dtype and shape.
    """
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(num_bytes - 8, MAX_HEADER_BYTES):
                raise ShardError(path, None, f"no safetensors file, or truncated: {num_bytes} bytes, header {length}")
            content = file.read(length)
    except OSError as error:
        raise ShardError(path, None, f"unreadable ({error.strerror})") from error
    try:
        body = json.loads(content.decode("utf-8"), object_pairs_hook=_no_repeats)
        metadata = body.pop("__metadata__", {})
        places = {name: _place(entry, 8 + length) for name, entry in body.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata values must be strings")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(path, None, f"damaged header ({error})") from error
    position = 8 + length
    tensors = dict(sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, place in tensors.items():
        if place.begin != position:
            raise ShardError(path, name, f"starts at byte {place.begin}, expected {position}: a hole or an overlap")
        if place.end - place.begin != place.spec.num_bytes:
            raise ShardError(path, name, f"has {place.end - place.begin} bytes, its shape needs {place.spec.num_bytes}")
        position = place.end
    if position != num_bytes:
        raise ShardError(path, None, f"{num_bytes} bytes, and its header describes {position}: truncated or overlong")
    return Header(content, metadata, tensors, num_bytes)


def check_header(path: Path, header: Header, identity: DatasetIdentity) -> ShardMetadata:
    """Prove that a file is a whole-headed shard of ``identity``, and parse its metadata. Raises ShardError."""
    content = header.content
    if not content.startswith(_PREFIX) or content[_DIGITS] != _header_xxh3(content):
        raise ShardError(path, None, "its header does not match its checksum: damaged, or not written by eyas")
    metadata = header.metadata
    for key, value in _identity_metadata(identity).items():
        if metadata.get(key) != value:
            hint = ": another target or tokenizer" if key == "content_hash" else ""
            raise ShardError(path, None, f"{key} is {metadata.get(key)!r}, and this dataset's is {value!r}{hint}")
    try:
        sample_ids = tuple(json.loads(metadata["sample_ids"]))
        if not sample_ids or not all(isinstance(name, str) for name in sample_ids):
            raise ValueError("sample_ids")
        parsed = ShardMetadata(
            sample_ids=sample_ids,
            num_trained_tokens=tuple(json.loads(metadata["num_trained_tokens"])),
            num_tokens=header.tensors["input_ids"].spec.shape[0],
            xxh3=dict(json.loads(metadata["xxh3"])),
            statistics=dict(json.loads(metadata["statistics"])),
            engine=dict(json.loads(metadata["engine"])),
            seconds=float(metadata["seconds"]),
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ShardError(path, None, f"damaged metadata ({error!r})") from error
    specs = tensor_specs(identity, len(sample_ids), parsed.num_tokens)
    if header.tensors.keys() != specs.keys():
        found, wanted = ", ".join(header.tensors), ", ".join(specs)
        raise ShardError(path, None, f"holds the tensors {found}, expected {wanted}")
    for name, spec in specs.items():
        found_spec = header.tensors[name].spec
        if found_spec.dtype != spec.dtype or not _fits(found_spec.shape, spec.shape):
            raise ShardError(
                path,
                name,
                f"{found_spec.dtype} {list(found_spec.shape)}, expected {spec.dtype} {list(spec.shape)}",
            )
    if list(header.tensors) != in_file_order(specs):
        raise ShardError(path, None, "its tensors are not in order of alignment")
    if parsed.xxh3.keys() != specs.keys():
        raise ShardError(path, None, "its checksums are not those of its tensors")
    return parsed


def shard_metadata(
    identity: DatasetIdentity,
    *,
    sample_ids: Sequence[str],
    num_trained_tokens: Sequence[int],
    xxh3: Mapping[str, str],
    statistics: Mapping[str, Any],
    engine: Mapping[str, str],
    seconds: float,
) -> dict[str, str]:
    """The metadata of a shard: strings, JSON inside where they hold more than one value."""
    return {
        **_identity_metadata(identity),
        "sample_ids": json.dumps(list(sample_ids)),
        "num_trained_tokens": json.dumps(list(num_trained_tokens)),
        "xxh3": json.dumps(dict(xxh3)),
        "statistics": json.dumps(dict(statistics)),
        "engine": json.dumps(dict(engine)),
        "seconds": f"{seconds:.3f}",
    }


def _identity_metadata(identity: DatasetIdentity) -> dict[str, str]:
    # content_hash last: where it alone differs, it is the target or the tokenizer.
    return {
        "format": "eyas",
        "format_version": str(FORMAT_VERSION),
        "taps": json.dumps([str(tap) for tap in identity.taps]),
        "last_hidden": json.dumps(None if identity.last_hidden is None else str(identity.last_hidden)),
        "dtype": identity.dtype,
        "codec": identity.codec,
        "content_hash": content_hash(identity),
    }


def _header_xxh3(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content[: _DIGITS.start] + b"0" * 16 + content[_DIGITS.stop :]).encode()


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key stands twice")
    return body


def _place(entry: Mapping[str, Any], data_start: int) -> TensorPlace:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor has dtype, shape and data_offsets")
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ITEMSIZE_BYTES:
        raise ValueError(f"dtype {dtype!r}")
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in (*shape, begin, end)) or begin > end:
        raise ValueError("sizes and offsets must be whole numbers, ascending")
    return TensorPlace(TensorSpec(dtype, tuple(shape)), data_start + begin, data_start + end)


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(b in (-1, a) for a, b in zip(shape, expected, strict=True))
