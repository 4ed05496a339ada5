"""Values that options take beyond click's own: sizes, durations, models."""

from __future__ import annotations

import re
from pathlib import Path

import click

_SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def size(value: str | int) -> int:
    """``1GiB``, ``500MB`` or a number of bytes, as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)", str(value).strip())
    num_bytes = int(float(match[1]) * _SIZES[match[2]]) if match else 0
    if num_bytes < 1:
        raise click.BadParameter(f"{value!r}: expected a size such as 1GiB, 500MB or a number of bytes")
    return num_bytes


def duration(value: str | float) -> float:
    """``90s``, ``30m``, ``12h``, ``2d``, ``1h30m`` or a number of seconds, as seconds."""
    text = str(value).strip()
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd])+|\d+(\.\d+)?", text):
        raise click.BadParameter(f"{value!r}: expected a duration such as 90s, 30m, 12h, 1h30m or a number of seconds")
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text))


def model(value: str) -> str:
    """A folder, or a name on the hub, which is not asked (and waited) for what can only be a folder."""
    if (Path(value).exists() or not _HUB_NAME.fullmatch(value)) and not Path(value).is_dir():
        raise click.BadParameter(f"{value}: no such folder")
    return value


def format_bytes(num_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")
