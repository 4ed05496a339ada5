"""`eyas check --engine-live vllm` and its replay in vLLM: what vLLM itself does, against datasets of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.world import LIVE_TAPS, World, checked, write_draft

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

Worlds = Callable[[str], World]
OFF_BY_ONE = Path(__file__).with_name("off_by_one.py")


@pytest.mark.parametrize(("name", "num_replayed"), [("llama", 2), ("qwen3_moe", 0)])
def test_what_vllm_feeds_and_computes_is_what_was_captured(
    worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path, name: str, num_replayed: int
) -> None:
    world, dataset = worlds(name), datasets(name)
    draft = write_draft(dataset, tmp_path / "draft", "vllm", world.target)
    options = ("--draft", draft, "--engine", "vllm", "--engine-live", "vllm", "--replay", num_replayed)
    status, findings = checked(world, dataset, *options)
    assert status == 0
    told = {finding["check"]: finding for finding in findings}
    for n, tap in enumerate(LIVE_TAPS[name].split(",")):
        assert told[f"live slot {n}"]["status"] == "ok"
        assert f"feeds {tap}: 0.00% away" in told[f"live slot {n}"]["found"]
        assert not num_replayed or told[f"replay slot {n}"]["found"].startswith(f"{tap}: 0.00% away")
    assert "before the final norm: 0.00% away" in told["live last_hidden"]["found"]
    assert "model runner V1" in told["live engine"]["found"]
    assert "no weights: random ones were loaded" in told["live engine"]["found"]
    assert not num_replayed or told["replay"]["found"].startswith("ran in vllm ")


def test_another_systems_layer_ids_are_caught(worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path) -> None:
    """A config for SGLang in vLLM 0.32.0: read from the nested key and not one later."""
    world, dataset = worlds("llama"), datasets("llama")
    draft = write_draft(dataset, tmp_path / "draft", "sglang@0.5.23", world.target)
    status, findings = checked(world, dataset, "--draft", draft, "--engine-live", "vllm", "--replay", 0)
    assert status == 3
    (wrong,) = [finding for finding in findings if finding["status"] == "mismatch"]
    assert wrong["check"] == "live slots 0, 1, 2"
    for n, (fed, stored) in enumerate([("after:0", "after:1"), ("after:1", "after:2"), ("after:4", "after:5")]):
        assert f"{fed} into slot {n}" in wrong["found"]
        assert f"which is {stored} (0.00% away)" in wrong["found"]
    assert '"eagle_aux_hidden_state_layer_ids": [2, 3, 6]' in wrong["mend"]


def test_a_vllm_that_is_off_by_one_is_caught(worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path) -> None:
    world, dataset = worlds("llama"), datasets("llama")
    draft = write_draft(dataset, tmp_path / "draft", "vllm", world.target)
    options = ("--draft", draft, "--engine-live", "vllm", "--replay", 0)
    status, findings = checked(world, dataset, *options, script=(OFF_BY_ONE, "aux"))
    assert status == 3
    (wrong,) = [finding for finding in findings if finding["status"] == "mismatch"]
    assert "after:2 into slot 0" in wrong["found"]
    assert "the draft's config is right" in wrong["mend"]
