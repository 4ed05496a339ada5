"""`eyas regenerate --engine sglang` against `--engine transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.regenerating import assert_greedy_answers_are_transformers
from tests.engines.world import World

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

ON_CPU = (
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--max-total-tokens", 2048,
    "--mem-fraction-static", 0.2,
)  # fmt: skip


def test_greedy_answers_are_transformers_whatever_stops_it(worlds: Callable[[str], World], tmp_path: Path) -> None:
    target = worlds("llama").target
    engine = ("--engine", "sglang", "--device", "cpu")
    tp2 = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    assert_greedy_answers_are_transformers(target, tmp_path, engine, ON_CPU, tp2)
