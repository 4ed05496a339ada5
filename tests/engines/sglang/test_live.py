"""`eyas check --engine-live sglang` and its replay in SGLang: what SGLang itself does, and transformers' datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.world import LIVE_TAPS, World, checked, write_draft

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

Worlds = Callable[[str], World]
FAULTY = Path(__file__).with_name("faulty.py")
ON_CPU = (
    "--", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--max-total-tokens", 2048, "--mem-fraction-static", 0.2,
)  # fmt: skip


@pytest.mark.parametrize(("name", "num_replayed"), [("llama", 2), ("qwen3_moe", 0)])
def test_what_sglang_feeds_and_computes_is_what_was_captured(
    worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path, name: str, num_replayed: int
) -> None:
    world, dataset = worlds(name), datasets(name)
    draft = write_draft(dataset, tmp_path / "draft", "sglang@0.5.23", world.target)
    options = ("--draft", draft, "--engine", "sglang", "--engine-live", "sglang", "--replay", num_replayed)
    status, findings = checked(world, dataset, *options, *ON_CPU)
    assert status == 0
    told = {finding["check"]: finding for finding in findings}
    for n, tap in enumerate(LIVE_TAPS[name].split(",")):
        assert told[f"live slot {n}"]["status"] == "ok"
        assert f"feeds {tap}: 0.00% away" in told[f"live slot {n}"]["found"]
        assert not num_replayed or told[f"replay slot {n}"]["found"].startswith(f"{tap}: 0.00% away")
    assert "before the final norm: 0.00% away" in told["live last_hidden"]["found"]
    assert "The draft itself did not run" in told["live engine"]["found"]
    assert not num_replayed or told["replay"]["found"].startswith("ran in sglang ")


def test_layer_ids_of_another_convention_are_caught(
    worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM's numbers at SGLang's place: SGLang adds one to them."""
    world, dataset = worlds("llama"), datasets("llama")
    draft = write_draft(dataset, tmp_path / "draft", "sglang@0.5.23", world.target)
    config = draft / "config.json"
    config.write_text(config.read_text().replace("1,\n      2,\n      5", "2, 3, 6"))
    assert "2, 3, 6" in config.read_text()
    status, findings = checked(world, dataset, "--draft", draft, "--engine-live", "sglang", "--replay", 0, *ON_CPU)
    assert status == 3
    (wrong,) = [finding for finding in findings if finding["status"] == "mismatch" and "live" in finding["check"]]
    assert wrong["check"] == "live slots 0, 1, 2"
    for n, (fed, stored) in enumerate([("after:2", "after:1"), ("after:3", "after:2"), ("after:6", "after:5")]):
        assert f"{fed} into slot {n}" in wrong["found"]
        assert f"which is {stored} (0.00% away)" in wrong["found"]
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 5]' in wrong["mend"]


def test_an_sglang_that_is_off_by_one_is_caught(
    worlds: Worlds, datasets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_TEST_FAULT", "aux")
    world, dataset = worlds("llama"), datasets("llama")
    draft = write_draft(dataset, tmp_path / "draft", "sglang@0.5.23", world.target)
    options = ("--draft", draft, "--engine-live", "sglang", "--replay", 0, *ON_CPU)
    status, findings = checked(world, dataset, *options, script=(FAULTY,))
    assert status == 3
    (wrong,) = [finding for finding in findings if finding["status"] == "mismatch"]
    assert "after:2 into slot 0" in wrong["found"]
    assert "the draft's config is right" in wrong["mend"]
