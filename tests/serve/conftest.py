from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.serve.folder import ROOT, Folder, free_port

FAKE = Path(__file__).parent / "fake_engine.py"
MODULES = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the fake as vLLM 0.32.0 and SGLang 0.5.23, ahead of any real one."""
    site = tmp_path / "site"
    for (name, module), release in zip(MODULES.items(), ("0.32.0", "0.5.23"), strict=True):
        (site / module).parent.mkdir(parents=True)
        shutil.copy(FAKE, site / module)
        metadata = site / f"{name}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT / "typings")]))
    return site


@pytest.fixture
def folder(tmp_path: Path, engines: Path) -> Iterator[Folder]:
    """A folder to serve from; whatever a failing test leaves running is killed."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    made = Folder(tmp_path / "serving", tmp_path / "target", free_port())
    yield made
    for process in made.seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def bystanders(tmp_path: Path) -> Iterator[list[psutil.Process]]:
    """Processes that look like the server's in some way and are not."""
    commands = [
        ["sleep", "600"],
        [sys.executable, "-c", "import time; time.sleep(600)", "-m", "vllm.entrypoints.openai.api_server"],
        ["sh", "-c", "EYAS_SERVE_ID=0123456789abcdef; sleep 600 & wait"],
    ]
    started = [
        subprocess.Popen(command, start_new_session=own_session, stdin=subprocess.DEVNULL)
        for command in commands
        for own_session in (False, True)
    ]
    yield [psutil.Process(process.pid) for process in started]
    for process in started:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()
