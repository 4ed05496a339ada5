"""From a system's layer ids to taps and back.

Every system walks the layers and keeps the residual stream at some of its boundaries. Boundary ``b`` is the input of
layer ``b``: boundary 0 is ``embed``, boundary ``b`` is ``after:{b-1}``, boundary ``L`` is ``after:{L-1}``. A Numbering
says which boundary an id names; a Rule picks the numbering, where a system has more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from eyas.taps.errors import UsageError
from eyas.taps.notation import EMBED, FINAL, Tap, after, format_taps


class ConventionError(UsageError):
    """Layer ids that a system does not read, reads in more than one way, or in a way that no source backs."""


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """One way to number boundaries: the ids ``lowest`` to ``L + highest`` name one, the ids ``final`` the last norm."""

    says: str  # in words, e.g. "k is after:k"
    offset: int  # boundary = id + offset
    lowest: int
    highest: int  # counted from L
    final: tuple[int | Literal["L"], ...] = ()  # ids of the final norm's output; the first is the one written
    outside: str  # what the system does with any other id

    def tap(self, layer_id: int, num_layers: int) -> Tap:
        """The tap that ``layer_id`` names. Raises ConventionError for ids that name none."""
        if layer_id in self._final_ids(num_layers):
            return FINAL
        if not self.lowest <= layer_id <= num_layers + self.highest:
            also = f" or {self._final_ids(num_layers)[-1]}" if self.final else ""
            raise ConventionError(
                f"id {layer_id} is outside {self.lowest} to {num_layers + self.highest}{also}: {self.outside}"
            )
        boundary = layer_id + self.offset
        return after(boundary - 1) if boundary else EMBED

    def layer_id(self, tap: Tap, num_layers: int) -> int:
        """The id that names ``tap``. Raises ConventionError where there is none."""
        if tap == FINAL:
            if self.final:
                return self._final_ids(num_layers)[0]
            raise ConventionError("final, the output of the last norm, has no id")
        layer_id = tap.layer + 1 - self.offset
        if not self.lowest <= layer_id <= num_layers + self.highest or layer_id in self._final_ids(num_layers):
            raise ConventionError(f"{tap} has no id ({self.outside})")
        return layer_id

    def _final_ids(self, num_layers: int) -> list[int]:
        return [num_layers if layer_id == "L" else layer_id for layer_id in self.final]


def _first(ids: Sequence[int], num_layers: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a list of ids becomes taps: ``choose`` picks, by the ids and L, which of ``numberings`` counts."""

    says: str
    numberings: tuple[Numbering, ...]
    choose: Callable[[Sequence[int], int], int] = _first
    num_ids: int | None = None  # where the system takes exactly so many

    def taps(self, ids: Sequence[int], num_layers: int) -> tuple[Tap, ...]:
        """The taps that ``ids`` name, in their order.

        Raises ConventionError for ids that name no tap, repeat, or are not in ascending depth: a system keeps the
        boundaries it meets while walking the layers, so those would collapse or be reordered silently.
        """
        if not ids:
            raise ConventionError("no ids are given, and nothing would be captured")
        self._check_count(len(ids))
        numbering = self.numberings[self.choose(ids, num_layers)]
        taps = tuple(numbering.tap(layer_id, num_layers) for layer_id in ids)
        if any(not a < b for a, b in pairwise(taps)):
            by_depth = sorted(set(ids), key=lambda layer_id: numbering.tap(layer_id, num_layers))
            raise ConventionError(
                "ids are not in ascending depth without repeats, so it would reorder or collapse them silently: "
                f"write {format_ids(by_depth)}"
            )
        return taps

    def ids(self, taps: Sequence[Tap], num_layers: int) -> tuple[int, ...]:
        """The ids that are read as ``taps``. Raises ConventionError where no list of ids is."""
        self._check_count(len(taps))
        problem = ConventionError("nothing to write")
        for index, numbering in enumerate(self.numberings):
            try:
                ids = tuple(numbering.layer_id(tap, num_layers) for tap in taps)
            except ConventionError as error:
                problem = error
                continue
            if self.choose(ids, num_layers) == index:
                return ids
            problem = ConventionError(f"{format_taps(taps)} cannot be said: {format_ids(ids)} would be read otherwise")
        raise problem

    def _check_count(self, count: int) -> None:
        if self.num_ids is not None and count != self.num_ids:
            raise ConventionError(f"it takes exactly {self.num_ids} ids, not {count}")


def format_ids(ids: Sequence[int]) -> str:
    """``[3, 31, 59]`` as ``3,31,59``."""
    return ",".join(map(str, ids))


def single(numbering: Numbering, *, num_ids: int | None = None) -> Rule:
    """The rule of a system that has one numbering."""
    return Rule(says=numbering.says, numberings=(numbering,), num_ids=num_ids)
