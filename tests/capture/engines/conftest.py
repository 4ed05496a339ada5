from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.capture.engines.families import build_target


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny target of a family, made once."""
    root = tmp_path_factory.mktemp("targets")
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = build_target(root / family, family)
        return made[family]

    return get
