"""SIGTERM and Ctrl-C ask a command to seal what it has and end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Set the event on SIGTERM or SIGINT, once; a second signal acts as if this were not here."""
    stopping = threading.Event()
    previous: dict[int, Any] = {}

    def stop(number: int, _: object) -> None:
        stopping.set()
        signal.signal(number, previous[number])

    for asked in (signal.SIGTERM, signal.SIGINT):
        previous[asked] = signal.signal(asked, stop)
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
