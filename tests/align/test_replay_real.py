"""A real target in bfloat16: every pair of adjacent taps told apart, and how small a change of weights is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.align.forward import ReplayTarget
from eyas.capture.engines.transformers.load import hash_weights
from eyas.taps.match import match_taps
from eyas.taps.notation import EMBED, FINAL, after, all_taps
from tests.align.states import World, replay, store
from tests.align.test_replay_defects import (
    fp8_weights,
    int8_weights,
    mlp_output,
    next_norm,
    on_slot,
    partial_mlp,
    put_taps,
    rolled,
    without_first,
)

TARGET = Path(os.environ.get("EYAS_TARGET") or Path(__file__).parents[2] / "demo" / "target")
PROMPTS = (
    "Gravity is the force by which a planet draws objects toward its center, and it keeps all of them in orbit "
    "around the sun. Newton described it in 1687, Einstein in 1915.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 3 May. We are sorry that your order arrived late, and we have "
    "refunded the shipping costs to your card.",
    "The recipe calls for two cups of flour, a pinch of salt and 250 ml of warm water. Mix well, let the dough rest "
    "for an hour before you bake it at 220 degrees.",
)

pytestmark = pytest.mark.skipif(not (TARGET / "config.json").exists(), reason="no real target (EYAS_TARGET, make demo)")


@pytest.fixture(scope="module")
def world() -> World:
    """Four short texts through transformers in bfloat16: stored states are the real kernels', not a model of noise."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    ids = [torch.tensor(tokenizer(prompt)["input_ids"][:48]) for prompt in PROMPTS]
    masks = [torch.ones(len(row), dtype=torch.uint8) for row in ids]
    return World(model, ids, masks, hash_weights(str(TARGET), None))


def test_every_tap_is_told_from_its_neighbours(world: World, tmp_path: Path) -> None:
    taps = all_taps(world.num_layers)
    report = replay(store(tmp_path / "good", world, taps, last_hidden=FINAL), TARGET)
    assert {finding.status for finding in report.findings} == {"ok"}, report.text()

    def shifted(world: World, n: int, stored: dict[str, Any]) -> None:
        for k, tap in enumerate(taps[:-2]):
            stored[f"slot {k}"] = world.states(n)[tap]

    declared = taps[1:-1]
    report = replay(store(tmp_path / "late", world, declared, edit=shifted), TARGET)
    wrong = [finding for finding in report.findings if finding.status == "mismatch"]
    assert len(wrong) == 1, report.text()
    assert wrong[0].found.startswith("embedding where a layer was meant, off by one")
    assert f"slots {', '.join(map(str, range(len(declared))))}" in wrong[0].check


def test_margins(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    target = ReplayTarget(str(TARGET), device="cpu")
    lines, smallest = [], 1.0
    margins = {tap: [] for tap in target.all_taps}
    for n, ids in enumerate(world.samples):
        stack = target.taps(ids)
        for tap, rows in world.states(n).items():
            match = match_taps(rows, stack, target.all_taps)
            assert match.best == tap
            margins[tap].append((match.margin, match.best_error, match.runner_up, match.runner_up_error))
    for tap, values in margins.items():
        margin, error, runner_up, runner_up_error = min(values)
        smallest = min(smallest, margin)
        lines.append(f"{tap!s:9} {error:6.2%} away, {runner_up!s:9} {runner_up_error:6.1%}, margin {margin:.3f}")
    every = torch.tensor([margin for values in margins.values() for margin, *_ in values])
    quantiles = torch.quantile(every, torch.tensor([0.0, 0.05, 0.5, 0.95])).tolist()
    with capsys.disabled():
        print("\nworst sample of each tap, stored bfloat16 against the replay:\n" + "\n".join(lines))
        print("margins: min {:.3f}, 5 % {:.3f}, median {:.3f}, 95 % {:.3f}".format(*quantiles))
    assert smallest > 0.5


def changed(model_change: Callable[[Any], None]) -> Any:
    runs: dict[int, Any] = {}

    def edit(world: World, n: int, stored: dict[str, Any]) -> None:
        if n not in runs:
            runs[n] = world.run_changed(n, model_change)
        for k, tap in enumerate(TAPS):
            stored[f"slot {k}"] = runs[n][tap]

    return edit


TAPS = (after(1), after(14), after(26))


def noisy_weights(size: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.model.layers.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter.float() + size * parameter.float().std() * noise)

    return change


@pytest.mark.parametrize(
    ("change", "statuses"),
    [
        (noisy_weights(1e-3), {"unknown"}),
        (noisy_weights(1e-2), {"unknown"}),
        (noisy_weights(0.05), {"mismatch"}),
        (fp8_weights, {"mismatch"}),
        (int8_weights, {"mismatch"}),
    ],
    ids=["0.1 % other weights", "1 % other weights", "5 % other weights", "fp8 weights", "int8 weights"],
)
def test_detection_floor(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    change: Callable[[Any], None],
    statuses: set[str],
) -> None:
    """Below the floor nothing is accused; what is known in kind (quantization) is named below the size of rounding."""
    report = replay(
        store(tmp_path / "d", world, TAPS, edit=changed(change), statistics=False, says_weights=False), TARGET
    )
    with capsys.disabled():
        print(f"\n{request.node.callspec.id}:\n{report.text()}")
    assert {finding.status for finding in report.findings} <= statuses | {"ok"}
    assert {finding.status for finding in report.findings} & statuses
    if change in (fp8_weights, int8_weights):
        name = "fp8" if change is fp8_weights else "int8"
        assert any(f"quantized target: {name} weights, one scale per channel" in f.found for f in report.findings)


REAL_DEFECTS: dict[str, tuple[Any, str, str]] = {
    "tensor parallel half": (
        on_slot("slot 1", partial_mlp(14, 1, 2)),
        "partial sum: after:14 with only rank 1",
        "slot 1",
    ),
    "tensor parallel eighth": (on_slot("slot 2", partial_mlp(26, 3, 8)), "partial sum: after:26 with only", "slot 2"),
    "no residual": (on_slot("slot 1", mlp_output(14)), "part of a layer", "slot 1"),
    "normed": (on_slot("slot 2", next_norm(26)), "normed", "slot 2"),
    "row late": (on_slot("slot 0", rolled(1)), "shifted rows: row t holds token t-1", "slot 0"),
    "prefix cut": (on_slot("slot 2", without_first(12)), "prefix missing: the first 12 rows", "slot 2"),
    "swapped": (put_taps(after(14), after(1), after(26)), "swapped order", "slots 0, 1"),
}


@pytest.mark.parametrize("name", REAL_DEFECTS)
def test_defect_is_named(world: World, tmp_path: Path, name: str) -> None:
    edit, words, check = REAL_DEFECTS[name]
    report = replay(store(tmp_path / "d", world, TAPS, edit=edit, statistics=False), TARGET)
    wrong = [finding for finding in report.findings if finding.status != "ok"]
    assert [finding.check for finding in wrong] == [f"replay {check}"], report.text()
    assert words in wrong[0].found


def test_embedding_is_exact(world: World, tmp_path: Path) -> None:
    report = replay(store(tmp_path / "d", world, (EMBED, after(14)), statistics=False), TARGET)
    assert report.findings[0].found.startswith("embed: 0.00% away")
