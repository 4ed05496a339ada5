"""Tests that run vLLM: `make test-engines`, or `pytest -m engines tests/engines` where vLLM is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.world import World, make_world


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = None
    if "engines" not in config.getoption("markexpr"):
        reason = "needs vLLM: run with -m engines"
    elif find_spec("vllm") is None:
        reason = "vLLM is not installed here"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """A target by name, with prepared samples and what transformers captures of them; made once."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    os.environ["HF_HUB_OFFLINE"] = "1"  # every target here is a folder: nothing may be looked up
    root = tmp_path_factory.mktemp("worlds")
    made: dict[str, World] = {}

    def get(name: str) -> World:
        if name not in made:
            made[name] = make_world(root / name, name)
        return made[name]

    return get
