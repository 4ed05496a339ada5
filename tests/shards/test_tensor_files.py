"""Files of others: tensors come out, or a refusal that names the file; never another error, and never code."""

from __future__ import annotations

import gzip
import io
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from eyas.shards.tensor_files import TensorFileError, read_tensor_file

ROWS = torch.arange(48, dtype=torch.float32).view(6, 8)


def saved(suffix: str) -> bytes:
    buffer = io.BytesIO()
    if suffix == ".safetensors":
        return save({"a": ROWS})
    if suffix == ".npy":
        np.save(buffer, ROWS.numpy())
    elif suffix == ".npz":
        np.savez(buffer, a=ROWS.numpy())
    else:
        torch.save({"a": ROWS}, buffer, _use_new_zipfile_serialization=suffix != ".bin")
    return buffer.getvalue()


SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".bin")
CONTENTS = {suffix: saved(suffix) for suffix in SUFFIXES}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_is_read(tmp_path: Path, suffix: str, packed: str) -> None:
    path = tmp_path / f"x{suffix}{packed}"
    path.write_bytes(gzip.compress(CONTENTS[suffix]) if packed else CONTENTS[suffix])
    content = read_tensor_file(path)
    assert torch.equal(torch.as_tensor(content if suffix == ".npy" else content["a"]), ROWS)


def test_what_is_read_can_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(CONTENTS[".npy"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(read_tensor_file(tmp_path / "x.npy")).zero_()
    assert (tmp_path / "x.npy").read_bytes() == CONTENTS[".npy"]


@given(st.sampled_from(SUFFIXES), st.data())
def test_damage_is_refused_or_unseen(tmp_path_factory: pytest.TempPathFactory, suffix: str, data: Any) -> None:
    content = bytearray(CONTENTS[suffix])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(TensorFileError):
            read_tensor_file(path)


def test_objects_are_never_built(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"a": Trap()}, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    for name in ("x.pt", "x.npy"):
        with pytest.raises(TensorFileError, match=name):
            read_tensor_file(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
