"""The tensors of a draft checkpoint: names, dtypes and shapes; of values only the two vocabulary maps.

Safetensors files are opened for their headers alone. A pickle is read with ``weights_only=True``, memory-mapped.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.align.draft.config import DraftConfig, DraftError, read_config

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class DraftTensor:
    """A tensor in a checkpoint file."""

    name: str
    dtype: str  # as safetensors names it, e.g. BF16
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Draft:
    """A draft checkpoint: ``tensors`` is empty where the folder holds a config alone."""

    path: Path
    config: DraftConfig
    tensors: dict[str, DraftTensor]
    d2t: npt.NDArray[Any] | None  # [draft vocab], as stored
    t2d: npt.NDArray[Any] | None  # [vocab], as stored

    def find(self, ending: str) -> DraftTensor | None:
        """The tensor with this name, or with this name behind a prefix such as ``model.``."""
        return next((t for name, t in self.tensors.items() if name == ending or name.endswith(f".{ending}")), None)


def read_draft(folder: Path) -> Draft:
    """Read a draft's folder. Raises DraftError for what is missing, damaged or unsafe."""
    config = read_config(folder)
    tensors: dict[str, DraftTensor] = {}
    maps: dict[str, npt.NDArray[Any]] = {}
    for path in _weight_files(folder):
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        found, values = read(path)
        for tensor in found:
            if tensor.name in tensors:
                raise DraftError(f"{path}: {tensor.name} is in {tensors[tensor.name].file} too")
            tensors[tensor.name] = tensor
        maps |= values
    return Draft(path=folder, config=config, tensors=tensors, d2t=maps.get("d2t"), t2d=maps.get("t2d"))


def _weight_files(folder: Path) -> list[Path]:
    for index in _INDEXES:
        if (folder / index).is_file():
            try:
                names = {str(name) for name in json.loads((folder / index).read_bytes())["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DraftError(f"{folder / index}: unreadable ({error!r})") from error
            if bad := [name for name in names if os.path.basename(name) != name]:
                raise DraftError(f"{folder / index}: {bad[0]!r} is no file of this folder")
            return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _map_name(name: str) -> str | None:
    last = name.rpartition(".")[2]
    return last if last in _MAPS else None


def _read_safetensors(path: Path) -> tuple[list[DraftTensor], dict[str, npt.NDArray[Any]]]:
    from safetensors import SafetensorError, safe_open

    found, values = [], {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                view = file.get_slice(name)
                found.append(DraftTensor(name, view.get_dtype(), tuple(view.get_shape()), path.name))
                if kind := _map_name(name):
                    values[kind] = np.asarray(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise DraftError(f"{path}: unreadable ({error})") from error
    return found, values


def _read_pickle(path: Path) -> tuple[list[DraftTensor], dict[str, npt.NDArray[Any]]]:
    import pickle

    import torch

    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64",
             torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8", torch.float64: "F64"}  # fmt: skip
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise DraftError(f"{path}: not read ({str(error).splitlines()[0]}): save it as safetensors") from error
    found, values = [], {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise DraftError(f"{path}: {name} is no tensor; expected a state dict")
        found.append(DraftTensor(name, names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), path.name))
        if kind := _map_name(name):
            values[kind] = tensor.numpy()
    return found, values
