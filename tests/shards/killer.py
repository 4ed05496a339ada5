"""SIGKILL to this process at the k-th of its calls that change a file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "replace", "link", "unlink", "ftruncate")


class Killer:
    """Ends this process at the k-th call that changes a file."""

    def __init__(self, k: int, torn: bool, report: Callable[[str], None]) -> None:
        self.left, self.torn, self.report = k, torn, report
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **options)
            self.left -= 1
            if self.left:
                return call(*args, **options)
            self.report(f"killed {'torn ' if self.torn else ''}{name}")
            if not self.torn:
                call(*args, **options)
            elif name == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive after SIGKILL")

        return counted
