"""Progress on stderr: a bar on a terminal, one line a minute otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Counts ``unit``s up to ``total``. ``note`` is shown behind the count."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._done = 0
        self._started = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=description, unit=f" {unit}", unit_scale=True, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, amount: int, note: str = "") -> None:
        """``amount`` more units are done."""
        self._done += amount
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            click.echo(self._line(now, note), err=True)

    def _line(self, now: float, note: str) -> str:
        rate = self._done / max(now - self._started, 1e-9)
        line = f"{self._description}: {self._done:,}"
        if self._total is not None:
            line += f" of {self._total:,} {self._unit} ({100 * self._done / max(self._total, 1):.1f} %)"
            left = (self._total - self._done) / rate if rate > 0 else float("inf")
            line += f", {rate:,.0f} {self._unit}/s, {format_seconds(left)} left"
        else:
            line += f" {self._unit}, {rate:,.0f} {self._unit}/s"
        return f"{line}, {note}" if note else line


def format_seconds(seconds: float) -> str:
    """``93784`` as ``1d 2h 3m``; two units at most, ``?`` where unknown."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    parts: list[str] = []
    rest = int(seconds)
    for name, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count}{name}")
    return " ".join(parts[:2])
