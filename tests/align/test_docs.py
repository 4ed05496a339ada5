"""docs/alignment.md: its tables are those of the code, its verdicts what the tool says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate_alignment.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
