"""The container: what eyas writes any safetensors reader opens, and what safetensors refuses eyas refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.errors import ShardError
from eyas.shards.layout import ITEMSIZE_BYTES, TensorSpec, build_header, in_file_order, read_header

specs = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(TensorSpec, st.sampled_from(sorted(ITEMSIZE_BYTES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
)
metadata = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key != "header_xxh3"), st.text(max_size=20), max_size=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layout")


@given(specs=specs, metadata=metadata)
def test_headers_round_trip_and_safetensors_reads_them(
    folder: Path, specs: dict[str, TensorSpec], metadata: dict[str, str]
) -> None:
    ordered = {name: specs[name] for name in in_file_order(specs)}
    path = folder / "a.safetensors"
    path.write_bytes(build_header(metadata, ordered) + bytes(sum(spec.num_bytes for spec in ordered.values())))
    header = read_header(path)
    assert {name: place.spec for name, place in header.tensors.items()} == specs
    assert {key: value for key, value in header.metadata.items() if key != "header_xxh3"} == metadata
    for place in header.tensors.values():
        assert place.begin % ITEMSIZE_BYTES[place.spec.dtype] == 0, "unaligned"
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(specs)
        assert file.metadata() == header.metadata
        for name, spec in specs.items():
            assert tuple(file.get_slice(name).get_shape()) == spec.shape


def test_files_that_safetensors_writes_are_read(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": np.ones(5, np.uint8), "c": np.zeros(0, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"k": "v"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.metadata == {"k": "v"}
    content = (tmp_path / "a.safetensors").read_bytes()
    place = header.tensors["b"]
    assert place.spec == TensorSpec("I32", (2, 3))
    assert content[place.begin : place.end] == tensors["b"].tobytes()


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


ATTACKS = {
    "hole": ({"a": entry(0, 4), "b": entry(5, 8)}, 8),
    "hole at the start": ({"a": entry(1, 4)}, 4),
    "overlap": ({"a": entry(0, 4), "b": entry(3, 8)}, 8),
    "same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, 4),
    "bytes after the last": ({"a": entry(0, 4)}, 5),
    "bytes missing": ({"a": entry(0, 4)}, 3),
    "end before begin": ({"a": entry(4, 0, shape=[4])}, 4),
    "negative begin": ({"a": entry(-4, 0, shape=[4])}, 4),
    "shape too large": ({"a": entry(0, 4, shape=[5])}, 4),
    "shape too small": ({"a": entry(0, 4, shape=[3])}, 4),
    "shape overflows": ({"a": entry(0, 4, shape=[1 << 62, 8])}, 4),
    "negative shape": ({"a": entry(0, 4, shape=[-2, -2])}, 4),
    "dtype wider than the bytes": ({"a": entry(0, 4, dtype="I64")}, 4),
    "unknown dtype": ({"a": entry(0, 4, dtype="Q9")}, 4),
    "float sizes": ({"a": entry(0, 4, shape=[4.0])}, 4),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, 4),
    "three offsets": ({"a": entry(0, 4, data_offsets=[0, 2, 4])}, 4),
    "metadata that is no string": ({"__metadata__": {"k": 1}, "a": entry(0, 4)}, 4),
    "metadata that is no object": ({"__metadata__": "k", "a": entry(0, 4)}, 4),
    "tensor that is no object": ({"a": 7}, 0),
    "list": ([], 0),
    "number": (7, 0),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_damaged_tables_are_refused(tmp_path: Path, name: str) -> None:
    body, num_bytes = ATTACKS[name]
    content = json.dumps(body).encode()
    refused(tmp_path, len(content).to_bytes(8, "little") + content + bytes(num_bytes))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        (1 << 63).to_bytes(8, "little") + b"{}",
        (200_000_000).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{x",
        (2).to_bytes(8, "little") + b"\xff\xfe",
        (40_000).to_bytes(8, "little") + b"[" * 40_000,
        b'%c\0\0\0\0\0\0\0{"__metadata__":{}, "__metadata__":{}}' % 38,
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    refused(tmp_path, content)


def refused(folder: Path, content: bytes) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, framework="pt"):
        pass
    with pytest.raises(ShardError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@given(data=st.data())
def test_whatever_is_accepted_safetensors_accepts(folder: Path, data: st.DataObject) -> None:
    """One change to a good file, anywhere in length and header."""
    tensors = {"a": torch.arange(6, dtype=torch.int32).reshape(2, 3), "b": torch.ones(5, dtype=torch.uint8)}
    ordered = {"a": TensorSpec("I32", (2, 3)), "b": TensorSpec("U8", (5,))}
    content = bytearray(build_header({"k": "v"}, ordered) + b"".join(t.numpy().tobytes() for t in tensors.values()))
    at = data.draw(st.integers(0, len(content) - 30))
    content[at] = data.draw(st.sampled_from(b'0123456789,:"{}[] abU\x00\xff'))
    path = folder / "b.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except ShardError:
        return
    with safetensors.safe_open(path, framework="pt") as file:
        file.keys()
