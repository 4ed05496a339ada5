from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.align.states import World, build_target, make_world


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, World]]:
    """A family's target folder and its world in a dtype, made once for all tests."""
    root = tmp_path_factory.mktemp("targets")
    made: dict[tuple[str, str], tuple[Path, World]] = {}

    def get(family: str, dtype: str) -> tuple[Path, World]:
        if (family, dtype) not in made:
            target = root / family
            if not target.exists():
                build_target(target, family)
            made[family, dtype] = target, make_world(target, dtype)
        return made[family, dtype]

    return get
