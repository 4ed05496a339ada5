"""Single rows that are no state of their token are found in a good sample, and outlier tokens are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.align.verdict import Finding
from eyas.taps.notation import after
from tests.align.states import LAYERS, Edit, World, build_target, make_world, replay, store

TAPS = (after(0), after(2), after(4))
LAST = after(LAYERS - 1)
DENSE = ("LlamaForCausalLM", "bfloat16")
MIXTURES = (("Qwen3MoeForCausalLM", "bfloat16"), ("DeepseekV3ForCausalLM", "bfloat16"))


def on_rows(
    change: Callable[[Tensor, torch.Generator], Tensor], where: dict[int, Sequence[int]], slot: str = "slot 1"
) -> Edit:
    """``change(row, generator)`` for the given rows of the given samples."""

    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        rows = stored[slot].clone()
        generator = torch.Generator().manual_seed(n)
        for t in where.get(n, ()):
            rows[t] = change(rows[t].float(), generator).to(rows.dtype)
        stored[slot] = rows

    return edit


def noise(row: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(row.shape, generator=generator) * row.std()


def half(row: Tensor, generator: torch.Generator) -> Tensor:
    """A part of the row was overwritten."""
    return torch.cat([row[:32], noise(row[32:], generator)])


def larger(row: Tensor, generator: torch.Generator) -> Tensor:
    return row * 1.3


def damaged(findings: Sequence[Finding]) -> list[Finding]:
    wrong = [finding for finding in findings if finding.status != "ok"]
    assert all(finding.found.startswith("damaged rows: ") for finding in wrong), wrong
    return wrong


@pytest.mark.parametrize("change", [noise, half, larger])
@pytest.mark.parametrize(("family", "dtype"), [DENSE, ("LlamaForCausalLM", "float32"), *MIXTURES])
def test_damaged_rows_are_named(
    worlds: Callable[[str, str], tuple[Path, World]],
    tmp_path: Path,
    family: str,
    dtype: str,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    target, world = worlds(family, dtype)
    dataset = store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=on_rows(change, {3: [17], 5: [20, 30]}))
    report = replay(dataset, target)
    (found,) = damaged(report.findings)
    assert (found.check, found.status) == ("replay slot 1", "mismatch"), report.text()
    assert "row 17 of 56 of sample " in found.found
    assert "rows 20, 30 of 44 of sample " in found.found
    assert "in 2 of 8 samples" in found.found


@pytest.mark.parametrize("row", [0, 1, 47])
def test_the_first_and_the_last_row_too(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path, row: int
) -> None:
    target, world = worlds(*DENSE)
    edit = on_rows(noise, {1: [row]}, "last_hidden")
    (found,) = damaged(replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST, edit=edit), target).findings)
    assert found.check == "replay last_hidden"
    assert f"row {row} of 48 of sample " in found.found


def test_a_row_of_another_sample_is_named_as_such(
    worlds: Callable[[str, str], tuple[Path, World]], tmp_path: Path
) -> None:
    target, world = worlds(*DENSE)

    def edit(world: World, n: int, stored: dict[str, Tensor]) -> None:
        if n == 2:
            stored["slot 1"][9] = world.states(6)[after(2)][11]

    report = replay(store(tmp_path / "d", world, TAPS, edit=edit), target)
    (wrong,) = [finding for finding in report.findings if finding.status != "ok"]
    assert wrong.found.startswith("rows of another sample: row 9 of 33 are those of sample "), report.text()


def test_massive_activations_are_no_damage(tmp_path: Path) -> None:
    """Tokens whose row is a few huge channels, taken back by the last layer: their rounding is far above the median."""
    target = build_target(tmp_path / "t", "LlamaForCausalLM")
    world = make_world(target, "float32")
    with torch.no_grad():
        for token in (7, 11):
            world.model.model.embed_tokens.weight[token, 3] = 400.0
        last = world.model.model.layers[LAYERS - 1].mlp
        last.down_proj.weight[3] *= 40
    world.model.save_pretrained(target)
    world = make_world(target, "bfloat16")
    for ids in world.samples:
        ids[[4, 19]] = torch.tensor([7, 11])
    report = replay(store(tmp_path / "d", world, TAPS, last_hidden=LAST), target)
    assert {finding.status for finding in report.findings} == {"ok"}, report.text()
