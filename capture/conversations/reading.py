"""Where conversations come from: one row at a time, in bounded memory, whatever the container.

| input | rows |
|---|---|
| JSON lines, also .gz; `-` for standard input | a line each |
| JSON array, also .gz | an element each; one that is cut off or broken is read up to there |
| Parquet | a row each |
| folder of JSON lines or Parquet files | their rows, files by name |
| folder saved by `datasets` | a row each |
| hub name, owner/dataset | a row each, streamed |
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from eyas.capture.errors import ConversationsError
from eyas.capture.prepared import RejectedRow
from eyas.taps.errors import UsageError

STDIN = "-"
CUT_OFF = "cut off"  # kind of the reject that stands for all that could not be read behind it
ARROW_ROWS = 256  # rows taken out of Parquet and Arrow files at a time
_DATA_FILE = re.compile(r"\.(jsonl|ndjson|parquet)(\.gz)?$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """A row as it was read: a line of JSON, still to be parsed, or what the container held."""

    source: str  # file:line, or file[position]
    body: Any  # bytes of JSON where it was a line
    amount: int  # how far reading it brought us, in the reader's unit


class Reader:
    """The rows of one input.

    ``total`` is how much there is in ``unit`` (B or rows), None where nobody knows. ``fingerprint`` tells one state of
    the input from another without reading it; None where it cannot be told (standard input).
    """

    def __init__(self, conversations: str, split: str | None = None) -> None:
        """Raises ConversationsError where there is nothing to read."""
        self.name = conversations
        self.split = split
        self.total: int | None = None
        self.unit = "rows"
        self.files: list[Path] = []  # that it reads itself; none of a saved dataset, a hub name, standard input
        self.fingerprint: dict[str, Any] | None = None
        if not conversations:
            raise ConversationsError("CONVERSATIONS is empty: expected a file, a folder, a hub name, or -")
        path = Path(conversations)
        if conversations == STDIN:
            _no_splits(conversations, split)
            if sys.stdin is None:  # closed by the caller
                raise ConversationsError("-: standard input is closed: expected JSON lines on it")
            self._rows = _json_lines("stdin", sys.stdin.buffer, None)
        elif path.is_dir():
            self._open_folder(path, split)
        elif path.exists():
            self._open_files([path], split)
        elif _HUB_NAME.fullmatch(conversations) and not _DATA_FILE.search(conversations):
            self.fingerprint = {"hub": conversations}
            self._rows = _hub(conversations, split)
        else:
            raise ConversationsError(
                f"{conversations}: no such file or folder. Expected JSON lines, a JSON array, Parquet, a folder saved "
                "by datasets, a hub name (owner/dataset), or - for JSON lines on standard input"
            )

    def __iter__(self) -> Iterator[RawRow | RejectedRow]:
        return self._rows

    def _open_folder(self, path: Path, split: str | None) -> None:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            folder = _split_folder(path, split)
            arrow = sorted(folder.glob("*.arrow"))
            self._measure(arrow)
            self._rows = _saved_dataset(folder, str(path), self.total or 0)
            return
        files = sorted(entry for entry in path.rglob("*") if entry.is_file() and _DATA_FILE.search(entry.name))
        if not files:
            raise ConversationsError(
                f"{path}: neither a folder saved by datasets (state.json, dataset_dict.json) nor one that holds "
                ".jsonl or .parquet files"
            )
        self._open_files(files, split)

    def _open_files(self, files: list[Path], split: str | None) -> None:
        _no_splits(self.name, split)
        self._measure(files)
        self.files = files
        self._rows = (row for file in files for row in _file(file))

    def _measure(self, files: list[Path]) -> None:
        states = [file.stat() for file in files]
        self.total = sum(state.st_size for state in states)
        self.unit = "B"
        self.fingerprint = {
            "path": str(Path(self.name).resolve()),
            "num_bytes": self.total,
            "modified_ns": max(state.st_mtime_ns for state in states),
        }


def _file(path: Path) -> Iterator[RawRow | RejectedRow]:
    name = str(path)
    with open(path, "rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic == b"PAR1":
            yield from _parquet(name, path)
            return
        file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if magic[:2] == b"\x1f\x8b" else raw
        if _is_json_array(name, file):
            yield from _json_array(name, file, raw)
        else:
            yield from _json_lines(name, file, raw)


def _is_json_array(name: str, file: IO[bytes]) -> bool:
    """Whether ``file`` is one JSON array, as opposed to JSON lines; leaves it at its beginning."""
    if re.search(r"\.(jsonl|ndjson)(\.gz)?$", name):
        return False
    try:
        head = file.read(1 << 16)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        head = b""  # the reader of lines reports it
    file.seek(0)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"[":
        return True
    if text[:1] == b"{" and re.match(rb"\{\s*\n", text):
        raise ConversationsError(
            f"{name}: one JSON object over many lines. Expected an array of conversations or one a line"
        )
    return False


def _json_lines(name: str, file: IO[bytes], raw: IO[bytes] | None) -> Iterator[RawRow | RejectedRow]:
    """``raw`` is the file under ``file`` whose position says how far we are; None counts rows instead."""
    position = number = 0
    while True:
        number += 1
        try:
            line = file.readline()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield RejectedRow(
                source=f"{name}:{number}",
                kind=CUT_OFF,
                reason=f"the compressed file is cut off or damaged here ({error}); the {number - 1} lines before it "
                "were read",
            )
            return
        if not line:
            return
        if b"\0" in line:
            if number == 1:
                raise ConversationsError(
                    f"{name}: its first line holds NUL bytes, as UTF-16 text does: expected UTF-8. Convert it: "
                    f"iconv -f UTF-16 -t UTF-8 {name}"
                )
            yield RejectedRow(source=f"{name}:{number}", kind="json", reason="NUL bytes: no JSON in UTF-8")
            continue
        amount, position = (1, 0) if raw is None else (raw.tell() - position, raw.tell())
        if line.strip():
            yield RawRow(source=f"{name}:{number}", body=line, amount=amount)


def _json_array(name: str, file: IO[bytes], raw: IO[bytes]) -> Iterator[RawRow | RejectedRow]:
    import ijson

    position = count = 0
    try:
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        for item in ijson.items(file, "item", use_float=True):
            amount, position = raw.tell() - position, raw.tell()
            yield RawRow(source=f"{name}[{count}]", body=item, amount=amount)
            count += 1
    except (ijson.JSONError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        yield RejectedRow(
            source=f"{name}[{count}]",
            kind=CUT_OFF,
            reason=f"the JSON array is cut off or broken within element {count} ({what}); the {count} whole elements "
            "before it were read, nothing after it can be",
        )


def _parquet(name: str, path: Path) -> Iterator[RawRow | RejectedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        file = pq.ParquetFile(path)
        amount = path.stat().st_size // max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=ARROW_ROWS):
            for body in batch.to_pylist():
                yield RawRow(source=f"{name}[{count}]", body=_without_nulls(body), amount=amount)
                count += 1
    except (pa.ArrowException, OSError) as error:
        if count == 0:
            raise ConversationsError(f"{name}: no readable Parquet file ({error})") from error
        yield RejectedRow(
            source=f"{name}[{count}]",
            kind=CUT_OFF,
            reason=f"the Parquet file is damaged here ({error}); the {count} rows before it were read",
        )


def _no_splits(name: str, split: str | None) -> None:
    if split is not None:
        raise UsageError(f"--split {split}: {name} has no splits to choose from; leave the option out")


def _split_folder(path: Path, split: str | None) -> Path:
    """The folder of one split of a dataset saved by `datasets`."""
    if (path / "state.json").exists():
        _no_splits(str(path), split)
        return path
    splits: list[str] = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None or split not in splits:
        asked = "no --split given" if split is None else f"--split {split}"
        raise UsageError(f"{path}: {asked}, and it holds the splits {', '.join(splits)}: choose one with --split")
    return path / split


def _saved_dataset(folder: Path, name: str, num_bytes: int) -> Iterator[RawRow | RejectedRow]:
    from datasets import load_from_disk

    dataset = load_from_disk(str(folder)).with_format("arrow")
    amount = num_bytes // max(len(dataset), 1)
    count = 0
    for table in dataset.iter(batch_size=ARROW_ROWS):
        for body in table.to_pylist():
            yield RawRow(source=f"{name}[{count}]", body=_without_nulls(body), amount=amount)
            count += 1


def _hub(name: str, split: str | None) -> Iterator[RawRow | RejectedRow]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        dataset = load_dataset(name, split=split or "train", streaming=True).with_format("arrow")
        count = 0
        for table in dataset.iter(batch_size=ARROW_ROWS):
            for body in table.to_pylist():
                yield RawRow(source=f"{name}[{count}]", body=_without_nulls(body), amount=1)
                count += 1
    except (DatasetsError, OSError, ValueError) as error:
        what = str(error).strip().splitlines()[0]
        raise ConversationsError(
            f"{name}: no such file here, and as a dataset of the hub it cannot be read ({what}). Splits are chosen "
            "with --split (default: train)"
        ) from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct the keys of all others, with null: the same as a key that is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
