"""The file that vLLM's connectors write for each request, which speculators stores as it is.

``hidden_states`` [T, S, H] in the KV cache's dtype and ``token_ids`` int64 [T] (vLLM 0.32.0,
distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py). The fp8 connector of hs_connectors 0.9.0
(fp8_hidden_states_connector.py, fp8_utils.py) stores float8_e4m3fn and ``hidden_states_scales`` float32 [T, 1, 1].

Shapes: T tokens, S slots, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import ForeignFileError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

STATES, TOKENS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class StatesShape:
    """What a file's header says."""

    num_slots: int
    hidden_size: int
    dtype: str  # as read, after any scales
    is_fp8: bool


def read_shape(file: Path) -> StatesShape | None:
    """From the header alone; None where ``file`` is not in this layout, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():  # opening a pipe would wait for its writer
        return None
    try:
        with safe_open(file, framework="numpy") as opened:
            if not {STATES, TOKENS} <= set(opened.keys()):
                return None
            states = opened.get_slice(STATES)
            shape, dtype = states.get_shape(), states.get_dtype()
    except (SafetensorError, OSError):
        return None
    if len(shape) != 3 or dtype not in _DTYPES:
        return None
    return StatesShape(num_slots=shape[1], hidden_size=shape[2], dtype=_DTYPES[dtype], is_fp8=dtype.startswith("F8"))


def read_states(file: Path, where: str, shape: StatesShape) -> tuple[Tensor, Tensor]:
    """token_ids int64 [T] and hidden_states [T, S, H]; fp8 is multiplied out as speculators does it, in bfloat16.

    Mapped, but for fp8. Raises ForeignFileError, naming ``where``.
    """
    import torch

    try:
        tensors = read_tensor_file(file)
    except TensorFileError as error:
        raise ForeignFileError(where, error.what) from error
    missing = [name for name in (STATES, TOKENS) if name not in tensors]
    if missing:
        raise ForeignFileError(
            where, f"has no {' and no '.join(missing)}, found {', '.join(sorted(tensors)) or 'none'}"
        )
    states, ids = tensors[STATES], tensors[TOKENS]
    if ids.dim() != 1 or ids.is_floating_point():
        raise ForeignFileError(where, f"{TOKENS} is {ids.dtype} {list(ids.shape)}, expected integers [T]")
    expected = [len(ids), shape.num_slots, shape.hidden_size]
    if list(states.shape) != expected:
        raise ForeignFileError(where, f"{STATES} is {list(states.shape)}, expected {expected}")
    if states.dtype == torch.float8_e4m3fn:
        scales = tensors.get(SCALES)
        if scales is None or scales.shape[:1] != ids.shape or scales.numel() != len(ids):
            raise ForeignFileError(where, f"holds fp8 without {SCALES} [{len(ids)}, 1, 1]")
        # Both rounded to bfloat16 first, as hs_connectors' dequantize_fp8_tensor does: what speculators trains on.
        states = states.to(torch.bfloat16) * scales.reshape(-1, 1, 1).to(torch.bfloat16)
    if str(states.dtype) != f"torch.{shape.dtype}":
        raise ForeignFileError(where, f"{STATES} is {states.dtype}, and the folder's first file {shape.dtype}")
    return ids.to(torch.int64), states


def states_tensors(states: Any, input_ids: npt.NDArray[np.int32]) -> dict[str, Tensor]:
    """What the connector saves, in file order."""
    import torch

    return {TOKENS: torch.from_numpy(input_ids.astype(np.int64)), STATES: states}
