"""A standardize run that ends by SIGKILL just before one of its calls that change the disk."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from eyas.standardize.cat import request, standardize
from eyas.taps.notation import parse_taps


def standardize_and_die(source: Path, out: Path, taps: str | None, calls: int) -> None:
    """Run it with two workers; die before disk call number ``calls``."""
    lock, left = threading.Lock(), [calls]

    def deadly(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in ("link", "rename", "replace", "fsync", "write", "unlink", "ftruncate"):
        deadly(name)
    asked = request(source, out, taps=parse_taps(taps) if taps else None)
    for _ in standardize(asked, workers=2, shard_bytes=4_000, should_stop=lambda: False):
        pass
