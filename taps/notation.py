"""Taps: the one way to name a tensor of the target.

With ``L`` decoder layers, counted from 0 (docs/format.md, "Taps"):

    embed      token embedding, the input of layer 0
    after:j    residual stream after layer j, residual added, before any next norm
    final      output of the target's final norm, the input of lm_head

``after:{L-1}`` is not ``final``: the first is pre-norm, the second post-norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import total_ordering
from itertools import pairwise
from typing import Literal

from eyas.taps.errors import UsageError


class TapError(UsageError):
    """A tap, or a list of taps, that names no tensor of the target or would be reordered by an engine."""


@total_ordering
@dataclass(frozen=True)
class Tap:
    """One tensor of the target. Taps sort by depth: ``embed`` < ``after:0`` < ... < ``after:{L-1}`` < ``final``.

    ``layer`` is the j of ``after:j`` and -1 for the other kinds.
    """

    kind: Literal["embed", "after", "final"]
    layer: int = -1

    def __post_init__(self) -> None:
        if (self.kind == "after") != (self.layer >= 0):
            raise TapError(f"tap {self.kind!r} with layer {self.layer}: only after:j has a layer, and j is at least 0")

    def __str__(self) -> str:
        return f"after:{self.layer}" if self.kind == "after" else self.kind

    def __lt__(self, other: Tap) -> bool:
        return self._depth < other._depth

    @property
    def _depth(self) -> tuple[int, int]:
        return {"embed": 0, "after": 1, "final": 2}[self.kind], self.layer


EMBED = Tap("embed")
FINAL = Tap("final")


def after(layer: int) -> Tap:
    """The tap after decoder layer ``layer`` (from 0)."""
    return Tap("after", layer)


def parse_tap(text: str) -> Tap:
    """Read ``embed``, ``after:12`` or ``final``.

    Raises TapError for anything else; a bare integer is told apart, since systems read one in different ways.
    """
    text = text.strip()
    if text in ("embed", "final"):
        return EMBED if text == "embed" else FINAL
    kind, colon, number = text.partition(":")
    if kind == "after" and colon and number.isascii() and number.isdigit():
        return after(int(number))
    if text.lstrip("-").isdigit():
        raise TapError(
            f"{text!r} is a bare layer number, which every system reads in its own way: name a tap (after:{text}), "
            f"or give numbers with their convention (--layers {text} --convention SYSTEM)"
        )
    raise TapError(f"{text!r} is no tap: expected embed, after:J (J from 0) or final")


def parse_taps(text: str) -> tuple[Tap, ...]:
    """Read a comma-separated list such as ``after:1,after:14,after:26``, in the order given."""
    return tuple(parse_tap(part) for part in text.split(",") if part.strip())


def format_taps(taps: Iterable[Tap]) -> str:
    """The inverse of parse_taps."""
    return ",".join(str(tap) for tap in taps)


def all_taps(num_layers: int) -> tuple[Tap, ...]:
    """Every tap of a target with ``num_layers`` decoder layers, in ascending depth (num_layers + 2 of them)."""
    return EMBED, *(after(j) for j in range(num_layers)), FINAL


def default_taps(num_layers: int) -> tuple[Tap, ...]:
    """``after:1, after:{L//2-1}, after:{L-4}``: what vLLM, SGLang and the trainers use when no ids are configured.

    Raises TapError where the target is too shallow for three distinct taps (L < 7).
    """
    taps = after(1), after(num_layers // 2 - 1) if num_layers >= 4 else after(1), after(max(num_layers - 4, 0))
    if not taps[0] < taps[1] < taps[2]:
        raise TapError(
            f"a target of {num_layers} layers is too shallow for the default taps "
            f"(after:1, after:L//2-1, after:L-4 must be three): name them with --taps"
        )
    return taps


def validate_taps(taps: Sequence[Tap], num_layers: int) -> None:
    """Refuse taps that do not exist in a target of ``num_layers`` layers, repeat, or are not in ascending depth.

    Engines collect by membership while walking the layers, so unsorted or repeated taps collapse or reorder silently
    there. Raises TapError.
    """
    if not taps:
        raise TapError("no taps given: name at least one, e.g. --taps after:1,after:14,after:26")
    for tap in taps:
        if tap.kind == "after" and tap.layer >= num_layers:
            raise TapError(
                f"tap {tap} does not exist: the target has {num_layers} layers, after:0 to after:{num_layers - 1}"
            )
    if any(not a < b for a, b in pairwise(taps)):
        ordered = format_taps(sorted(set(taps)))
        raise TapError(
            f"taps {format_taps(taps)} are not in ascending depth without repeats, and engines would reorder or "
            f"collapse them silently: use {ordered}"
        )
