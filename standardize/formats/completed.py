"""The file that says an export is whole: written last, naming the dataset, its taps and the samples in their order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eyas.shards.atomic import publish
from eyas.shards.dataset import Dataset
from eyas.taps.errors import EyasError

DONE_FILE = "eyas.json"


class OtherSamplesError(EyasError):
    """A folder that holds an export of other samples."""


def is_complete(out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> bool:
    """Whether ``out`` holds these samples, all of them. Raises OtherSamplesError where it holds others."""
    if not (out / DONE_FILE).is_file():
        return False
    if json.loads((out / DONE_FILE).read_bytes()) != _contents(dataset, sample_ids):
        raise OtherSamplesError(f"{out} holds other samples: give another folder, or remove it")
    return True


def mark_complete(out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
    """To be called once everything else is written."""
    publish(out / DONE_FILE, json.dumps(_contents(dataset, sample_ids)).encode())


def _contents(dataset: Dataset, sample_ids: Sequence[str]) -> dict[str, object]:
    taps = [str(tap) for tap in dataset.identity.taps]
    return {"dataset": str(dataset.path), "taps": taps, "samples": list(sample_ids)}
