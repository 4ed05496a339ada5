"""Which processes are signalled: all that the server has started, wherever they went, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.serve.folder import Folder, is_alive, until

EVERY_KIND = ("--workers", "child", "no-environment", "orphan", "own-session", "own-session-no-environment")
NUM_PROCESSES = 6  # the main one, and one of each kind


def supervisor(folder: Folder) -> psutil.Process:
    return psutil.Process(folder.status()["supervisor"]["pid"])


def all_started(folder: Folder) -> list[psutil.Process]:
    until(lambda: len(folder.status()["pids"]) == NUM_PROCESSES)
    return [psutil.Process(pid) for pid in folder.status()["pids"]]


def test_stop_ends_what_left_the_group_and_nothing_else(folder: Folder, bystanders: list[psutil.Process]) -> None:
    folder.start("--", *EVERY_KIND)
    ours = all_started(folder)
    assert not set(ours) & set(bystanders)
    assert folder.stop().exit_code == 0
    assert not any(map(is_alive, ours))
    assert all(map(is_alive, bystanders))


def test_what_a_crash_leaves_is_ended_by_the_supervisor(folder: Folder, bystanders: list[psutil.Process]) -> None:
    folder.start("--", *EVERY_KIND)
    ours = all_started(folder)
    psutil.Process(folder.status()["pid"]).kill()
    until(lambda: not any(map(is_alive, ours)))
    body = folder.status()
    assert (body["condition"], body["exit_status"]) == ("dead", -9)
    until(lambda: f"ended what it left behind (processes: {NUM_PROCESSES - 1})" in Path(body["log"]).read_text())
    assert all(map(is_alive, bystanders))


def test_the_engine_outlives_its_supervisor_and_can_be_stopped(
    folder: Folder, bystanders: list[psutil.Process]
) -> None:
    folder.start("--", "--workers", "child", "orphan", "own-session")
    until(lambda: len(folder.status()["pids"]) == 4)
    ours = [psutil.Process(pid) for pid in folder.status()["pids"]]
    supervisor(folder).kill()
    assert folder.status()["condition"] == "healthy"
    assert "runs already" in folder.start("--", "--workers", "child", "orphan", "own-session").stderr
    stopped = folder.stop()
    assert stopped.exit_code == 0
    assert "how is unknown: its supervisor was killed or" in stopped.stdout
    assert not any(map(is_alive, ours))
    assert all(map(is_alive, bystanders))


def test_workers_without_main_process_and_supervisor_are_ended_by_the_next_start(folder: Folder) -> None:
    kinds = ("no-environment", "orphan", "own-session")
    folder.start("--", "--workers", *kinds)
    until(lambda: len(folder.status()["pids"]) == 1 + len(kinds))
    body = folder.status()
    workers = [psutil.Process(pid) for pid in body["pids"] if pid != body["pid"]]
    supervisor(folder).kill()
    psutil.Process(body["pid"]).kill()
    until(lambda: folder.status()["condition"] == "dead")
    assert sorted(folder.status()["pids"]) == sorted(worker.pid for worker in workers)
    assert folder.start().exit_code == 0
    assert not any(map(is_alive, workers))


def test_asking_the_supervisor_to_end_asks_the_engine(folder: Folder) -> None:
    folder.start("--", *EVERY_KIND)
    ours = [*all_started(folder), supervisor(folder)]
    supervisor(folder).send_signal(signal.SIGTERM)
    until(lambda: not any(map(is_alive, ours)))
    body = folder.status()
    assert (body["condition"], body["exit_status"]) == ("dead", -15)


def test_a_recycled_pid_is_not_signalled(folder: Folder, bystanders: list[psutil.Process]) -> None:
    """As after a crash of everything: the pids in the state are other processes' by now."""
    folder.start()
    folder.stop()
    leader = next(process for process in bystanders if os.getsid(process.pid) == process.pid)

    def recycle(state: dict[str, Any]) -> None:
        state["process"]["pid"] = leader.pid
        state["supervisor"]["pid"] = bystanders[0].pid
        state["stop_asked_at"] = None

    folder.edit_state(recycle)
    body = folder.status()
    assert (body["condition"], body["pids"]) == ("dead", [])
    assert folder.stop().exit_code == 0
    assert folder.start().exit_code == 0
    assert all(map(is_alive, bystanders))


def test_a_recycled_session_is_not_signalled(folder: Folder) -> None:
    """Another session has got the number, and its leader has ended as well."""
    folder.start()
    folder.stop()
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    left = psutil.Process(int(shell.stdout.readline()))
    shell.wait()
    try:
        folder.edit_state(lambda state: state["process"].update(pid=shell.pid))
        assert folder.stop().exit_code == 0
        assert folder.start().exit_code == 0
        assert is_alive(left)
    finally:
        left.kill()
        shell.stdout.close()


def test_who_reads_the_log_is_not_signalled(folder: Folder) -> None:
    folder.start()
    reader = subprocess.Popen(["tail", "-f", folder.path / "logs" / "serve.log"], stdout=subprocess.DEVNULL)
    try:
        folder.stop()
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()
