"""Folders of torch.save files with one sample each, as trainers of the field keep them: listed, read, checked, written.

A format says which suffixes its files have and what their keys mean (its ``parse``); what is common stands here.
Shapes: T tokens, W the width of a row.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from eyas.shards.identity import DTYPES
from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import ForeignFileError, ForeignSample, Layout

if TYPE_CHECKING:
    from torch import Tensor

# A folder is given up on as some format's where none of its first files can be read.
_LOOK_AT_FILES = 8
_DIGITS = re.compile(r"(\d+)")

Parse = Callable[[str, Mapping[str, Any], Layout], ForeignSample]


@dataclass(frozen=True)
class TorchFilesReader:
    """A Reader (base.py) of such a folder. ``parse(name, contents, layout)`` makes the sample, or raises."""

    folder: Path
    layout: Layout
    suffixes: tuple[str, ...]
    parse: Parse

    def items(self) -> Sequence[str]:
        return self._items

    def read(self, item: str) -> ForeignSample:
        return self.parse(item, _contents(self.folder, item), self.layout)

    @cached_property
    def _items(self) -> tuple[str, ...]:
        return tuple(_names(self.folder, self.suffixes))


def first_contents(folder: Path, suffixes: tuple[str, ...]) -> tuple[str, Mapping[str, Any]] | None:
    """The name and the contents of the first file that can be read as a dict, among the first few."""
    looked_at = 0
    for name in _names(folder, suffixes):
        try:
            return name, _contents(folder, name)
        except ForeignFileError:
            looked_at += 1
            if looked_at == _LOOK_AT_FILES:
                return None
    return None


def looked_through(reader: TorchFilesReader) -> Layout:
    """The reader's layout with its files counted, and what is wrong with the first, the middle and the last of them."""
    items = reader.items()
    problems = list(reader.layout.problems)
    for item in dict.fromkeys([items[0], items[len(items) // 2], items[-1]]):
        try:
            reader.read(item)
        except ForeignFileError as error:
            problems.append(str(error))
    return replace(reader.layout, num_files=len(items), problems=tuple(problems))


def require(where: str, contents: Mapping[str, Any], names: Sequence[str], format_name: str) -> None:
    """Raise ForeignFileError unless ``contents`` holds tensors under all ``names``."""
    missing = [name for name in names if not is_plain(contents.get(name))]
    if missing:
        found = ", ".join(f"{key} ({_described(value)})" for key, value in contents.items()) or "nothing"
        raise ForeignFileError(
            where, f"holds {found}; expected tensors {', '.join(names)} as {format_name} has them, and no "
            f"{' or '.join(missing)} is there"
        )  # fmt: skip


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor with its elements in memory."""
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def token_ids(where: str, tensor: Tensor) -> Tensor:
    """``input_ids`` as int64 [T], from [T] or [1, T] of any integer dtype. Raises ForeignFileError."""
    import torch

    vector = tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if vector.ndim != 1 or len(vector) < 1 or vector.dtype not in integers:
        raise ForeignFileError(where, f"input_ids is {_described(tensor)}; expected integers [T], T at least 1")
    if int(vector.min()) < 0 or int(vector.max()) >= 1 << 31:
        raise ForeignFileError(
            where, f"input_ids reaches from {int(vector.min())} to {int(vector.max())}; expected token ids, from 0 on"
        )
    return vector.to(torch.int64)


def zeros_and_ones(where: str, tensor: Tensor, num_tokens: int) -> Tensor:
    """``loss_mask`` as uint8 [T], from [T] or [1, T] of any dtype. Raises ForeignFileError."""
    import torch

    vector = tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor
    if vector.shape != (num_tokens,):
        raise ForeignFileError(where, f"loss_mask is {_described(tensor)} for {num_tokens} input_ids")
    mask = vector.to(torch.uint8)
    if not torch.equal(mask.to(vector.dtype), vector) or int(mask.max()) > 1:
        raise ForeignFileError(where, "loss_mask holds other values than 0 and 1")
    return mask


def rows(where: str, name: str, tensor: Tensor, num_rows: int, width: int, dtype: str) -> Tensor:
    """States [T, W], from [T, W] or [1, T, W], as views of ``tensor``. Raises ForeignFileError."""
    import torch

    matrix = tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor
    if matrix.shape != (num_rows, width) or tensor.dtype != getattr(torch, dtype):
        raise ForeignFileError(
            where, f"{name} is {_described(tensor)}; expected {dtype} [{num_rows}, {width}], a row for each of the "
            f"{num_rows} input_ids and as wide as in the folder's first file"
        )  # fmt: skip
    return matrix


def dtype_name(tensor: Tensor) -> str | None:
    """bfloat16, float16 or float32; None for a dtype that no dataset has."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in DTYPES else None


def saved(contents: Mapping[str, Any] | Tensor) -> memoryview:
    """The bytes of torch.save. Views are copied first, or all of the shard that they are views of would be stored."""
    import torch

    buffer = io.BytesIO()
    if isinstance(contents, torch.Tensor):
        torch.save(contents.clone(), buffer)
    else:
        torch.save({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in contents.items()}, buffer)
    return buffer.getbuffer()


def _contents(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        contents = read_tensor_file(folder / name)
    except TensorFileError as error:
        raise ForeignFileError(name, error.what) from error
    if not isinstance(contents, Mapping):
        raise ForeignFileError(name, f"holds {_described(contents)}; expected a dict of tensors")
    return contents


def _names(folder: Path, suffixes: tuple[str, ...], below: str = "") -> Iterator[str]:
    """Files by their path below ``folder``, in the order that a person would count: data_2 before data_10."""
    with os.scandir(folder / below) as entries:
        found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: _counted(e.name))
    for entry in found:
        if entry.is_file():
            if entry.name.endswith(suffixes):
                yield below + entry.name
        elif entry.is_dir(follow_symlinks=False):
            yield from _names(folder, suffixes, f"{below}{entry.name}/")


def _counted(name: str) -> list[tuple[int, str]]:
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def _described(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor) and not is_plain(value):
        return f"a {value.device.type} tensor, {str(value.layout).removeprefix('torch.')}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else "")
