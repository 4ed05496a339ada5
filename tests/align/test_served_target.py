"""A replay that has a target's taps and nothing else, as from a serving engine: the verdicts are those of the replay in
transformers, as far as taps go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.align.forward import Replayed, ReplayTarget
from eyas.align.replay import replay_report
from eyas.align.stored import DatasetSource
from eyas.align.verdict import Report
from eyas.shards.dataset import Dataset
from eyas.taps.notation import EMBED, FINAL, after
from tests.align.states import LAYERS, Edit, World, build_target, make_world, store
from tests.align.test_replay_defects import on_all, put_taps, rolled, set_rows, swap_two_samples, without_first

TAPS = (after(0), after(2), after(4))
LAST = after(LAYERS - 1)


class OnlyTaps(Replayed):
    """In place of an engine. The replay's float32 differs from the bfloat16 that was stored as engines do."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._inner = ReplayTarget(str(target), device="cpu")
        self.name, self.outline = self._inner.name, self._inner.outline

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        return self._inner.run(ids)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    target = build_target(tmp_path_factory.mktemp("target") / "target", request.param)
    return target, make_world(target, "bfloat16")


def verdict(folder: Path, family: tuple[Path, World], edit: Edit | None) -> Report:
    target, world = family
    dataset = store(folder, world, TAPS, last_hidden=LAST, edit=edit)
    return Report(tuple(replay_report(DatasetSource(Dataset.open(dataset)), OnlyTaps(target))))


def test_good_states_give_no_alarm(tmp_path: Path, family: tuple[Path, World]) -> None:
    report = verdict(tmp_path / "d", family, None)
    assert report.exit_status(strict=True) == 0, report.text()
    assert {finding.check for finding in report.findings} == {
        "replay slot 0", "replay slot 1", "replay slot 2", "replay last_hidden", "replay weights",
    }  # fmt: skip


CASES: dict[str, tuple[Any, str]] = {
    "one layer late": (put_taps(after(1), after(3), LAST), "off by one, one layer late: after:1,after:3,after:5"),
    "embedding": (put_taps(EMBED, after(1), after(3)), "embedding where a layer was meant, off by one"),
    "order": (put_taps(after(2), after(0), after(4)), "swapped order"),
    "post-norm": (lambda world, n, stored: stored.update(last_hidden=world.states(n)[FINAL].clone()),
                  "pre-norm and post-norm mixed up"),
    "rows": (on_all(rolled(-1)), "shifted rows"),
    "prefix": (on_all(without_first(8)), "prefix missing"),
    "samples": (swap_two_samples, "rows of another sample"),
    "scale": (on_all(lambda world, n, rows: rows * 3), "scaled"),
    "not finite": (on_all(set_rows(slice(3, 5), float("nan"))), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, family: tuple[Path, World], name: str) -> None:
    edit, words = CASES[name]
    report = verdict(tmp_path / "d", family, edit)
    assert report.exit_status() == 3, report.text()
    assert words in report.text()
