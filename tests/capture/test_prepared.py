"""The prepared folder from outside: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.capture.errors import PreparedError
from eyas.capture.prepared import PreparedRow, PreparedSamples, RejectedRow, write_prepared
from eyas.shards.identity import TokenizerIdentity
from eyas.shards.sample import sample_id

TOKENIZER = TokenizerIdentity(files_hash="f", chat_template_hash=None, probe_hash="p")


def row(*ids: int, messages: str | None = None) -> PreparedRow:
    return PreparedRow(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array([n % 2 for n in range(len(ids))], np.uint8),
        messages=messages,
        tools=None,
        category="c",
        source=f"x:{ids[0]}",
    )


def write(out: Path, *rows: PreparedRow | RejectedRow, max_samples: int | None = None) -> PreparedSamples:
    return write_prepared(
        out, rows, tokenizer=TOKENIZER, target="t", counts=lambda: {"more": 1}, max_samples=max_samples
    )


def test_round_trip(tmp_path: Path) -> None:
    rows = [row(n, *range(n % 7), messages=json.dumps([{"role": "user", "content": "h\u00e9"}])) for n in range(3000)]
    written = write(tmp_path / "out", *rows, rows[5], RejectedRow(source="x:9", kind="form", reason="why", row_id="i"))
    samples = PreparedSamples.open(tmp_path / "out")
    assert len(samples) == len(rows) == written.identity.num_samples
    assert samples.tokenizer == TOKENIZER
    assert (samples.target, samples.revision) == ("t", None)
    assert samples.counts["num_duplicates"] == 1
    assert samples.counts["num_tokens"] == sum(len(row.input_ids) for row in rows)
    assert samples.counts["num_trained_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert samples.counts["more"] == 1
    assert samples.lengths.tolist() == [len(row.input_ids) for row in rows]
    for n in (0, 1, 1023, 1024, 2999):
        sample = samples[n]
        assert sample.input_ids.tolist() == rows[n].input_ids.tolist()
        assert sample.loss_mask.tolist() == rows[n].loss_mask.tolist()
        assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)
        assert sample.sample_id == sample_id(rows[n].input_ids, rows[n].loss_mask) == f"{samples.sample_ids[n]:016x}"
        assert samples.row_text(n) == {
            "messages": rows[n].messages, "tools": None, "category": "c", "source": rows[n].source
        }  # fmt: skip
    with pytest.raises(IndexError):
        samples[3000]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert rejects == [{"source": "x:9", "kind": "form", "reason": "why", "id": "i"}]
    assert pickle.loads(pickle.dumps(samples))[7].sample_id == samples[7].sample_id


def test_datasets_opens_it(tmp_path: Path) -> None:
    from datasets import load_from_disk

    samples = write(tmp_path / "out", row(1, 2, 3), row(4, 5))
    loaded = load_from_disk(str(tmp_path / "out" / "data"))
    assert loaded["input_ids"][:] == [[1, 2, 3], [4, 5]]
    assert loaded["loss_mask"][:] == [[0, 1, 0], [0, 1]]
    assert loaded["sample_id"][:] == [samples[0].sample_id, samples[1].sample_id]
    assert {
        name: str(feature.feature.dtype) for name, feature in loaded.features.items() if name.endswith(("ids", "mask"))
    } == {
        "input_ids": "int32",
        "loss_mask": "uint8",
    }


def test_the_fingerprint_is_of_the_set_of_samples(tmp_path: Path) -> None:
    a, b = row(1, 2), row(3, 4)
    one = write(tmp_path / "1", a, b)
    two = write(tmp_path / "2", b, a, b)
    three = write(tmp_path / "3", a)
    assert one.identity == two.identity != three.identity


def test_max_samples_counts_samples_not_rows(tmp_path: Path) -> None:
    a, b, c = row(1, 2), row(3, 4), row(5, 6)
    samples = write(tmp_path / "out", a, a, RejectedRow(source="x", kind="form", reason="y"), b, c, max_samples=2)
    assert [samples[n].input_ids.tolist() for n in range(len(samples))] == [[1, 2], [3, 4]]


def test_a_failed_run_is_replaced_by_the_next(tmp_path: Path) -> None:
    def failing() -> Iterator[PreparedRow]:
        yield row(1, 2)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_prepared(tmp_path / "out", failing(), tokenizer=TOKENIZER, target="t")
    with pytest.raises(PreparedError, match="no finished prepared folder"):
        PreparedSamples.open(tmp_path / "out")
    assert len(write(tmp_path / "out", row(3, 4))) == 1


def test_no_sample_at_all(tmp_path: Path) -> None:
    with pytest.raises(PreparedError, match=r"(?s)no row of the input is a sample.*x:1: because"):
        write(tmp_path / "out", RejectedRow(source="x:1", kind="form", reason="because"))
    with pytest.raises(PreparedError, match="no finished"):
        PreparedSamples.open(tmp_path / "out")


def test_finished_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "out", row(1, 2))
    with pytest.raises(PreparedError, match="finished already"):
        write(tmp_path / "out", row(3, 4))
    for name in ("notes.txt", "data/notes.txt"):
        foreign = tmp_path / "foreign" / name
        foreign.parent.mkdir(parents=True)
        foreign.write_text("keep me")
        with pytest.raises(PreparedError, match=r"notes\.txt, which eyas prepare did not write"):
            write(tmp_path / "foreign", row(1, 2))
        assert foreign.read_text() == "keep me"
        foreign.unlink()
        foreign.parent.rmdir()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    def nested() -> Iterator[PreparedRow]:
        yield row(1, 2)
        with pytest.raises(PreparedError, match="another eyas prepare is writing there"):
            write(tmp_path / "out", row(3, 4))
        yield row(5, 6)

    assert len(write_prepared(tmp_path / "out", nested(), tokenizer=TOKENIZER, target="t")) == 2


def test_damage_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, row(1, 2), row(3, 4))
    whole = (out / "prepared.json").read_text()

    for text in ("{", "[]", "{}", whole.replace('"format_version": 1', '"format_version": 2')):
        (out / "prepared.json").write_text(text)
        with pytest.raises(PreparedError, match=r"prepared\.json"):
            PreparedSamples.open(out)

    (out / "prepared.json").write_text(whole.replace('"num_samples": 2', '"num_samples": 3'))
    with pytest.raises(PreparedError, match="says 3 samples"):
        PreparedSamples.open(out)

    body = json.loads(whole)
    (out / "prepared.json").write_text(json.dumps({**body, "fingerprint": "0" * 32}))
    samples = PreparedSamples.open(out)
    with pytest.raises(PreparedError, match="not those that"):
        _ = samples.sample_ids

    (out / "prepared.json").write_text(whole)
    arrow = out / "data" / "data-00000.arrow"
    arrow.write_bytes(arrow.read_bytes()[:500])
    with pytest.raises(PreparedError, match="unreadable"):
        PreparedSamples.open(out)


def test_importing_and_reading_pull_in_no_heavy_library(tmp_path: Path) -> None:
    write(tmp_path / "out", row(1, 2))
    code = (
        "import sys; from eyas.capture.prepared import PreparedSamples\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"samples = PreparedSamples.open({str(tmp_path / 'out')!r}); samples.sample_ids, samples.lengths, samples[0]\n"
        "assert not (heavy - {'pyarrow'}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
