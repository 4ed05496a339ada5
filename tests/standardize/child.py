"""A standardize run that ends by SIGKILL just before one of its calls that change the disk."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from eyas.standardize.cat import standardize
from eyas.standardize.plan import request
from eyas.taps.notation import parse_taps


def standardize_and_die(source: Path, out: Path, taps: str | None, calls: int) -> None:
    """Run it with two workers; die before disk call number ``calls``."""
    _make_deadly(calls)
    asked = request(source, out, taps=parse_taps(taps) if taps else None)
    for _ in standardize(asked, workers=2, shard_bytes=4_000, should_stop=lambda: False):
        pass


def _make_deadly(calls: int) -> None:
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


def import_and_die(source: Path, out: Path, calls: int) -> None:
    """Import speculators' layout; die before disk call number ``calls``."""
    from eyas.standardize.foreign import foreign_request, import_folder
    from eyas.standardize.formats.registry import detect, open_reader
    from tests.captured import captured_identity

    _make_deadly(calls)
    identity = captured_identity(num_samples=1)
    request = foreign_request(
        source,
        out,
        open_reader(source, detect(source, "speculators")),
        beside="pre-norm",
        target=identity.target,
        tokenizer=identity.tokenizer,
        taps=parse_taps("after:1,after:3,after:5"),
    )
    for _ in import_folder(request, workers=2, shard_bytes=4_000, should_stop=lambda: False):
        pass


def export_and_die(source: Path, out: Path, calls: int) -> None:
    """Export in batches of a few samples; die before disk call number ``calls``."""
    from eyas.shards.dataset import Dataset
    from eyas.standardize.formats import write_rows
    from eyas.standardize.formats.registry import create_writer

    write_rows.BATCH_BYTES = 5_000
    _make_deadly(calls)
    write_rows.write_rows(Dataset.open(source), out, create_writer("speculators"), format="speculators", threads=2)
