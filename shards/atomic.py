"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Have the kernel begin to write what is in its cache, so that the fsync at the end has little left to wait for.

    Promises nothing; does nothing where the system has no sync_file_range.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux
_SYNC_FILE_RANGE_WRITE = 2


def readable_by_all(path: Path) -> None:
    """As any new file is under the process's umask: safetensors makes its files for their owner alone."""
    # A new file shows the umask; setting it to read it would reach into other threads.
    with _temporary(path, b"") as probe:
        os.chmod(path, probe.stat().st_mode & 0o777)


def publish(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, replacing what is there in one step."""
    with _temporary(path, content) as temporary:
        os.replace(temporary, path)
    fsync_folder(path.parent)


def publish_new(path: Path, content: bytes) -> bool:
    """Write ``content`` to ``path`` unless a file is there already; says whether it wrote.

    Of several processes that try at once exactly one wins, and no reader ever sees a part of the file.
    """
    try:
        with _temporary(path, content) as temporary:
            os.link(temporary, path)
    except FileExistsError:
        return False
    fsync_folder(path.parent)
    return True


def remove_temporaries(folder: Path) -> list[str]:
    """Remove what killed processes left in ``folder``; returns the names. Files that are being published stay."""
    removed = []
    for name in sorted(os.listdir(folder)):
        if not name.startswith(TEMPORARY_PREFIX):
            continue
        try:
            with open(folder / name, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
        except (BlockingIOError, FileNotFoundError):  # being published, or just was
            continue
        removed.append(name)
    return removed


@contextlib.contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    """``content``, durable under a temporary name beside ``path``; removed at the end unless renamed.

    Locked while in use: a lock ends with its process, so an unlocked temporary is a leftover.
    """
    temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    with open(temporary, "xb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
