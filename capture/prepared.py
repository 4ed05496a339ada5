"""The prepared folder: conversations as tokens and loss masks, on disk.

    OUT/
      data/            saved as `datasets` saves it: load_from_disk(OUT/data) opens it
        data-NNNNN.arrow, dataset_info.json, state.json
      rejects.jsonl    rows that became no sample: source, reason, kind, id
      prepared.json    tokenizer, options, counts; written last, so a folder without it is unfinished

The reader maps the Arrow files into memory: opening 1.4 M samples reads their offsets and ids, no tokens.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.capture.errors import PreparedError
from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, publish
from eyas.shards.identity import PreparedIdentity, TokenizerIdentity
from eyas.shards.sample import TokenSample, sample_id

if TYPE_CHECKING:
    import pyarrow as pa

PREPARED_FILE = "prepared.json"
REJECTS_FILE = "rejects.jsonl"
DATA_FOLDER = "data"
FORMAT_VERSION = 1

BATCH_SAMPLES = 1024  # rows of one Arrow record batch, and at most this many bytes of tokens and text:
BATCH_BYTES = 32 << 20
FILE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PreparedRow:
    """One conversation as tokens, with the text it came from for display."""

    input_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 where the token itself is a training target
    messages: str | None  # JSON, None where the input was tokens only
    tools: str | None  # JSON
    category: str | None
    source: str  # file and line, or id


@dataclass(frozen=True, kw_only=True)
class RejectedRow:
    """A row that became no sample."""

    source: str  # file and line, or file and position
    kind: str  # what sort of fault, for the counts
    reason: str
    row_id: str | None = None  # the row's own id, where it has one


def fingerprint(sample_ids: npt.NDArray[np.uint64]) -> str:
    """blake2b-128, hex, over the sorted ids [N] as uint64 little-endian (an id is its hex digits' number)."""
    return hashlib.blake2b(np.sort(sample_ids).astype("<u8").tobytes(), digest_size=16).hexdigest()


class PreparedSamples:
    """A finished prepared folder, read by row."""

    def __init__(self, path: Path, body: dict[str, Any], table: pa.Table) -> None:
        self.path = path
        self._body = body
        self._batches = table.to_batches()
        # Row r is in batch searchsorted(starts, r, "right") - 1.
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)  # [batches + 1]

    @classmethod
    def open(cls, path: Path | str) -> PreparedSamples:
        """Open ``path``. Raises PreparedError where it is no finished prepared folder."""
        path = Path(path)
        body = read_prepared_json(path)
        if body is None:
            raise PreparedError(
                f"{path}: no {PREPARED_FILE} there, so this is no finished prepared folder; make it with "
                f"`eyas prepare CONVERSATIONS {path} --target TARGET`"
            )
        samples = cls(path, body, _map_table(path / DATA_FOLDER))
        if len(samples) != body["num_samples"]:
            raise PreparedError(
                f"{path}: {PREPARED_FILE} says {body['num_samples']} samples and {DATA_FOLDER}/ holds {len(samples)}: "
                "one of them was replaced. Run eyas prepare again into a new folder"
            )
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedSamples.open, (self.path,)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> TokenSample:
        """Row ``row`` (0 <= row < N). Reads its bytes only. Raises IndexError."""
        batch, n = self._locate(row)
        return TokenSample(
            sample_id=batch.column("sample_id")[n].as_py(),
            input_ids=_list_values(batch.column("input_ids"), n),
            loss_mask=_list_values(batch.column("loss_mask"), n),
        )

    def row_text(self, row: int) -> dict[str, str | None]:
        """``messages`` and ``tools`` (JSON), ``category`` and ``source`` of a row."""
        batch, n = self._locate(row)
        return {name: batch.column(name)[n].as_py() for name in ("messages", "tools", "category", "source")}

    def token_rows(self) -> Iterator[npt.NDArray[np.int32]]:
        """input_ids int32 [T] of every row in order, without a copy."""
        for batch in self._batches:
            column = batch.column("input_ids")
            offsets = column.offsets.to_numpy().tolist()
            values = column.values.to_numpy(zero_copy_only=True)
            yield from (values[start:end] for start, end in pairwise(offsets))

    @cached_property
    def sample_ids(self) -> npt.NDArray[np.uint64]:
        """[N], each id's 16 hex digits as a number. Raises PreparedError where they are not prepared.json's."""
        parts = [_hex_column(batch.column("sample_id")) for batch in self._batches]
        ids = np.concatenate([np.empty(0, np.uint64), *parts])
        if fingerprint(ids) != self._body["fingerprint"]:
            raise PreparedError(
                f"{self.path}: the sample ids in {DATA_FOLDER}/ are not those that {PREPARED_FILE} was written for. "
                "Run eyas prepare again into a new folder"
            )
        return ids

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N], tokens of each sample."""
        parts = [np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in self._batches]
        return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)

    @property
    def identity(self) -> PreparedIdentity:
        """The set of samples, as a dataset made from it records it."""
        return PreparedIdentity(fingerprint=self._body["fingerprint"], num_samples=self._body["num_samples"])

    @property
    def tokenizer(self) -> TokenizerIdentity:
        """The tokenizer that made the tokens."""
        return TokenizerIdentity(**self._body["tokenizer"])

    @property
    def target(self) -> str | None:
        """Name or path of the model whose tokenizer it was, as the user gave it."""
        target: str | None = self._body["target"]
        return target

    @property
    def revision(self) -> str | None:
        """Hub revision of the target, where one was given."""
        revision: str | None = self._body["revision"]
        return revision

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide what the samples are, and the input they were made from."""
        options: dict[str, Any] = self._body["options"]
        return options

    @property
    def counts(self) -> dict[str, Any]:
        """What was read, kept, changed and left out. ``num_tokens`` and ``num_trained_tokens`` are always there."""
        counts: dict[str, Any] = self._body["counts"]
        return counts

    def _locate(self, row: int) -> tuple[pa.RecordBatch, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: {self.path} has rows 0 to {len(self) - 1}")
        n = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[n], row - int(self._starts[n])


class PreparedMasks:
    """The loss mask that belongs to some tokens: of the prepared row that has exactly these."""

    def __init__(self, prepared: PreparedSamples) -> None:
        """Hashes every row's tokens, which are mapped: 16 bytes a row stay."""
        self._prepared = prepared
        hashes = np.fromiter(map(_token_hash, prepared.token_rows()), np.uint64, len(prepared))
        self._rows = np.argsort(hashes, kind="stable")  # [N]
        self._hashes = hashes[self._rows]  # ascending

    def __call__(self, input_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """uint8 [T] for int32 [T]. Raises PreparedError where no row has these tokens, or several with other masks."""
        wanted = np.uint64(_token_hash(input_ids))
        first, stop = (int(np.searchsorted(self._hashes, wanted, side=side)) for side in ("left", "right"))
        masks: list[npt.NDArray[np.uint8]] = []
        for row in self._rows[first:stop].tolist():
            sample = self._prepared[row]
            if np.array_equal(sample.input_ids, input_ids) and not any(
                np.array_equal(sample.loss_mask, mask) for mask in masks
            ):
                masks.append(sample.loss_mask)
        if len(masks) == 1:
            return masks[0]
        if masks:
            raise PreparedError(
                f"{self._prepared.path} has {len(masks)} loss masks for these {len(input_ids):,} tokens"
            )
        raise PreparedError(f"no sample of {self._prepared.path} has these {len(input_ids):,} tokens")


def _token_hash(input_ids: npt.NDArray[np.int32]) -> int:
    return int.from_bytes(
        hashlib.blake2b(np.ascontiguousarray(input_ids, "<i4").tobytes(), digest_size=8).digest(), "little"
    )


def read_prepared_json(path: Path) -> dict[str, Any] | None:
    """The body of ``path``/prepared.json, None where there is none. Raises PreparedError where it is unreadable."""
    file = path / PREPARED_FILE
    try:
        body = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PreparedError(f"{file}: unreadable ({error}). Remove {path} and run eyas prepare again") from error
    if not isinstance(body, dict) or body.get("format") != "eyas-prepared":
        raise PreparedError(f"{file}: expected the JSON object that eyas prepare writes")
    if body.get("format_version") != FORMAT_VERSION:
        raise PreparedError(
            f"{file}: format version {body.get('format_version')!r}, and this eyas reads version {FORMAT_VERSION}: "
            "run eyas prepare again into a new folder"
        )
    return body


def write_prepared(
    out: Path,
    rows: Iterable[PreparedRow | RejectedRow],
    *,
    tokenizer: TokenizerIdentity,
    target: str | None,
    revision: str | None = None,
    options: Mapping[str, Any] | None = None,
    counts: Callable[[], Mapping[str, Any]] = dict,
    max_samples: int | None = None,
) -> PreparedSamples:
    """Write ``rows`` as the prepared folder ``out``, in bounded memory, and open it.

    Rows with the tokens and mask of an earlier row are one sample and counted. ``counts`` is asked once the rows are
    exhausted, or ``max_samples`` of them written. What an interrupted run left in ``out`` is replaced.

    Raises PreparedError where ``out`` is finished already or holds something else, where another process is writing it,
    or where not a single row is a sample: then nothing is published.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PreparedError(f"{out}: another eyas prepare is writing there; wait for it or stop it") from error
        if (out / PREPARED_FILE).exists():
            raise PreparedError(f"{out} is finished already: give another folder, or remove it (rm -r {out})")
        _clear_unfinished(out)
        return _write(out, rows, tokenizer, target, revision, options or {}, counts, max_samples)
    finally:
        os.close(folder)


def _write(
    out: Path,
    rows: Iterable[PreparedRow | RejectedRow],
    tokenizer: TokenizerIdentity,
    target: str | None,
    revision: str | None,
    options: Mapping[str, Any],
    counts: Callable[[], Mapping[str, Any]],
    max_samples: int | None,
) -> PreparedSamples:
    data = out / DATA_FOLDER
    data.mkdir()
    seen: set[int] = set()  # about 100 bytes a sample
    num_duplicates = num_tokens = num_trained_tokens = 0
    with open(out / REJECTS_FILE, "x", encoding="utf-8") as rejects, _ArrowFiles(data) as files:
        for row in rows:
            if isinstance(row, RejectedRow):
                line = {"source": row.source, "kind": row.kind, "reason": row.reason, "id": row.row_id}
                rejects.write(json.dumps(line) + "\n")
                continue
            name = sample_id(row.input_ids, row.loss_mask)
            if int(name, 16) in seen:
                num_duplicates += 1
                continue
            seen.add(int(name, 16))
            num_tokens += len(row.input_ids)
            num_trained_tokens += int(row.loss_mask.sum())
            files.add(name, row)
            if len(seen) == max_samples:
                break
        rejects.flush()
        os.fsync(rejects.fileno())
    body: dict[str, Any] = {
        "format": "eyas-prepared",
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint(np.fromiter(seen, np.uint64, len(seen))),
        "num_samples": len(seen),
        "target": target,
        "revision": revision,
        "tokenizer": asdict(tokenizer),
        "options": dict(options),
        "counts": {
            "num_samples": len(seen),
            "num_tokens": num_tokens,
            "num_trained_tokens": num_trained_tokens,
            "num_duplicates": num_duplicates,
            **counts(),
        },
    }
    if not seen:
        reasons = _first_reasons(out / REJECTS_FILE)
        raise PreparedError(f"{out}: no row of the input is a sample, so nothing was published{reasons}")
    fsync_folder(data)
    fsync_folder(out)
    publish(out / PREPARED_FILE, (json.dumps(body, indent=2) + "\n").encode())
    return PreparedSamples.open(out)


class _ArrowFiles:
    """The Arrow files of data/, with the two JSON files that make them a folder of `datasets`."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self._folder = folder
        self._schema = pa.schema(
            {
                "sample_id": pa.string(),
                "input_ids": pa.list_(pa.int32()),
                "loss_mask": pa.list_(pa.uint8()),
                "messages": pa.string(),
                "tools": pa.string(),
                "category": pa.string(),
                "source": pa.string(),
            }
        )
        self._names: list[str] = []
        self._pending: list[tuple[str, PreparedRow]] = []
        self._pending_bytes = 0
        self._file: pa.OSFile | None = None
        self._stream: pa.RecordBatchStreamWriter | None = None

    def __enter__(self) -> _ArrowFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._pending or not self._names:
                self._write_batch()
            self._close_file()
            self._describe()
        elif self._file is not None:
            self._file.close()

    def add(self, name: str, row: PreparedRow) -> None:
        self._pending.append((name, row))
        self._pending_bytes += 5 * len(row.input_ids) + len(row.messages or "") + len(row.tools or "")
        if len(self._pending) >= BATCH_SAMPLES or self._pending_bytes >= BATCH_BYTES:
            self._write_batch()

    def _write_batch(self) -> None:
        import pyarrow as pa

        rows = [row for _, row in self._pending]
        offsets = pa.array(np.cumsum([0, *(len(row.input_ids) for row in rows)]), pa.int32())  # [n + 1]
        input_ids = np.concatenate([np.empty(0, np.int32), *(row.input_ids for row in rows)])
        loss_mask = np.concatenate([np.empty(0, np.uint8), *(row.loss_mask for row in rows)])
        columns = [
            pa.array([name for name, _ in self._pending], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(input_ids, pa.int32())),
            pa.ListArray.from_arrays(offsets, pa.array(loss_mask, pa.uint8())),
            *(
                pa.array([getattr(row, column) for row in rows], pa.string())
                for column in ("messages", "tools", "category", "source")
            ),
        ]
        if self._file is None:
            self._names.append(f"data-{len(self._names):05d}.arrow")
            self._file = pa.OSFile(str(self._folder / self._names[-1]), "wb")
            self._stream = pa.ipc.new_stream(self._file, self._schema)
        assert self._stream is not None
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._pending, self._pending_bytes = [], 0
        if self._file.tell() >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None and self._stream is not None:
            self._stream.close()
            self._file.close()
            with open(self._folder / self._names[-1], "rb") as file:
                os.fsync(file.fileno())
        self._file = self._stream = None

    def _describe(self) -> None:
        from datasets import DatasetInfo, Features

        DatasetInfo(features=Features.from_arrow_schema(self._schema)).write_to_directory(str(self._folder))
        # What Dataset.save_to_disk writes beside the Arrow files (datasets 5.2, arrow_dataset.py).
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._names],
            "_fingerprint": hashlib.blake2b("".join(self._names).encode(), digest_size=8).hexdigest(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        publish(self._folder / "state.json", (json.dumps(state, indent=2) + "\n").encode())


def _map_table(data: Path) -> pa.Table:
    import pyarrow as pa

    try:
        state = json.loads((data / "state.json").read_bytes())
        # Only names: a path inside a file is never followed out of its folder.
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(data / name))).read_all() for name in names]
        return pa.concat_tables(tables)
    except (OSError, ValueError, KeyError, TypeError) as error:  # pa.ArrowInvalid is a ValueError
        raise PreparedError(f"{data}: unreadable ({error}). Remove {data.parent} and run eyas prepare again") from error


def _list_values(column: pa.ListArray, n: int) -> npt.NDArray[Any]:
    start, end = column.offsets[n].as_py(), column.offsets[n + 1].as_py()
    values: npt.NDArray[Any] = column.values.slice(start, end - start).to_numpy(zero_copy_only=True)
    return values


def _hex_column(column: pa.StringArray) -> npt.NDArray[np.uint64]:
    """16-digit hex strings [n] as numbers, without a Python object for each."""
    _, offsets, text = column.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[column.offset, column.offset + len(column)]]
    return np.frombuffer(bytes.fromhex(text[int(first) : int(last)].to_pybytes().decode("ascii")), ">u8").astype(
        np.uint64
    )


def _clear_unfinished(out: Path) -> None:
    """Remove what a killed run left, and nothing else."""
    entries = list(out.iterdir())
    foreign = [
        e.name for e in entries if e.name not in (DATA_FOLDER, REJECTS_FILE) and not e.name.startswith(TEMPORARY_PREFIX)
    ]
    data = out / DATA_FOLDER
    if data.is_dir() and not data.is_symlink():
        ours = ("dataset_info.json", "state.json")
        foreign += [
            f"{DATA_FOLDER}/{e.name}"
            for e in data.iterdir()
            if e.name not in ours and e.suffix != ".arrow" and not e.name.startswith(TEMPORARY_PREFIX)
        ]
    if foreign:
        raise PreparedError(
            f"{out} holds {', '.join(sorted(foreign)[:3])}, which eyas prepare did not write: give a new folder"
        )
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _first_reasons(rejects: Path) -> str:
    reasons: list[str] = []
    with open(rejects, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            reasons.append(f"{row['source']}: {row['reason']}")
            if len(reasons) == 3:
                break
    return ". First reasons:\n  " + "\n  ".join(reasons) if reasons else ""
