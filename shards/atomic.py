"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, replacing what is there in one step."""
    temporary = _write_temporary(path, content)
    os.replace(temporary, path)
    fsync_folder(path.parent)


def publish_new(path: Path, content: bytes) -> bool:
    """Write ``content`` to ``path`` unless a file is there already; says whether it wrote.

    Of several processes that try at once exactly one wins, and no reader ever sees a part of the file.
    """
    temporary = _write_temporary(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    fsync_folder(path.parent)
    return True


def _write_temporary(path: Path, content: bytes) -> Path:
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
