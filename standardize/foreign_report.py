"""What a look into a foreign folder's samples finds: lengths, masks, ids, and what is wrong, by file.

Shapes: T tokens, A taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyas.shards.statistics import MAX_ABS, NONFINITE, SUM_NORM, tap_statistics
from eyas.standardize.formats.base import ForeignFileError, Layout, Reader

LOOKED_AT = 64  # items, spread evenly, unless all are asked for


@dataclass(kw_only=True)
class ForeignReport:
    """Of the samples that were looked at."""

    layout: Layout
    num_items: int
    num_read: int = 0
    num_tokens: int = 0
    num_trained_tokens: int | None = None  # None where the format keeps no mask
    shortest: int = 0
    longest: int = 0
    highest_id: int = 0
    slots: list[dict[str, Any]] = field(default_factory=list)  # name, mean_norm, max_abs, nonfinite
    bad: dict[str, str] = field(default_factory=dict)  # item -> what is wrong


def report_foreign(
    reader: Reader,
    *,
    everything: bool,
    workers: int,
    on_item: Callable[[], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> ForeignReport:
    """Read ``LOOKED_AT`` samples, spread evenly, or all of them, every byte of each."""
    items = reader.items()
    chosen: Sequence[str] = items
    if not everything and len(items) > LOOKED_AT:
        places = np.unique(np.linspace(0, len(items) - 1, LOOKED_AT).astype(int))
        chosen = [items[place] for place in places.tolist()]
    layout = reader.layout
    report = ForeignReport(layout=layout, num_items=len(items))
    totals: Any = None
    with ThreadPoolExecutor(workers) as pool:
        for item, look in zip(chosen, _looked(pool, reader, chosen, should_stop), strict=False):
            on_item()
            if isinstance(look, str):
                report.bad[item] = look
                continue
            report.num_read += 1
            report.num_tokens += look.num_tokens
            if look.num_trained is not None:
                report.num_trained_tokens = (report.num_trained_tokens or 0) + look.num_trained
            report.shortest = min(report.shortest or look.num_tokens, look.num_tokens)
            report.longest = max(report.longest, look.num_tokens)
            report.highest_id = max(report.highest_id, look.highest_id)
            if look.problem:
                report.bad[item] = look.problem
            if totals is None:
                totals = look.statistics
            else:
                peaks = np.maximum(totals[:, MAX_ABS], look.statistics[:, MAX_ABS])
                totals = totals + look.statistics
                totals[:, MAX_ABS] = peaks
    if totals is not None:
        names = [f"slot {n}" for n in range(layout.num_taps)] + ["last_hidden"] * (layout.last_hidden is not None)
        report.slots = [
            {
                "name": name,
                "mean_norm": float(totals[n, SUM_NORM]) / report.num_tokens,
                "max_abs": float(totals[n, MAX_ABS]),
                "nonfinite": int(totals[n, NONFINITE]),
            }
            for n, name in enumerate(names)
        ]
    return report


@dataclass(frozen=True, kw_only=True)
class _Look:
    num_tokens: int
    num_trained: int | None
    highest_id: int
    statistics: Any  # float64 [A, 4], or [A + 1, 4] with last_hidden
    problem: str | None


def _looked(
    pool: ThreadPoolExecutor, reader: Reader, items: Sequence[str], should_stop: Callable[[], bool]
) -> Iterator[_Look | str]:
    def look(item: str) -> _Look | str:
        return "not looked at" if should_stop() else _look(reader, item)

    return pool.map(look, items)


def _look(reader: Reader, item: str) -> _Look | str:
    layout = reader.layout
    try:
        foreign = reader.read(item)
    except ForeignFileError as error:
        return error.what
    T = len(foreign.input_ids)
    H = layout.hidden_size or (foreign.features.shape[-1] if foreign.features.dim() == 3 else 0)
    states = [foreign.features]
    if list(foreign.features.shape) != [T, layout.num_taps, H]:
        return f"features are {list(foreign.features.shape)}, expected {[T, layout.num_taps, H]}"
    if layout.last_hidden is not None:
        if foreign.last_hidden is None or list(foreign.last_hidden.shape) != [T, H]:
            return f"the last hidden state is not {[T, H]}"
        states.append(foreign.last_hidden.unsqueeze(1))
    if not T:
        return "holds no token"
    if any(str(tensor.dtype) != f"torch.{layout.dtype}" for tensor in states):
        return f"states are {states[0].dtype}, and the folder's first ones {layout.dtype}"
    statistics = np.concatenate([tap_statistics(tensor).numpy() for tensor in states])
    nonfinite = int(statistics[:, NONFINITE].sum())
    lowest = int(foreign.input_ids.min())
    problem = f"{nonfinite:,} values are NaN or Inf" if nonfinite else None
    if lowest < 0:
        problem = f"token id {lowest}"
    return _Look(
        num_tokens=T,
        num_trained=None if foreign.loss_mask is None else int(foreign.loss_mask.sum()),
        highest_id=int(foreign.input_ids.max()),
        statistics=statistics,
        problem=problem,
    )
