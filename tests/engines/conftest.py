"""What the tests of all serving engines share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.world import LIVE_TAPS, World, capture


@pytest.fixture(scope="module")
def datasets(worlds: Callable[[str], World], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By a target's name what transformers captures of it at LIVE_TAPS; made once."""
    folder = tmp_path_factory.mktemp("datasets")

    def get(name: str) -> Path:
        if not (folder / name).exists():
            result = capture(worlds(name), folder / name, "--taps", LIVE_TAPS[name])
            assert result.returncode == 0, result.stderr
        return folder / name

    return get
