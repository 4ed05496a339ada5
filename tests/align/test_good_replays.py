"""Good datasets of many shapes raise nothing in `eyas check`: neither the static part nor the replay.

States are the target's own, by transformers alone, in float32 or bfloat16; of two tensor-parallel ranks, as capture
computes them: each rank's part of every row-parallel projection in the activation dtype, then their sum. Two datasets
come from a real capture. All in all 54 datasets on 18 targets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.taps.notation import EMBED, FINAL, Tap, after, format_taps
from tests.align.corruption.matrix import capture_good, check
from tests.align.states import FAMILIES, World, build_target, make_world, replay, store

SHAPES = {"narrow": (32, 5), "wide": (128, 4), "deep": (48, 9)}  # hidden size, layers
KINDS = {"float32": 1, "bfloat16": 1, "bfloat16 tp 2": 2}  # dtype of the states -> ranks
LENGTHS = (24, 40, 33, 51)


@dataclass(frozen=True)
class Case:
    family: str
    shape: str
    kind: str
    fp8: bool
    taps: tuple[Tap, ...]
    last_hidden: Tap

    def __str__(self) -> str:
        weights = ", fp8 weights" if self.fp8 else ""
        return f"{self.family}, {self.shape}, {self.kind}{weights}, {format_taps(self.taps)}, {self.last_hidden}"


def cases() -> Iterator[Case]:
    for n, (family, shape, kind, fp8) in enumerate(product(FAMILIES, SHAPES, KINDS, (False, True))):
        num_layers = SHAPES[shape][1]
        last = after(num_layers - 1)
        taps = (
            (after(0), after(num_layers - 2)),
            (after(1), after(2), after(3)),
            (EMBED, after(0), after(2), last),
            (EMBED, after(0), after(1), after(2), FINAL),
        )[n % 4]
        yield Case(family, shape, kind, fp8, taps, FINAL if n % 3 == 0 and FINAL not in taps else last)


CASES = list(cases())


def round_to_fp8(target: Path) -> None:
    """A checkpoint whose projections hold fp8 numbers, as one that was dequantized does."""
    from safetensors.torch import load_file, save_file

    weights = load_file(target / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].abs().amax(-1, keepdim=True) / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn).float() * scale
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], Path]:
    root = tmp_path_factory.mktemp("targets")

    def get(family: str, shape: str, fp8: bool) -> Path:
        folder = root / f"{family}-{shape}-{fp8}"
        if not folder.exists():
            width, num_layers = SHAPES[shape]
            build_target(
                folder, family, seed=len(list(root.iterdir())), hidden_size=width, num_hidden_layers=num_layers,
                intermediate_size=2 * width,
            )  # fmt: skip
            if fp8:
                round_to_fp8(folder)
        return folder

    return get


@contextmanager
def two_ranks(model: Any) -> Iterator[None]:
    """Row-parallel projections as the sum of two ranks' parts, each rounded to the model's dtype."""
    hooks = []

    def summed(module: torch.nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        half = args[0].shape[-1] // 2
        weight = module.weight
        return args[0][..., half:] @ weight[:, half:].T + args[0][..., :half] @ weight[:, :half].T

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in ("o_proj", "down_proj"):
            hooks.append(module.register_forward_hook(summed))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_good_states_raise_nothing(targets: Callable[[str, str, bool], Path], tmp_path: Path, case: Case) -> None:
    target = targets(case.family, case.shape, case.fp8)
    world: World = make_world(target, case.kind.split()[0], LENGTHS, seed=CASES.index(case))
    if KINDS[case.kind] == 2:
        with two_ranks(world.model):
            for n in range(len(LENGTHS)):
                world.states(n)
    report = replay(store(tmp_path / "d", world, case.taps, last_hidden=case.last_hidden), target)
    assert {finding.status for finding in report.findings} == {"ok"}, report.text()
    assert len(report.findings) == len(case.taps) + 4
    assert report.exit_status(strict=True) == 0


def test_what_rounding_drowns_is_unknown(tmp_path: Path) -> None:
    """A random mixture of 61 layers in bfloat16: routers throw deep rows as far as the taps are apart."""
    target = build_target(tmp_path / "target", "DeepseekV3ForCausalLM", num_hidden_layers=61)
    world = make_world(target, "bfloat16", LENGTHS, seed=1)
    dataset = store(tmp_path / "d", world, (after(1), after(29), after(57)), last_hidden=after(60))
    report = replay(dataset, target)
    found = {finding.check: finding for finding in report.findings}
    assert found["replay slot 0"].status == "ok"
    assert found["replay slots 1, 2, last_hidden"].status == "unknown"
    assert "cannot be told" in found["replay slots 1, 2, last_hidden"].found
    assert report.exit_status() == 0


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3-moe", "bfloat16")])
def test_a_capture_raises_nothing(tmp_path: Path, family: str, dtype: str) -> None:
    good = capture_good(tmp_path, family, dtype=dtype, num_samples=5, taps="after:0,after:2,after:5", num_layers=6)
    outcome = check(tmp_path / "captured", good.target)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.text("mismatch", "warning", "unknown") == "", outcome.output
    assert json.loads(outcome.output)["counts"]["ok"] > 0
