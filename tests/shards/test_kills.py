"""SIGKILL at every system call of a capture, and again during the recovery: nothing lost, doubled or wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_kill_at_any_call_loses_nothing_sealed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_points.py")
    process = subprocess.run([sys.executable, script, tmp_path, "raw"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["faults"] == []
    assert result["kills"] > 80, result
    for call in ("open", "write", "torn write", "fsync", "rename", "replace", "unlink"):
        assert result["by_call"].get(call, 0) > 0, f"no kill at {call}: {result}"
