"""What the tests of the formats share: exporting samples through a Writer, reading a folder, running a peer's code."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.standardize.formats.base import ForeignSample, Layout, Reader

FORMATS = ("specforge", "modelopt", "eagle", "torchspec")


def detect(folder: Path, name: str) -> Layout | None:
    layout: Layout | None = importlib.import_module(f"eyas.standardize.formats.{name}.detect").detect(folder)
    return layout


def open_reader(folder: Path, name: str) -> Reader:
    layout = detect(folder, name)
    assert layout is not None
    reader: Reader = importlib.import_module(f"eyas.standardize.formats.{name}.read").open_reader(folder, layout)
    return reader


def writer_of(name: str, **options: Any) -> Any:
    return importlib.import_module(f"eyas.standardize.formats.{name}.write").Writer(**options)


def export(writer: Any, identity: DatasetIdentity, samples: Sequence[Sample], out: Path) -> Path:
    writer.check(identity)
    for row, sample in enumerate(samples):
        for name, pieces in writer.files(row, sample).items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(b"".join(pieces))
    return out


def read_all(reader: Reader) -> list[ForeignSample]:
    return [reader.read(item) for item in reader.items()]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers: equal where the bytes are, NaN or not."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def run_peer(name: str, *arguments: object) -> None:
    """Run real/run_NAME.py with the peer's code.

    EYAS_NAME is its checkout, and behind a colon what else it needs to import. Skips where it is not given.
    """
    where = os.environ.get(f"EYAS_{name.upper()}")
    if not where:
        pytest.skip(f"EYAS_{name.upper()} names no checkout of {name}")
    script = Path(__file__).parent / "real" / f"run_{name}.py"
    verb, *rest = map(str, arguments)
    checkout = where.split(os.pathsep)[0]
    command = [sys.executable, str(script), verb, *([checkout] if name == "eagle" else []), *rest]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": where}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
