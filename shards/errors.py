"""Failures of a dataset on disk that a user can act on."""

from __future__ import annotations

from pathlib import Path

from eyas.taps.errors import EyasError


class ShardError(EyasError):
    """A shard is not what its identity, its ledger line or its own checksums say.

    ``file`` is the shard, ``tensor`` the tensor at fault (None where it is the file or its header) and ``what`` the
    finding.
    """

    def __init__(self, file: Path, tensor: str | None, what: str) -> None:
        super().__init__(f"{file}: {what}" if tensor is None else f"{file}: tensor {tensor}: {what}")
        self.file, self.tensor, self.what = file, tensor, what


class ShardWriteError(EyasError):
    """A shard could not be written (disk full, permissions, a vanished folder). Nothing corrupt was left."""


class HeldError(EyasError):
    """Another process holds the dataset, or the worker name."""


class LedgerError(EyasError):
    """A ledger holds lines that no eyas wrote. (Torn or damaged lines are no error: they are reported as problems.)"""
