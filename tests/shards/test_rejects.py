"""Rejects: told with their reason, torn lines passed over, superseded by a seal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.shards.ledger import read_ledgers
from eyas.shards.rejects import append_reject, read_rejects


def test_rejects_of_several_workers_and_the_last_reason(tmp_path: Path) -> None:
    assert read_rejects(tmp_path) == {}
    append_reject(tmp_path, "a-0", "0" * 16, "NaN in after:3")
    append_reject(tmp_path, "a-0", "1" * 16, "out of memory\nwith a second line, and \u00e9")
    append_reject(tmp_path, "b-0", "0" * 16, "Inf in after:3")
    assert read_rejects(tmp_path) == {
        "0" * 16: "Inf in after:3",
        "1" * 16: "out of memory\nwith a second line, and \u00e9",
    }


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    append_reject(tmp_path, "a-0", "0" * 16, "first")
    path = tmp_path / "rejects/a-0.jsonl"
    for torn in (b'{"sample_id": "1111', b"\0\0\0", b"\xff\n", b"7\n", b'{"sample_id": "2"}'):
        path.write_bytes(path.read_bytes() + torn)
        assert read_rejects(tmp_path) == {"0" * 16: "first"}
    append_reject(tmp_path, "a-0", "3" * 16, "last")
    assert read_rejects(tmp_path) == {"0" * 16: "first", "3" * 16: "last"}


def test_a_later_seal_supersedes(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    sealed, other = tiny.samples(identity, 2)
    for sample in (sealed, other):
        append_reject(tmp_path, "a-0", sample.sample_id, "out of memory")
    tiny.write(tmp_path, identity, [sealed])
    assert read_rejects(tmp_path) == {other.sample_id: "out of memory"}
    assert read_rejects(tmp_path, read_ledgers(tmp_path)) == {other.sample_id: "out of memory"}
