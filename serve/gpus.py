"""GPU memory as nvidia-smi shows it, which comes with the driver: how much is in use, and by which processes.

Where there is no nvidia-smi there is nothing to see, and nothing is waited for.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping

from eyas.serve.errors import ServeError
from eyas.serve.processes import command_line

SECONDS_TO_FREE = 60.0
SLACK_MIB = 512  # other processes come and go, and the driver keeps some
SECONDS_BETWEEN_LOOKS = 1.0


def memory_in_use() -> dict[str, int]:
    """MiB in use on each GPU that this environment lets an engine see, by UUID. Without GPUs, and for those that do
    not say (MIG), there is no entry."""
    found = {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for index, uuid, used in _query("--query-gpu=index,uuid,memory.used"):
        if used.isdigit() and _is_visible(index, uuid, visible):
            found[uuid] = int(used)
    return found


def memory_of(pids: Collection[int]) -> int:
    """MiB that these processes hold on all GPUs."""
    return sum(used for _, pid, used in _holders() if pid in pids)


def wait_until_free(before: Mapping[str, int], tell: Callable[[str], None]) -> None:
    """Wait until each GPU is used no more than ``before`` the server was started.

    Raises ServeError, naming who holds it, where that takes longer than SECONDS_TO_FREE.
    """
    deadline = time.monotonic() + SECONDS_TO_FREE
    told = False
    while over := {gpu: used for gpu, used in memory_in_use().items() if used > before.get(gpu, used) + SLACK_MIB}:
        if time.monotonic() > deadline:
            holders = _holders()
            lines = [f"GPU memory is still in use {SECONDS_TO_FREE:g} s after the server has ended:"]
            for gpu, used in over.items():
                lines.append(f"  {gpu}: {used:,} MiB, {before[gpu]:,} MiB before it was started")
                lines += [f"    process {pid}: {m:,} MiB ({command_line(pid)})" for g, pid, m in holders if g == gpu]
            lines.append("Free it, and run eyas serve start, which does not wait for it.")
            raise ServeError("\n".join(lines))
        if not told:
            tell(f"waiting for GPU memory to be freed ({', '.join(f'{used:,} MiB' for used in over.values())} in use)")
            told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _holders() -> list[tuple[str, int, int]]:
    """(GPU, pid, MiB) of each process that has memory there."""
    rows = _query("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [(gpu, int(pid), int(used) if used.isdigit() else 0) for gpu, pid, used in rows if pid.isdigit()]


def _query(what: str) -> list[list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 3] if done.returncode == 0 else []


def _is_visible(index: str, uuid: str, visible: str | None) -> bool:
    """By CUDA_VISIBLE_DEVICES, whose entries are indices or (the beginnings of) UUIDs."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return any(name == index or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)
