"""Parts of a tensor, as the ranks of a tensor-parallel group hold them, made one.

Shapes: R rows of a part, T tokens, W width of a part, H hidden size; stacked layers stand between: [R, A, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyas.standardize.formats.dump.description import States
from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor


class MergeError(EyasError):
    """Parts that do not make one tensor. ``what`` says why; the caller knows the sample."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def take_key(value: Any, keys: Sequence[str]) -> Any:
    """What stands under ``keys`` in nested dicts (whose keys may be numbers) and lists. Raises MergeError."""
    for key in keys:
        number = int(key) if key.lstrip("-").isdigit() else None
        if isinstance(value, dict) and (key in value or number in value):
            value = value[key if key in value else number]
        elif isinstance(value, list | tuple) and number is not None and -len(value) <= number < len(value):
            value = value[number]
        else:
            raise MergeError(f"no key {key!r}, found {_contents(value)}")
    return value


def as_tensor(value: Any) -> Tensor:
    """A tensor, an array or a list of numbers as a tensor, mapped where it was. Raises MergeError."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        # NumPy has no bfloat16: ml_dtypes' is stored as 2 bytes of nothing.
        bits = value.view(np.uint16) if value.dtype.kind == "V" and value.dtype.itemsize == 2 else value
        try:
            return torch.from_numpy(bits)
        except (TypeError, ValueError) as error:
            raise MergeError(f"an array of {value.dtype}, expected numbers ({error})") from error
    if isinstance(value, list | tuple) and value and all(isinstance(number, int | float) for number in value):
        return torch.tensor(value)
    raise MergeError(f"found {_contents(value)}, expected a tensor: give its key")


def as_states(value: Any, states: States, dtype: str, num_layers: int) -> Tensor:
    """A file's tensor as [R, W], or [R, A, W] where it holds all layers. Raises MergeError.

    Files may hold ``dtype``, float32 (rounded to ``dtype`` once merged), or a 16-bit dtype's bits as integers.
    """
    import torch

    tensor = as_tensor(value)
    wanted = getattr(torch, dtype)
    if tensor.dtype in (torch.int16, torch.uint16) and wanted.itemsize == 2:
        tensor = tensor.view(wanted)
    exact = tensor.dtype in (torch.bfloat16, torch.float16) and wanted == torch.float32
    if tensor.dtype not in (wanted, torch.float32) and not exact:
        raise MergeError(f"is {str(tensor.dtype)[6:]}, expected {dtype}, as the description says, or float32")
    found, dims = list(tensor.shape), 3 if states.shape in ("T,A,H", "A,T,H") else 2
    while tensor.ndim > dims and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != dims:
        raise MergeError(f"is of shape {found}, expected [{states.shape}], or that with 1 in front")
    if states.shape == "T,A*H":
        if tensor.shape[1] % num_layers:
            raise MergeError(f"is of shape {found}, expected {num_layers} layers of one width beside one another")
        tensor = tensor.view(tensor.shape[0], num_layers, -1)
    elif states.shape == "A,T,H":
        tensor = tensor.transpose(0, 1)
    if states.is_stacked and tensor.shape[1] != num_layers:
        raise MergeError(f"is of shape {found}, expected {num_layers} layers in [{states.shape}]")
    return tensor


def merged_rows(parts: Sequence[Tensor], states: States, hidden_size: int, num_tokens: int | None) -> int:
    """How many rows [R, ..., W] parts make, in the order of ranks, without their padding: a look at shapes alone.

    num_tokens: as many as they must be, where that is known. Raises MergeError.
    """
    sharded = states.placement
    widths = [part.shape[-1] for part in parts]
    width = sum(widths) if sharded == "hidden-sharded" else widths[0]
    if width != hidden_size or (sharded != "hidden-sharded" and len(set(widths)) > 1):
        raise MergeError(
            f"widths {_numbers(widths)} on the ranks, expected "
            + (f"{hidden_size} in all" if sharded == "hidden-sharded" else f"{hidden_size} on each ({sharded})")
        )
    rows = [part.shape[0] for part in parts]
    if sharded != "token-sharded":
        if len(set(rows)) > 1:
            raise MergeError(f"{_numbers(rows)} rows on the ranks, expected as many on each ({sharded})")
        total = rows[0]
    else:
        total = sum(rows)
        if states.padded and num_tokens is not None:
            expected = -(-num_tokens // len(parts))
            if set(rows) != {expected}:
                raise MergeError(
                    f"{_numbers(rows)} rows on the ranks for {num_tokens} tokens, expected {expected} on each, padded"
                )
            total = num_tokens
    if num_tokens is not None and total != num_tokens:
        hint = ", or is it padded" if sharded == "token-sharded" and total > num_tokens else ""
        hint = (
            " (is a step missing, or did the engine take rows from its prefix cache?)" if total < num_tokens else hint
        )
        raise MergeError(f"{total} rows for {num_tokens} token ids{hint}")
    return total


def merge_into(out: Tensor, parts: Sequence[Tensor], states: States, *, start: int = 0, first_rank: int = 0) -> None:
    """Fill ``out`` [T, ..., H] with the rows from ``start`` on that [R, ..., W] parts, in the order of ranks, make.

    Replicated parts are rank 0's, and must agree; token- and hidden-sharded ones stand one behind the other; partial
    sums are added up in float32 and cast once. Raises MergeError where replicas differ, naming the rank (parts are
    those of first_rank and on) and the amount.
    """
    import torch

    stop = start + out.shape[0]
    if states.placement == "token-sharded":
        behind = 0  # rows of the ranks before
        for part in parts:
            first, last = max(start, behind), min(stop, behind + part.shape[0])
            if first < last:
                out[first - start : last - start].copy_(part[first - behind : last - behind])
            behind += part.shape[0]
    elif states.placement == "hidden-sharded":
        left = 0
        for part in parts:
            out[..., left : left + part.shape[-1]].copy_(part[start:stop])
            left += part.shape[-1]
    elif states.placement == "partial-sums":
        total = parts[0][start:stop].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part[start:stop]
        out.copy_(total)
    else:
        first_part = parts[0][start:stop]
        out.copy_(first_part)
        for rank, part in enumerate(parts[1:], start=first_rank + 1):
            if found := _difference(first_part, part[start:stop], states.tolerance):
                raise MergeError(f"rank {rank} is no replica of rank {first_rank}: {found}")


def _difference(reference: Tensor, other: Tensor, tolerance: float) -> str | None:
    """How two replicas [T, ..., H] differ, in words; None where they are the same, or within the tolerance."""
    if reference.dtype != other.dtype:
        return f"it is {str(other.dtype)[6:]}, not {str(reference.dtype)[6:]}"
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[reference.dtype.itemsize]
    if torch.equal(reference.view(bits), other.view(bits)):
        return None
    distance = (other.double() - reference.double()).flatten(1).norm(dim=1)  # [T]
    relative = distance / reference.double().flatten(1).norm(dim=1)  # [T]; 0/0 where a row of zeros is a row of zeros
    relative = torch.where(distance == 0, 0.0, relative)
    if tolerance and bool((relative <= tolerance).all()):
        return None
    rows = int(((reference.view(bits) != other.view(bits)).flatten(1).any(dim=1)).sum())
    worst = int(relative.nan_to_num(nan=float("inf")).argmax())
    return f"{rows} of {len(relative)} rows, by up to {float(relative[worst]):.3g} relative (row {worst}), where " + (
        f"{tolerance:g} is tolerated" if tolerance else "not a bit may differ"
    )


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _contents(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(repr(key) for key in list(value)[:20]) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
