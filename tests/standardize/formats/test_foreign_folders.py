"""Folders of torch files by other trainers: told apart, and what is no sample rejected by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.standardize.formats.base import ForeignFileError

from .exchange import FORMATS, detect, open_reader

T, A, H = 6, 2, 4


def contents(name: str) -> dict[str, Any]:
    """One sample as each trainer keeps it, written by hand from its source."""
    ids, mask = torch.arange(5, 5 + T), torch.tensor([0, 0, 1, 1, 0, 1])
    aux, last = torch.randn(T, A * H).bfloat16(), torch.randn(T, H).bfloat16()
    return {
        "specforge": {"input_ids": ids, "loss_mask": mask, "aux_hidden_state": aux[None], "hidden_state": last[None]},
        "modelopt": {"input_ids": ids, "loss_mask": mask, "aux_hidden_states": aux, "hidden_states": last},
        "eagle": {"input_ids": ids, "loss_mask": mask, "hidden_state": last},
        "torchspec": {"input_ids": ids, "loss_mask": mask, "aux_hidden_states": aux, "hidden_states": last},
    }[name]


def states_key(name: str) -> str:
    return "hidden_states" if name in ("modelopt", "torchspec") else "hidden_state"


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    """Twelve files; data_2 stands before data_10."""
    suffix = "pt" if name == "modelopt" else "ckpt"
    (tmp_path / "rows").mkdir()
    for n in range(12):
        torch.save({**contents(name), "conversation_id": f"c{n}"}, tmp_path / "rows" / f"data_{n}.{suffix}")
    return tmp_path


def test_each_folder_is_in_one_format(folder: Path, name: str) -> None:
    found = {known: detect(folder, known) for known in FORMATS}
    assert [known for known, layout in found.items() if layout is not None] == [name]
    layout = found[name]
    assert layout is not None
    assert (layout.num_files, layout.hidden_size, layout.dtype, layout.has_loss_mask) == (12, H, "bfloat16", True)
    assert layout.num_taps == (1 if name == "eagle" else A)
    reader = open_reader(folder, name)
    assert [Path(item).stem for item in reader.items()] == [f"data_{n}" for n in range(12)]
    sample = reader.read(reader.items()[3])
    assert sample.input_ids.tolist() == list(range(5, 5 + T))
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]


def test_empty_and_other_folders_are_in_none(tmp_path: Path) -> None:
    assert not any(detect(tmp_path, name) for name in FORMATS)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save(torch.zeros(()), tmp_path / "scalar.ckpt")
    (tmp_path / "notes.ckpt").write_text("not one")
    assert not any(detect(tmp_path, name) for name in FORMATS)


def test_a_layout_that_speculators_owns_is_not_taken_for_eagles(tmp_path: Path) -> None:
    torch.save({**contents("eagle"), "target": torch.zeros(T, H)}, tmp_path / "0.pt")
    assert detect(tmp_path, "eagle") is None


def _cut(path: Path, name: str) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _pickle(path: Path, name: str) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(path.parent / "was run"),)

    torch.save({**contents(name), "more": Runs()}, path)


def _with(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path, str], None]:
    def damage(path: Path, name: str) -> None:
        tensors = contents(name)
        change(tensors, name)
        torch.save(tensors, path)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path, str], object], str]] = {
    "truncated": (_cut, "truncated or damaged"),
    "empty": (lambda path, name: path.write_bytes(b""), "truncated|no torch file"),
    "text": (lambda path, name: path.write_text("no torch file at all"), "truncated|no torch file"),
    "pointer": (lambda path, name: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "code in a pickle": (_pickle, "Python objects beside tensors"),
    "a list": (lambda path, name: torch.save([contents(name)], path), "a list of 1; expected a dict"),
    "no ids": (_with(lambda tensors, name: tensors.pop("input_ids")), "no input_ids is there"),
    "no states": (_with(lambda tensors, name: tensors.pop(states_key(name))), "no hidden_states? is there"),
    "states as a list": (_with(lambda t, name: t.update({states_key(name): [t[states_key(name)]]})), "a list of 1"),
    "more ids": (_with(lambda t, name: t.update(input_ids=torch.arange(T + 1))), f"for {T + 1} input_ids|{T + 1}, "),
    "no tokens": (_with(lambda t, name: t.update(input_ids=torch.arange(0))), "T at least 1"),
    "float ids": (_with(lambda t, name: t.update(input_ids=t["input_ids"].float())), "expected integers"),
    "negative id": (_with(lambda t, name: t["input_ids"].mul_(-1)), "expected token ids"),
    "shorter mask": (_with(lambda t, name: t.update(loss_mask=torch.ones(T - 1))), f"for {T} input_ids"),
    "weights in the mask": (_with(lambda t, name: t["loss_mask"].add_(1)), "other values than 0 and 1"),
    "other width": (_with(lambda t, name: t.update({states_key(name): torch.ones(T, H + 1).bfloat16()})), "expected"),
    "other dtype": (
        _with(lambda t, name: t.update({states_key(name): t[states_key(name)].float()})),
        "float32 .*; exp",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_sample_is_rejected_by_name(folder: Path, name: str, damage: str) -> None:
    reader = open_reader(folder, name)
    item = reader.items()[5]
    damaged, message = DAMAGES[damage]
    damaged(folder / item, name)
    with pytest.raises(ForeignFileError, match=message) as raised:
        reader.read(item)
    assert raised.value.where == item
    assert str(raised.value).startswith(f"{item}: ")
    assert not (folder / "rows" / "was run").exists()
    assert len([reader.read(other) for other in reader.items() if other != item]) == 11


def test_a_look_tells_of_damage_and_goes_past_it(folder: Path, name: str) -> None:
    first = open_reader(folder, name).items()[0]
    _cut(folder / first, name)
    layout = detect(folder, name)
    assert layout is not None
    assert any(problem.startswith(first) and "truncated" in problem for problem in layout.problems)
