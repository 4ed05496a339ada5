"""Rows out of every container, whole and damaged."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.capture.conversations.reading import RawRow, Reader
from eyas.capture.errors import ConversationsError
from eyas.capture.prepared import RejectedRow
from eyas.taps.errors import UsageError

ROWS = [{"id": f"c{n}", "messages": [{"role": "user", "content": f"h\u00e9 {n}"}]} for n in range(5)]


def read(source: Path | str, split: str | None = None) -> list[RawRow | RejectedRow]:
    return list(Reader(str(source), split))


def bodies(rows: list[RawRow | RejectedRow]) -> list[Any]:
    return [
        json.loads(row.body) if isinstance(row.body, bytes) else row.body for row in rows if isinstance(row, RawRow)
    ]


def lines(rows: list[Any] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_jsonl(folder: Path) -> Path:
    (folder / "x.jsonl").write_bytes(lines())
    return folder / "x.jsonl"


def as_jsonl_gz(folder: Path) -> Path:
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(lines()))
    return folder / "x.jsonl.gz"


def as_jsonl_named_json(folder: Path) -> Path:
    (folder / "x.json").write_bytes(lines())
    return folder / "x.json"


def as_array(folder: Path) -> Path:
    (folder / "x.json").write_text(json.dumps(ROWS, indent=2))
    return folder / "x.json"


def as_array_gz(folder: Path) -> Path:
    (folder / "x.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    return folder / "x.json.gz"


def as_array_with_mark(folder: Path) -> Path:
    (folder / "x.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS).encode())
    return folder / "x.json"


def as_parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), folder / "x.parquet")
    return folder / "x.parquet"


def as_saved_dataset(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_saved_splits(folder: Path) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_folder(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(lines(ROWS[:2]))
    (folder / "data" / "b.jsonl").write_bytes(lines(ROWS[2:]))
    (folder / "README.md").write_text("not data")
    return folder


CONTAINERS = [
    as_jsonl, as_jsonl_gz, as_jsonl_named_json, as_array, as_array_gz, as_array_with_mark, as_parquet, as_saved_dataset,
    as_saved_splits, as_folder,
]  # fmt: skip


@pytest.mark.parametrize("make", CONTAINERS, ids=[make.__name__ for make in CONTAINERS])
def test_containers(make: Any, tmp_path: Path) -> None:
    source = make(tmp_path)
    reader = Reader(str(source))
    rows = list(reader)
    assert bodies(rows) == ROWS
    assert len({row.source for row in rows}) == len(ROWS)
    done = sum(row.amount for row in rows if isinstance(row, RawRow))
    assert reader.total is not None
    assert reader.unit == "B"
    assert 0 < done <= reader.total
    assert reader.fingerprint == Reader(str(source)).fingerprint


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(lines() + b"\n" + b"{torn")

    monkeypatch.setattr(sys, "stdin", Stdin())
    reader = Reader("-")
    rows = list(reader)
    assert [row.source for row in rows] == ["stdin:1", "stdin:2", "stdin:3", "stdin:4", "stdin:5", "stdin:7"]
    assert (reader.total, reader.unit, reader.fingerprint) == (None, "rows", None)


def test_arrow_nulls_are_missing_keys(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {"y": 2}}}]
    pq.write_table(pa.Table.from_pylist([{"calls": calls}, {"tools": None}]), tmp_path / "x.parquet")
    assert bodies(read(tmp_path / "x.parquet")) == [{"calls": calls}, {}]


def test_an_array_cut_off_anywhere_is_salvaged_up_to_there(tmp_path: Path) -> None:
    text = json.dumps(ROWS, ensure_ascii=False).encode()
    ends = [n + 1 for n in range(len(text)) if text[: n + 1].endswith(b"}]}")]  # of whole elements
    for cut in range(1, len(text)):
        (tmp_path / "x.json").write_bytes(text[:cut])
        rows = read(tmp_path / "x.json")
        whole = sum(end <= cut for end in ends)
        assert bodies(rows) == ROWS[:whole]
        assert isinstance(rows[-1], RejectedRow)
        assert rows[-1].kind == "cut off"
        assert f"the {whole} whole elements before it were read" in rows[-1].reason


def test_compressed_lines_cut_off(tmp_path: Path) -> None:
    import random

    draw = random.Random(0)
    many = [{"n": n, "x": draw.random()} for n in range(5000)]
    whole = gzip.compress(lines(many))
    (tmp_path / "x.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    rows = read(tmp_path / "x.jsonl.gz")
    last = rows[-1]
    assert isinstance(last, RejectedRow)
    assert last.kind == "cut off"
    got = [row for row in rows[:-1] if isinstance(row, RawRow)]
    assert [json.loads(row.body) for row in got] == many[: len(got)]
    assert 2000 < len(got) < 3000


def test_damaged_parquet(tmp_path: Path) -> None:
    source = as_parquet(tmp_path)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(ConversationsError, match="no readable Parquet file"):
        read(source)


REFUSED = [
    ("nothing.jsonl", None, ConversationsError, "no such file or folder"),
    ("a/b/c", None, ConversationsError, "no such file or folder"),
    ("empty", None, ConversationsError, "neither a folder saved by datasets"),
    ("x.jsonl", "train", UsageError, "no splits"),
    ("pretty.json", None, ConversationsError, "one JSON object over many lines"),
    ("two", None, UsageError, "it holds the splits train, test"),
    ("two", "dev", UsageError, "--split dev"),
]


@pytest.mark.parametrize(("name", "split", "error", "message"), REFUSED)
def test_refused(name: str, split: str | None, error: type[Exception], message: str, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    as_jsonl(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pretty.json").write_text(json.dumps(ROWS[0], indent=1))
    if name == "two":
        data = Dataset.from_list(ROWS)
        DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(error, match=message):
        read(tmp_path / name, split)


def test_the_chosen_split_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = DatasetDict({"train": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])})
    splits.save_to_disk(str(tmp_path / "two"))
    assert bodies(read(tmp_path / "two", "test")) == ROWS[1:]


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, *, split: str, streaming: bool) -> Any:
        assert (name, split, streaming) == ("owner/chats", "train_sft", True)
        return datasets.Dataset.from_list([*ROWS, {"id": "x", "messages": None}]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    reader = Reader("owner/chats", "train_sft")
    rows = list(reader)
    assert bodies(rows) == [*ROWS, {"id": "x"}]
    assert rows[5].source == "owner/chats[5]"
    assert (reader.total, reader.unit, reader.fingerprint) == (None, "rows", {"hub": "owner/chats"})


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/nothing' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConversationsError, match="owner/nothing: no such file here, and as a dataset of the hub"):
        read("owner/nothing")
