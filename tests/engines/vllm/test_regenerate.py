"""`eyas regenerate --engine vllm` against `--engine transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.regenerating import assert_greedy_answers_are_transformers
from tests.engines.world import World

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_greedy_answers_are_transformers_whatever_stops_it(worlds: Callable[[str], World], tmp_path: Path) -> None:
    target = worlds("llama").target
    assert_greedy_answers_are_transformers(target, tmp_path, ("--engine", "vllm"), ("--enforce-eager",), {})
