"""Canaries: the same few short samples, captured by every worker before its own.

``canaries/`` in a dataset is a small dataset of its own, with the dataset's taps, dtype and codec. Each worker adds one
shard to it in each session; nothing in it is a sample of the dataset. ``eyas check`` compares them.
"""

from __future__ import annotations

from pathlib import Path

from eyas.shards.dataset import Dataset
from eyas.shards.identity import IDENTITY_FILE, DatasetIdentity, create_or_match
from eyas.shards.ledger import recover

CANARIES_FOLDER = "canaries"
SESSION = "session"  # of a canary's metadata: with the worker's name what tells it from every other


def begin_canaries(dataset: Path, identity: DatasetIdentity) -> Path:
    """The folder of the canaries of ``dataset``, made or brought in order. Call under lock_dataset(dataset).

    Raises what create_or_match() and recover() do.
    """
    folder = dataset / CANARIES_FOLDER
    create_or_match(folder, identity)
    recover(folder, identity)
    return folder


def open_canaries(dataset: Path) -> Dataset | None:
    """The canaries of ``dataset``; None where it has none. Every shard holds the same samples. Raises IdentityError."""
    folder = dataset / CANARIES_FOLDER
    return Dataset.open(folder) if (folder / IDENTITY_FILE).exists() else None
