"""The file that eyas regenerate appends to: one fsynced line per finished conversation.

OUT                 {"id": "16 hex digits", ...} a line, in the order they were finished
OUT.options.json    what decides the answers; another run must agree
OUT.rejects.jsonl   rows of the input that cannot be regenerated, as far as the last run read
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.capture.errors import ConversationsError
from eyas.shards.atomic import fsync_folder, publish_new

_ID_START = b'{"id": "'
_ID_LENGTH = 16


class Output:
    """Context manager; ``done`` is the ids of the conversations that are there, ``damaged`` the numbers of lines that
    cannot be read any more, whose conversations are not among them."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.rejects_path = path.with_name(path.name + ".rejects.jsonl")
        self.done: set[str] = set()
        self.damaged: list[int] = []
        self._options = options
        self._opened = ExitStack()

    def __enter__(self) -> Output:
        """Raises ConversationsError where the file is another run's, or is being written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._same_or_refuse(self._options)
        with ExitStack() as opened:
            self._file = opened.enter_context(open(self.path, "a+b", buffering=0))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConversationsError(
                    f"{self.path}: another eyas regenerate is writing there; wait for it or stop it"
                ) from error
            fsync_folder(self.path.parent)
            self._read_done()
            self._rejects = opened.enter_context(open(self.rejects_path, "w", encoding="utf-8", buffering=1))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append ``row``, durably."""
        self._file.write(json.dumps(row).encode() + b"\n")
        os.fsync(self._file.fileno())
        self.done.add(row["id"])

    def reject(self, *, source: str, row_id: str | None, kind: str, reason: str) -> None:
        """List a row of the input that cannot be regenerated."""
        line = {"source": source, "kind": kind, "reason": reason, "id": row_id}
        self._rejects.write(json.dumps(line) + "\n")

    def _same_or_refuse(self, options: Mapping[str, Any]) -> None:
        path = self.path.with_name(self.path.name + ".options.json")
        if self.path.exists() and self.path.stat().st_size and not path.exists():
            raise ConversationsError(f"{self.path} is there already, and not of eyas regenerate: give another file")
        if publish_new(path, (json.dumps(options, indent=2) + "\n").encode()):
            return
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConversationsError(f"{path}: unreadable ({error}). Give another file than {self.path}") from error
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


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
