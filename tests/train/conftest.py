from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.tiny_run import make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target and standard dataset; runs in it need names of their own."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder
