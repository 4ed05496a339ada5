"""The file that eyas regenerate appends to: one fsynced line per finished conversation.

OUT                 {"id": "16 hex digits", ...} a line, in the order they were finished
OUT.options.json    what decides the answers; another run must agree
OUT.rejects.jsonl   rows of the input that cannot be regenerated, as far as the last run read
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from eyas.capture.errors import ConversationsError
from eyas.shards.atomic import fsync_folder, publish

FORMAT = "eyas-regenerated"
_ID_START = b'{"id": "'
_ID_LENGTH = 16


def options_path(path: Path) -> Path:
    """Where the options stand of the answers in ``path``."""
    return path.with_name(path.name + ".options.json")


def read_options(path: Path) -> dict[str, Any] | None:
    """What decided the answers in ``path``; None where eyas regenerate left nothing beside it.

    Raises ConversationsError where it cannot be read.
    """
    beside = options_path(path)
    if not beside.exists():
        return None
    try:
        found = json.loads(beside.read_bytes())
    except (OSError, ValueError) as error:
        raise ConversationsError(f"{beside}: unreadable ({error}). Give another file than {path}") from error
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


class Output:
    """Context manager; ``done`` is the ids of the conversations that are there, ``damaged`` the numbers of lines that
    cannot be read any more, whose conversations are not among them.

    The options come with the first conversation: a run that fails before it leaves nothing that another must agree to.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.options_path = options_path(path)
        self.rejects_path = path.with_name(path.name + ".rejects.jsonl")
        self.done: set[str] = set()
        self.damaged: list[int] = []
        self._options = options
        self._opened = ExitStack()

    def __enter__(self) -> Output:
        """Raises ConversationsError where the file is another run's, is being written, or cannot be."""
        with self._writing(), ExitStack() as opened:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = not self.path.exists()
            self._file: IO[bytes] = opened.enter_context(open(self.path, "a+b", buffering=0))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = os.fstat(self._file.fileno()).st_nlink == 0  # by a run that removed it as it failed
            except BlockingIOError:
                is_held = True
            if is_held:
                raise ConversationsError(
                    f"{self.path}: another eyas regenerate is writing there; wait for it or stop it"
                )
            fsync_folder(self.path.parent)
            if self._num_bytes:
                self._same_or_refuse()
                self._read_done()
            self._rejects: IO[bytes] = opened.enter_context(open(self.rejects_path, "wb", buffering=0))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._num_bytes:
            if self._is_new:
                self.path.unlink(missing_ok=True)
            self.options_path.unlink(missing_ok=True)
            if not os.fstat(self._rejects.fileno()).st_size:
                self.rejects_path.unlink(missing_ok=True)
        self._opened.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append ``row``, durably. Raises ConversationsError where the disk does not take it."""
        with self._writing():
            if not self._num_bytes:
                publish(self.options_path, (json.dumps(self._options, indent=2) + "\n").encode())
            _write(self._file, row)
            os.fsync(self._file.fileno())
        self.done.add(row["id"])

    def reject(self, *, source: str, row_id: str | None, kind: str, reason: str) -> None:
        """List a row of the input that cannot be regenerated. Raises ConversationsError where the disk is full."""
        with self._writing():
            _write(self._rejects, {"source": source, "kind": kind, "reason": reason, "id": row_id})

    @property
    def _num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConversationsError(
                f"{self.path}: cannot be written ({error.strerror or error}). What was written is kept: mend that and "
                "run the same command again"
            ) from error

    def _same_or_refuse(self) -> None:
        path, options = self.options_path, self._options
        if (found := read_options(self.path)) is None:
            raise ConversationsError(f"{self.path} is there already, and not of eyas regenerate: give another file")
        if differences := [
            f"{name} is {found.get(name)!r} there and {options.get(name)!r} here"
            for name in sorted({*found, *options})
            if found.get(name) != options.get(name)
        ]:
            raise ConversationsError(
                f"{self.path} holds answers of other options: {'; '.join(differences)}. Give another file, or remove "
                f"it first (rm {self.path} {path})"
            )

    def _read_done(self) -> None:
        """Gather the ids, and cut off the line that a kill left unfinished."""
        self._file.seek(0)
        end = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file.fileno(), end)
                    return
                if line.startswith(_ID_START) and not _is_whole(line):
                    self.damaged.append(number)  # its conversation is answered again
                    end += len(line)
                    continue
                if not line.startswith(_ID_START):
                    raise ConversationsError(
                        f"{self.path}:{number}: no line of eyas regenerate. Mend it, or give another file"
                    )
                self.done.add(line[len(_ID_START) : len(_ID_START) + _ID_LENGTH].decode())
                end += len(line)


def _write(file: IO[bytes], line: Mapping[str, Any]) -> None:
    """All of it: a disk that fills up takes a part, and says so only to the next write."""
    left = json.dumps(line).encode() + b"\n"
    while left:
        left = left[file.write(left) :]


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
