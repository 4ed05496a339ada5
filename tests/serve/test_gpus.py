"""GPU memory between a stop and the next start, with a program in nvidia-smi's place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eyas.serve import gpus
from tests.serve.folder import Folder

# Prints what the files say: one line a GPU, one line a process. Each look at the GPUs uses up one file of the queue.
NVIDIA_SMI = """#!/bin/sh
cd {folder}
case "$1" in
--query-gpu=*) next=$(ls queue | head -1); [ -n "$next" ] && mv "queue/$next" gpus; cat gpus ;;
--query-compute-apps=*) cat processes ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "smi"
    (folder / "queue").mkdir(parents=True)
    (folder / "bin").mkdir()
    program = folder / "bin" / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(folder=folder))
    program.chmod(0o755)
    (folder / "gpus").write_text("0, GPU-aa, 500\n1, GPU-bb, [N/A]\n")
    (folder / "processes").write_text("")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def test_restart_waits_until_the_memory_is_free(folder: Folder, smi: Path) -> None:
    folder.start()
    assert folder.status()["gpu_memory"] == {"GPU-aa": 500}
    for n, used in enumerate([70_000, 70_000, 900]):
        (smi / "queue" / str(n)).write_text(f"0, GPU-aa, {used}\n")
    result = folder.restart()
    assert result.exit_code == 0, result.output
    assert "waiting for GPU memory to be freed (70,000 MiB in use)" in result.stderr
    assert not list((smi / "queue").iterdir())


def test_memory_that_is_not_freed_is_shown_with_its_holder(
    folder: Folder, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "SECONDS_TO_FREE", 0.05)
    folder.start()
    (smi / "gpus").write_text("0, GPU-aa, 70000\n")
    (smi / "processes").write_text(f"GPU-aa, {os.getpid()}, 69000\n")
    result = folder.restart()
    assert result.exit_code == 1
    assert "GPU-aa: 70,000 MiB, 500 MiB before it was started" in result.stderr
    assert f"process {os.getpid()}: 69,000 MiB (" in result.stderr
    assert folder.status()["condition"] == "stopped"
    assert folder.start().exit_code == 0


def test_status_counts_the_servers_memory(folder: Folder, smi: Path) -> None:
    folder.start()
    pid = folder.status()["pid"]
    (smi / "processes").write_text(f"GPU-aa, {pid}, 1024\nGPU-aa, {os.getpid()}, 5\nGPU-bb, {pid}, [N/A]\n")
    assert folder.status()["gpu_bytes"] == 1 << 30
    assert "1.0 GiB of GPUs" in folder.run("serve", "status", folder.path).stdout


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("0", {"GPU-aa": 500}), ("GPU-a", {"GPU-aa": 500}), ("1", {}), ("", {}), ("MIG-1/2", {})],
)
def test_only_visible_gpus_count(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: dict[str, int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.memory_in_use() == seen
