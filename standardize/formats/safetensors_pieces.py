"""A safetensors file as pieces to be written one after the other, without a copy of the tensors in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {"torch.int64": "I64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_ALIGNMENT = 8


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The header, then the memory of each of ``tensors`` (contiguous, on the CPU, the widest dtype first).

    That order keeps each tensor aligned to its dtype, as the library's own does. The memory is not copied: write the
    pieces before the tensors change.
    """
    import torch

    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    views = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors.values()]  # type: ignore[arg-type]
    return [len(text).to_bytes(8, "little") + text, *views]
