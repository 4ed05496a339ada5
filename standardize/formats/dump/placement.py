"""How the parts of a tensor seem to lie on the ranks, from a look at some samples.

R rows and W width of a part, T tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.standardize.formats.dump.description import FILL_IN

if TYPE_CHECKING:
    from torch import Tensor

# Replicas of kernels that are not deterministic differ by less, partial sums by more (relative, L2).
_CLOSE = 0.05


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One sample's tensor: for each step the parts [R, ..., W] in the order of ranks."""

    steps: Sequence[Sequence[Tensor]]
    num_tokens: int | None  # of all steps; None where no token ids are known


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What all samples looked at have in common."""

    placement: str  # FILL_IN where several are possible, or none
    padded: bool = False
    tolerance: float = 0.0
    hidden_size: int | None = None
    notes: tuple[str, ...] = ()


def judge(samples: Iterable[Observed], hidden_size: int | None) -> Placed:
    """The one placement that fits every sample; hidden_size is the target's, where it is known.

    Equal parts are replicas; rows that add up to the tokens (with padding) are sharded on tokens, widths that add up to
    H on hidden; parts as wide as the target that differ are partial sums, or replicas where they differ but little.
    """
    fitting, notes = {"replicated", "token-sharded", "hidden-sharded", "partial-sums"}, list[str]()
    padded, difference, widths, num_seen = False, 0.0, list[int](), 0
    for sample in samples:
        rows = [sum(part.shape[0] for part in of_rank) for of_rank in zip(*sample.steps, strict=True)]
        widths = [part.shape[-1] for part in sample.steps[0]]
        fitting &= _fitting(sample, rows, widths, hidden_size)
        padded |= sample.num_tokens is not None and sum(rows) > sample.num_tokens
        if len(set(rows)) == len(set(widths)) == 1:
            difference = max(difference, _difference(sample))
        num_seen += 1
        if num_seen == 1:
            tokens = "unknown" if sample.num_tokens is None else sample.num_tokens
            notes.append(f"the first sample: {rows} rows of widths {widths} on the ranks, token ids: {tokens}")
    if not num_seen:
        return Placed(placement=FILL_IN, notes=("no sample could be read from all ranks",))
    if len(fitting) == 1:
        (placement,) = fitting
        if placement == "replicated" and difference:
            notes.append(
                f"uncertain: parts are as wide as the target and all but equal (up to {difference:.2g} relative), as "
                "replicas of kernels that are not deterministic"
            )
        if placement == "partial-sums":
            notes.append(f"parts are as wide as the target and differ ({difference:.2g} relative)")
        return Placed(
            placement=placement,
            padded=padded and placement == "token-sharded",
            tolerance=float(f"{2 * difference:.1g}") if placement == "replicated" else 0.0,
            hidden_size=sum(widths) if placement == "hidden-sharded" else widths[0],
            notes=tuple(notes),
        )
    readings = {
        "replicated": f"replicated, H = {widths[0]}",
        "token-sharded": f"token-sharded, H = {widths[0]}",
        "hidden-sharded": f"hidden-sharded, H = {sum(widths)}",
        "partial-sums": f"partial-sums (a tap before the all-reduce), H = {widths[0]}",
    }
    possible = "; or ".join(text for name, text in readings.items() if name in fitting)
    known = f"and the target's hidden size is {hidden_size}" if hidden_size else "and the target's hidden size decides"
    notes.append(f"it may be {possible}: {known}" if possible else f"no placement fits all {num_seen} samples, {known}")
    return Placed(placement=FILL_IN, notes=tuple(notes))


def _fitting(sample: Observed, rows: list[int], widths: list[int], hidden_size: int | None) -> set[str]:
    """The placements that a sample may have."""
    tokens, tp, fitting = sample.num_tokens, len(rows), set[str]()
    one_width, whole = len(set(widths)) == 1, len(set(rows)) == 1 and tokens in (None, rows[0])
    is_wide = one_width and hidden_size in (None, widths[0])
    equal = whole and one_width and _difference(sample) == 0
    if is_wide and whole and (_difference(sample) < _CLOSE if hidden_size else equal):
        fitting.add("replicated")
    if is_wide and (tokens is None or tokens <= sum(rows) <= tokens + len(sample.steps) * (tp - 1)) and not equal:
        fitting.add("token-sharded")
    if whole and not equal and hidden_size in (None, sum(widths)):
        fitting.add("hidden-sharded")
    if whole and is_wide and not equal and "replicated" not in fitting:
        fitting.add("partial-sums")
    return fitting


def _difference(sample: Observed) -> float:
    """By how much parts of one shape differ from the first rank's, relative (L2), at most."""
    import torch

    most = 0.0
    for parts in sample.steps:
        first = parts[0]
        for part in parts[1:]:
            if part.shape == first.shape and not torch.equal(part, first):
                most = max(most, float((part.double() - first.double()).norm() / first.double().norm()))
    return most
