"""Which tap a tensor is.

Every token's row is compared with the same token's row of every tap by relative L2, ``|x - r| / |r|`` in float32, and a
tap's error is the median over tokens. Token 0 is left out: it is the attention sink, whose few massive activations
(Sun et al. 2024, "Massive Activations in Large Language Models") are the same after every middle layer and swamp the
rest of its row. The median and not the mean, since other tokens (delimiters, mostly) can be such sinks too, and a few
damaged or non-finite rows must not decide either: up to half of the tokens may be of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.taps.notation import Tap

if TYPE_CHECKING:
    import torch

# A match is decided where the best tap explains the tensor and the next one clearly less. Measured on SmolLM2-135M
# (tests/taps/test_match.py prints it): bfloat16 moves a token by 1.0 % at the median over taps and 1.4 % at most; the
# nearest other tap is 21 % away or more, so margins are 0.95 and up; rows of the next token are 65 % away or more.
MAX_ERROR = 0.3
MIN_MARGIN = 0.2

_CHUNK_ELEMENTS = 1 << 22  # of float32, per tap: 16 MiB at a time


@dataclass(frozen=True, kw_only=True)
class Match:
    """The tap that fits best, and by how much.

    Errors are medians over tokens of the relative L2 distance. ``margin`` is ``1 - best_error / runner_up_error``: 0
    where both fit alike, 1 for an exact match. Where no token could be compared, ``best`` and ``runner_up`` are None
    and the numbers NaN; with one tap to compare, ``runner_up`` is None and its error infinite.
    """

    best: Tap | None
    best_error: float
    runner_up: Tap | None
    runner_up_error: float
    margin: float
    errors: tuple[float, ...]  # of every tap, in the order given
    num_tokens: int  # compared
    undecided: str  # why the best tap may not be the one; empty where it is

    @property
    def decided(self) -> bool:
        return not self.undecided


def match_taps(candidate: torch.Tensor, reference: Sequence[torch.Tensor] | torch.Tensor, taps: Sequence[Tap]) -> Match:
    """Find which of ``taps`` the tensor ``candidate`` is.

    candidate: [T, H] of any floating dtype, one sample's rows from token 0 on.
    reference: n tensors [T, H] (or one [n, T, H]) of any floating dtype: those taps of the same tokens.

    Left out are token 0 and tokens with a NaN or Inf in the candidate or in any tap. A row of zeros is compared as it
    is: at distance 1 from any other row, 0 from a row of zeros; any other row is infinitely far from zeros.
    Raises ValueError where shapes do not agree.
    """
    import torch

    if len(reference) != len(taps) or not taps:
        raise ValueError(f"{len(reference)} reference tensors for {len(taps)} taps")
    for tensor in reference:
        if tensor.shape != candidate.shape or candidate.dim() != 2:
            raise ValueError(
                f"candidate {tuple(candidate.shape)}, reference {tuple(tensor.shape)}: expected [T, H] both"
            )
    num_rows, width = candidate.shape
    chunk = max(1, _CHUNK_ELEMENTS // max(1, width))
    errors = torch.empty(len(taps), num_rows)  # [n, T]
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        x = candidate[rows].float()  # [t, H]
        for index, tensor in enumerate(reference):
            r = tensor[rows].float().to(x.device)  # [t, H]
            distance = torch.linalg.vector_norm(x - r, dim=-1)  # [t]
            error = distance / torch.linalg.vector_norm(r, dim=-1)  # 0/0 is NaN, x/0 is inf
            errors[index, rows] = torch.where(distance == 0, distance, error).cpu()
    finite = _finite_rows(candidate, chunk)
    for tensor in reference:
        finite &= _finite_rows(tensor, chunk)
    finite[:1] = False
    return _match(errors[:, finite], taps)


def _finite_rows(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """[T] bool: rows without NaN or Inf."""
    import torch

    parts = [tensor[start : start + chunk].isfinite().all(dim=-1).cpu() for start in range(0, len(tensor), chunk)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _match(errors: torch.Tensor, taps: Sequence[Tap]) -> Match:
    """errors: float32 [n, tokens that count]."""
    num_tokens = errors.shape[1]
    if num_tokens == 0:
        return Match(
            best=None,
            best_error=math.nan,
            runner_up=None,
            runner_up_error=math.nan,
            margin=math.nan,
            errors=(math.nan,) * len(taps),
            num_tokens=0,
            undecided="no token to compare: token 0 (the attention sink) and tokens with NaN or Inf do not count",
        )
    medians = errors.median(dim=1).values  # [n]; the lower of the two middle ones for an even count
    order = medians.argsort(stable=True).tolist()
    best_error = float(medians[order[0]])
    runner_up_error = float(medians[order[1]]) if len(taps) > 1 else math.inf
    margin = 1 - best_error / runner_up_error if 0 < runner_up_error < math.inf else float(best_error < runner_up_error)
    undecided = ""
    if not best_error <= MAX_ERROR:
        undecided = f"no tap fits: the best, {taps[order[0]]}, is {best_error:.0%} away"
    elif margin < MIN_MARGIN:
        undecided = f"{taps[order[0]]} and {taps[order[1]]} fit alike ({best_error:.2%} and {runner_up_error:.2%} away)"
    return Match(
        best=taps[order[0]],
        best_error=best_error,
        runner_up=taps[order[1]] if len(taps) > 1 else None,
        runner_up_error=runner_up_error,
        margin=margin,
        errors=tuple(medians.tolist()),
        num_tokens=num_tokens,
        undecided=undecided,
    )
