"""Putting a captured shard, as it is, into a standard dataset: a hard link, or a copy where none can be made."""

from __future__ import annotations

import errno
import os
import secrets
from io import FileIO
from pathlib import Path
from typing import Literal

from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder
from eyas.shards.errors import ShardError, ShardWriteError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.ledger import SealedShard
from eyas.shards.validate import validate

# Another filesystem; a filesystem without hard links, or a file of another user (fs.protected_hardlinks); too many.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_COPY_BYTES = 16 << 20


def place(source: Path, folder: Path, identity: DatasetIdentity, entry: SealedShard) -> Literal["linked", "copied"]:
    """Make ``folder``/``entry.shard`` the same bytes as ``source``, durably, once they have been verified.

    The bytes are verified under a temporary name (the copy's own bytes where it is a copy), so a shard under its real
    name is always whole. ``source`` is opened for reading only. Raises ShardError where the bytes are not what
    ``entry`` says, and OSError (ENOSPC); nothing is left behind then.
    """
    try:
        real = source.resolve(strict=True)  # a hard link to a symbolic link would be a symbolic link
    except OSError as error:
        raise ShardError(source, None, f"unreadable ({error.strerror})") from error
    temporary = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.safetensors"
    try:
        how: Literal["linked", "copied"] = "linked"
        try:
            os.link(real, temporary)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            how = "copied"
            _copy(real, temporary)
        _verify(temporary, source, identity, entry, how)
        os.rename(temporary, folder / entry.shard)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(folder)
    return how


def _copy(source: Path, out: Path) -> None:
    with open(source, "rb", buffering=0) as reader, open(out, "xb") as writer:
        while block := _read(reader, source):
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())


def _read(reader: FileIO, source: Path) -> bytes:
    try:
        return reader.read(_COPY_BYTES) or b""
    except OSError as error:
        raise ShardError(source, None, f"unreadable ({error.strerror})") from error


def _verify(path: Path, source: Path, identity: DatasetIdentity, entry: SealedShard, how: str) -> None:
    try:
        validate(path, identity, entry)
    except ShardError as error:
        if how == "copied":
            validate(source, identity, entry)  # where the source is whole, the copy is at fault
            raise ShardWriteError(
                f"{path.parent / entry.shard}: its copy does not read back as written ({error.what}): the disk or the "
                f"memory is at fault"
            ) from error
        raise ShardError(source, error.tensor, error.what) from error
    except OSError as error:
        raise ShardError(source, None, f"unreadable ({error.strerror})") from error
