"""Processes by /proc: which ones are a server's, and signals that reach nothing else.

A pid alone says nothing, since the kernel gives it away again. A process is its pid and its start time, in clock ticks
since boot as /proc/PID/stat has it: unlike a time of day, it does not change when the clock is set. Signals go through
a pidfd, which is taken first and compared after, so that none reaches a process that took the pid in between.

The engine's processes do not all stay where they were started: they leave the group, lose their parent, and those that
write themselves a title (vLLM's and SGLang's workers) overwrite the environment that /proc shows. So several signs
count, each of them proof: see ``members``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.serve.errors import ServeError

MARKER = "EYAS_SERVE_ID"  # of the engine's environment

SECONDS_BETWEEN_POLLS = 0.2
SECONDS_FOR_THE_REST = 5.0  # after the main process has ended, for the others
SECONDS_AFTER_KILL = 30.0  # a process that holds a GPU may take that long to die

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process that may have ended: no other one ever equals it, on this machine since it booted."""

    pid: int
    start: int  # clock ticks since boot


@dataclass(frozen=True, kw_only=True)
class Process:
    """One line of /proc/PID/stat."""

    id: ProcessId
    parent: int
    session: int
    ended: bool  # a zombie: it holds nothing but its pid


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What is known of a start: by it ``members`` finds the processes."""

    serve_id: str
    main: ProcessId | None  # leads the session
    supervisor: ProcessId | None  # adopts what loses its parent
    log: Path  # stdout and stderr of them all


def boot_id() -> str:
    """Of the running kernel's boot: start times of different boots do not compare. Raises ServeError off Linux."""
    if sys.platform != "linux":
        raise ServeError(f"eyas serve follows processes by Linux's /proc, and this is {sys.platform}")
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> Process | None:
    """The process that has ``pid`` now; None for none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold anything: proc(5). What follows are fields 3 (state) and on.
    fields = text.rpartition(")")[2].split()
    return Process(
        id=ProcessId(pid=pid, start=int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        ended=fields[0] in "ZXx",
    )


def find(process: ProcessId | None) -> Process | None:
    """``process`` while its pid is still its own, ended or not."""
    found = read_process(process.pid) if process is not None else None
    return found if found is not None and found.id == process else None


def is_alive(process: ProcessId | None) -> bool:
    found = find(process)
    return found is not None and not found.ended


def members(lineage: Lineage) -> list[Process]:
    """The living processes of a start, without the supervisor.

    Of these a process has to show one: it is the main process; it is in the session that the main process leads, which
    still has its pid; its environment carries the start's id; it is in a session of that number and writes into the
    start's log (the main process is gone, so the number alone could be another session's); one of its ancestors shows
    one of these, or is the supervisor, which adopts those whose parent ends.
    """
    processes = {process.id.pid: process for process in map(read_process, pids()) if process is not None}
    main, supervisor = lineage.main, lineage.supervisor
    leads = main is not None and (found := processes.get(main.pid)) is not None and found.id == main
    spared = {os.getpid()}
    roots = set()
    if supervisor is not None and is_alive(supervisor):
        spared.add(supervisor.pid)
        roots.add(supervisor.pid)
    for pid, process in processes.items():
        in_session = main is not None and process.session == main.pid
        if (in_session and (leads or _writes_to(pid, lineage.log))) or _carries(pid, lineage.serve_id):
            roots.add(pid)
    found_pids: set[int] = set()
    for pid in processes:
        line = [pid]
        while line[-1] not in roots and (parent := processes.get(processes[line[-1]].parent)) is not None:
            if parent.id.start > processes[line[-1]].id.start:
                break  # the parent's pid was given away while we read
            line.append(parent.id.pid)
        if line[-1] in roots:
            found_pids.update(line)
    return [processes[pid] for pid in sorted(found_pids - spared) if not processes[pid].ended]


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal ``process`` if it is still there. Raises ServeError where it is not ours to signal (another user's)."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ServeError(
            f"process {process.pid} ({command_line(process.pid)}) runs as another user: stop it as that user"
        ) from error
    finally:
        os.close(fd)


def end(lineage: Lineage, *, grace: float, tell: Callable[[str], None]) -> int:
    """End every process of a start and return how many there were; zombies are left to their parents.

    The main process is asked (SIGTERM) and has ``grace`` seconds to end its workers in order. Those it leaves are asked
    next, and what is left after that is killed. Raises ServeError naming what cannot be ended.
    """
    seen: dict[ProcessId, Process] = {}

    def left() -> list[Process]:
        now = members(lineage)
        seen.update({process.id: process for process in now})
        return now

    if is_alive(lineage.main):
        assert lineage.main is not None
        left()
        send(lineage.main, signal.SIGTERM)
        if not _wait(lambda: not is_alive(lineage.main), grace):
            tell(f"process {lineage.main.pid} has not ended {grace:g} s after SIGTERM")
    for process in left():
        if process.id != lineage.main:
            send(process.id, signal.SIGTERM)
    _wait(lambda: not left(), SECONDS_FOR_THE_REST)
    if stubborn := left():
        tell(f"SIGKILL to {', '.join(str(process.id.pid) for process in stubborn)}")

    def killed() -> bool:
        now = left()
        for process in now:
            send(process.id, signal.SIGKILL)
        return not now

    if not _wait(killed, SECONDS_AFTER_KILL):
        named = ", ".join(f"{process.id.pid} ({command_line(process.id.pid)})" for process in left())
        raise ServeError(f"still there {SECONDS_AFTER_KILL:g} s after SIGKILL, so a driver holds them: {named}")
    return len(seen)


def resident_bytes(pid: int) -> int:
    """Memory of a process, pages that it shares with others included; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def command_line(pid: int) -> str:
    """For messages: the first 100 characters of the command, or the name where it shows none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        text = b" ".join(words).decode(errors="replace").strip() or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended, or out of sight"
    return text if len(text) <= 100 else f"{text[:97]}..."


def seconds_since(process: ProcessId) -> float:
    """How long ``process`` has been running, if it still is."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / _TICKS_PER_SECOND)


def writers(log: Path) -> list[int]:
    """The processes whose output goes to ``log``."""
    return [pid for pid in pids() if _writes_to(pid, log)]


def pids() -> list[int]:
    """Of every process there is."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _carries(pid: int, serve_id: str) -> bool:
    try:
        return f"{MARKER}={serve_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return False


def _writes_to(pid: int, log: Path) -> bool:
    try:
        ours = os.stat(log)
        return any(os.path.samestat(ours, os.stat(f"/proc/{pid}/fd/{fd}")) for fd in (1, 2))
    except OSError:
        return False


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(SECONDS_BETWEEN_POLLS)
    return True
