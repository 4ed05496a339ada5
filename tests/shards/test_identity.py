"""dataset.json: round trip, every difference shown, one creator among many."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.atomic import publish_new
from eyas.shards.identity import (
    DatasetIdentity,
    IdentityError,
    content_hash,
    create_or_match,
    identity_differences,
    read_identity,
)
from eyas.taps.notation import FINAL, after


def test_it_round_trips(tmp_path: Path, tiny: type[Any]) -> None:
    for change in ({}, {"last_hidden": None}, {"last_hidden": FINAL}, {"dtype": "float32"}, {"stage": "standard"}):
        identity = tiny.identity(**change)
        assert DatasetIdentity.from_json(json.loads(json.dumps(identity.to_json()))) == identity
    create_or_match(tmp_path, identity)
    assert read_identity(tmp_path) == identity
    create_or_match(tmp_path, identity)


CHANGES: dict[str, Any] = {
    "stage": "standard",
    "taps": (after(1), after(3)),
    "last_hidden": FINAL,
    "dtype": "float16",
    "codec": "zstd",
    "target_statistics": False,
    "target.revision": "main",
    "target.config_hash": "c1",
    "target.model_class": "Qwen3ForCausalLM",
    "target.final_norm_eps": 1e-6,
    "tokenizer.chat_template_hash": "t1",
    "prepared.num_samples": 13,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_is_refused_and_shown(tmp_path: Path, tiny: type[Any], field: str) -> None:
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    before = (tmp_path / "dataset.json").read_bytes()
    part, _, name = field.partition(".")
    value = replace(getattr(identity, part), **{name: CHANGES[field]}) if name else CHANGES[field]
    with pytest.raises(IdentityError, match=rf"{field} is .* there and .* here.*dataset\.json"):
        create_or_match(tmp_path, replace(identity, **{part: value}))
    assert (tmp_path / "dataset.json").read_bytes() == before


def test_the_targets_name_is_a_label(tmp_path: Path, tiny: type[Any]) -> None:
    identity = tiny.identity()
    create_or_match(tmp_path, identity)
    create_or_match(tmp_path, replace(identity, target=replace(identity.target, name="/another/path")))
    assert read_identity(tmp_path).target.name == "tiny"


@given(first=st.integers(0, 7), second=st.integers(0, 7))
def test_differences_are_symmetric_and_empty_only_between_equals(tiny: type[Any], first: int, second: int) -> None:
    a, b = (tiny.identity(taps=(after(layer),)) for layer in (first, second))
    assert bool(identity_differences(a, b)) == (first != second)
    assert [(n, y, x) for n, x, y in identity_differences(a, b)] == identity_differences(b, a)


def test_content_hash_ignores_what_does_not_touch_a_shards_bytes(tiny: type[Any]) -> None:
    identity = tiny.identity()
    same = [
        replace(identity, stage="standard"),
        replace(identity, prepared=replace(identity.prepared, num_samples=1)),
        replace(identity, target=replace(identity.target, name="else")),
    ]
    assert {content_hash(other) for other in same} == {content_hash(identity)}
    others = [replace(identity, target=replace(identity.target, config_hash="c1")), replace(identity, taps=(after(1),))]
    assert len({content_hash(other) for other in [identity, *others]}) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "unreadable"),
        (b"{", "unreadable"),
        (b"\xff", "unreadable"),
        (b"[]", "JSON object"),
        (b"{}", "no eyas dataset"),
        (b'{"format": "eyas", "format_version": 99}', "format version 99"),
        (b'{"format": "eyas", "format_version": 1}', "missing"),
    ],
)
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    with pytest.raises(IdentityError, match=rf"dataset\.json: .*{said}"):
        read_identity(tmp_path)


def test_a_folder_without_one_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"no dataset\.json"):
        read_identity(tmp_path)


def test_every_field_of_the_target_is_required(tmp_path: Path, tiny: type[Any]) -> None:
    body = tiny.identity().to_json()
    for field in fields(tiny.identity().target):
        damaged = json.loads(json.dumps(body))
        del damaged["target"][field.name]
        with pytest.raises(IdentityError, match=field.name):
            DatasetIdentity.from_json(damaged)


RACE = """
import json, sys
from pathlib import Path
from eyas.shards.identity import DatasetIdentity, IdentityError, create_or_match
identity = DatasetIdentity.from_json(json.loads(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
try:
    create_or_match(Path(sys.argv[1]), identity)
    print("mine", flush=True)
except IdentityError:
    print("refused", flush=True)
"""


def test_of_many_that_create_at_once_one_wins_and_those_that_agree_go_on(tmp_path: Path, tiny: type[Any]) -> None:
    """Four processes, two identities: all of one identity go on, all of the other are refused."""
    bodies = [json.dumps(tiny.identity(taps=(after(layer),)).to_json()) for layer in (0, 1)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path / "data"), bodies[n % 2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    answers = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        answers.append(racer.communicate()[0].strip())
    assert sorted([answers[0], answers[1]]) == ["mine", "refused"]
    assert answers[:2] == answers[2:]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["dataset.json"]


def test_publish_new_never_replaces(tmp_path: Path) -> None:
    assert publish_new(tmp_path / "a", b"first")
    assert not publish_new(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
