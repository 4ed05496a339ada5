"""`eyas check --identify`: what is in these files?"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from eyas.cli.main import main
from eyas.taps.notation import EMBED, FINAL, after
from tests.align.states import World, build_target, make_world, store

TAPS = (after(0), after(2), after(4))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    target = build_target(tmp_path_factory.mktemp("target") / "t", "LlamaForCausalLM")
    return target, make_world(target, "bfloat16", lengths=(30, 41, 36))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def findings(result: Result) -> dict[str, str]:
    """Found, by check."""
    return {
        finding["check"].removeprefix("replay "): finding["found"] for finding in json.loads(result.stdout)["findings"]
    }


def as_safetensors(folder: Path, n: int, ids: Any, states: dict[Any, Any]) -> None:
    features = torch.cat([states[tap] for tap in TAPS], 1)
    save_file(
        {"hidden_state": features, "input_ids": ids, "loss_mask": torch.ones_like(ids)}, folder / f"{n}.safetensors"
    )


def as_torch_list(folder: Path, n: int, ids: Any, states: dict[Any, Any]) -> None:
    torch.save({"input_ids": ids[None], "hidden_states": [states[tap] for tap in TAPS]}, folder / f"data_{n}.pt")


def as_torch_batch(folder: Path, n: int, ids: Any, states: dict[Any, Any]) -> None:
    hidden = torch.cat([states[tap] for tap in TAPS], 1)[None]  # [1, T, n*H]
    torch.save({"tokens": ids[None], "aux": hidden, "target": states[FINAL][None]}, folder / f"{n}.ckpt")


def as_numpy(folder: Path, n: int, ids: Any, states: dict[Any, Any]) -> None:
    np.save(folder / f"{n:03}_tokens.npy", ids.numpy())
    np.save(folder / f"{n:03}_states.npy", torch.stack([states[tap] for tap in TAPS], 1).float().numpy())  # [T, n, H]


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (as_safetensors, ["hidden_state[0]", "hidden_state[1]", "hidden_state[2]"]),
        (as_torch_list, ["hidden_states.0", "hidden_states.1", "hidden_states.2"]),
        (as_torch_batch, ["aux[0]", "aux[1]", "aux[2]", "target"]),
        (as_numpy, None),
    ],
)
def test_files_without_metadata(
    made: tuple[Path, World], tmp_path: Path, write: Callable[..., None], names: list[str] | None
) -> None:
    target, world = made
    for n, ids in enumerate(world.samples):
        write(tmp_path, n, ids, world.states(n))
    result = run("--identify", tmp_path, "--target", target, "--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert [text.split(":")[0] + ":" + text.split(":")[1] for text in list(found.values())[:3]] == [
        "after:0",
        "after:2",
        "after:4",
    ]
    if names is not None:
        assert list(found)[: len(names)] == names
    if names and "target" in names:
        assert found["target"].startswith("final: ")


def test_lost_rows_of_foreign_files(made: tuple[Path, World], tmp_path: Path) -> None:
    """A prefix cache skipped the first 16 tokens: fewer rows than ids."""
    target, world = made
    for n, ids in enumerate(world.samples):
        features = torch.cat([world.states(n)[tap] for tap in (EMBED, after(3))], 1)
        save_file({"states": features[16:].contiguous(), "ids": ids}, tmp_path / f"{n}.safetensors")
    result = run("--identify", tmp_path, "--target", target)
    assert result.exit_code == 3, result.output
    assert "prefix missing: the first 16 rows are missing" in result.output


def test_a_dataset_is_identified_too(made: tuple[Path, World], tmp_path: Path) -> None:
    target, world = made
    dataset = store(tmp_path / "d", world, TAPS)
    assert list(findings(run("--identify", dataset, "--target", target, "--json")))[:3] == [
        "slot 0",
        "slot 1",
        "slot 2",
    ]


def test_nothing_is_unpickled(made: tuple[Path, World], tmp_path: Path) -> None:
    target, _ = made

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    with open(tmp_path / "0.pt", "wb") as file:
        pickle.dump({"input_ids": [1, 2, 3], "states": Trap()}, file)
    np.save(tmp_path / "1.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    result = run("--identify", tmp_path, "--target", target)
    assert result.exit_code == 1
    assert not (tmp_path / "sprung").exists()


def test_folder_without_states(made: tuple[Path, World], tmp_path: Path) -> None:
    target, _ = made
    result = run("--identify", tmp_path, "--target", target)
    assert result.exit_code == 1
    assert "no files of states" in result.output
    save_file({"input_ids": torch.arange(9), "states": torch.zeros(9, 100)}, tmp_path / "0.safetensors")
    result = run("--identify", tmp_path, "--target", target)
    assert result.exit_code == 1
    assert "states of width 64 (or a multiple)" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--identify", "{dataset}"], "give --target"),
        (["{dataset}", "--identify", "{dataset}", "--target", "{target}"], "give --target alone"),
        (["{dataset}", "--replay", "4"], "give --target"),
        (["--target", "{target}"], "give DATASET"),
    ],
)
def test_wrong_usage(made: tuple[Path, World], tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run(*(argument.format(dataset=tmp_path, target=made[0]) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_replay_is_the_default_with_a_target(made: tuple[Path, World], tmp_path: Path) -> None:
    target, world = made

    def late(world: World, n: int, stored: dict[str, Any]) -> None:
        for k, tap in enumerate(TAPS):
            stored[f"slot {k}"] = world.states(n)[after(tap.layer + 1)]

    dataset = store(tmp_path / "d", world, TAPS, edit=late)
    result = run(dataset, "--target", target)
    assert result.exit_code == 3, result.output
    assert "off by one, one layer late: after:1,after:3,after:5" in result.output
    assert "off by one" not in run(dataset, "--target", target, "--replay", 0).output
