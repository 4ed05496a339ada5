"""SIGKILL to a command and every process it has started."""

from __future__ import annotations

import signal
import subprocess

import psutil


def kill_all(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> bool:
    """Kill ``process`` and its children, and wait for them; False where it had ended by itself."""
    running = process.poll() is None
    ranks = psutil.Process(process.pid).children(recursive=True) if running else []
    for victim in [*ranks, psutil.Process(process.pid)] if running else []:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(ranks)
    return running
