"""Start, stop and look at the server of a folder."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eyas.serve.address import is_free, listener, unhealthy
from eyas.serve.command import ServeConfig, server_command
from eyas.serve.errors import ServeError
from eyas.serve.gpus import memory_in_use, memory_of, wait_until_free
from eyas.serve.processes import (
    MARKER,
    SECONDS_BETWEEN_POLLS,
    boot_id,
    command_line,
    end,
    is_alive,
    members,
    resident_bytes,
    seconds_since,
)
from eyas.serve.state import (
    LOGS_FOLDER,
    Outcome,
    ServeState,
    last_lines,
    lock,
    new_log,
    read_outcome,
    read_state,
    root_cause,
    write_state,
)
from eyas.serve.supervisor import READY

Condition = Literal["none", "running", "healthy", "stopped", "dead"]  # running: it does not answer, or not yet
Tell = Callable[[str], None]

SECONDS_FOR_THE_SUPERVISOR = 60.0  # to start the engine's process, not the engine
SECONDS_FOR_THE_OUTCOME = 5.0  # for the supervisor to write how the engine ended
SECONDS_BETWEEN_CHECKS = 0.5
SECONDS_BETWEEN_LINES = 60.0
SHOWN_OF_A_LINE = 200  # characters: SGLang logs all its arguments in one


@dataclass(frozen=True, kw_only=True)
class ServeStatus:
    """What is known of a folder's server now."""

    folder: Path
    condition: Condition
    state: ServeState | None
    outcome: Outcome | None  # where it has ended and its supervisor saw it
    reason: str  # why it is not healthy, or how it ended
    seconds_up: float | None
    pids: tuple[int, ...]  # of every living process of the start, of a dead server too
    resident_bytes: int  # of these; what they share counts for each
    gpu_mib: int  # of these

    @property
    def log(self) -> Path:
        assert self.state is not None
        return self.folder / LOGS_FOLDER / self.state.log

    @property
    def is_running(self) -> bool:
        return self.condition in ("running", "healthy")


def look(folder: Path) -> ServeStatus:
    """The server's status, its health asked for now. Changes nothing."""
    state = read_state(folder)
    if state is not None and state.process is None:  # it is being started at this moment, or that was killed
        with lock(folder):
            state = read_state(folder)
    if state is None:
        return ServeStatus(
            folder=folder, condition="none", state=None, outcome=None, reason="", seconds_up=None, pids=(),
            resident_bytes=0, gpu_mib=0,
        )  # fmt: skip
    pids = _pids(folder, state)
    running = _runs(state)
    outcome = None if running else _await_outcome(folder, state)
    problem = _problem(state, pids) if running else None
    condition: Condition = "stopped" if state.stop_asked_at is not None else "dead"
    if running:
        condition = "healthy" if problem is None else "running"
    return ServeStatus(
        folder=folder,
        condition=condition,
        state=state,
        outcome=outcome,
        reason=problem or "" if running else _ending(state, outcome),
        seconds_up=seconds_since(state.process) if running and state.process is not None else None,
        pids=pids,
        resident_bytes=sum(map(resident_bytes, pids)),
        gpu_mib=memory_of(pids) if pids else 0,
    )


def start(folder: Path, config: ServeConfig, release: str | None, tell: Tell) -> ServeState:
    """Start the server, or find it running with the same configuration. Does not wait for its health.

    Raises ServeError where another configuration runs, the port is taken, or the engine cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read_state(folder)  # refuses a damaged one while the lock's file still says who held it last
    with lock(folder) as lock_fd:
        state = read_state(folder)
        if state is not None and _runs(state):
            if differences := state.config.differences(config):
                raise ServeError(
                    f"{folder}: a server with another configuration runs there; eyas serve restart changes it:\n"
                    + "\n".join(f"  {line}" for line in differences)
                )
            tell("the server runs already")
            return state
        if state is not None:
            _end(folder, state, grace=0.0, tell=tell)
        return _launch(folder, config, release, lock_fd, cwd=os.getcwd())


def stop(folder: Path, *, grace: float, tell: Tell) -> bool:
    """End the server and everything it has started; False where nothing was running.

    Raises ServeError for what cannot be ended.
    """
    if read_state(folder) is None:  # and leave no lock there
        return False
    with lock(folder):
        state = read_state(folder)
        return state is not None and _stop(folder, state, grace=grace, tell=tell)


def restart(
    folder: Path, config: ServeConfig, release: str | None, *, cwd: str, grace: float, tell: Tell
) -> ServeState:
    """Stop the server, see its GPU memory freed, and start it as ``config`` says, under one lock.

    cwd: where relative paths among the engine's options begin. Raises ServeError as ``start`` and ``stop`` do, and
    where the memory is not freed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder) as lock_fd:
        state = read_state(folder)
        if state is not None:
            _stop(folder, state, grace=grace, tell=tell)
            if state.boot == boot_id():
                wait_until_free(state.gpu_memory, tell)
        return _launch(folder, config, release, lock_fd, cwd=cwd)


def wait_for_health(folder: Path, state: ServeState, *, seconds: float, stopping: threading.Event, tell: Tell) -> bool:
    """Wait until the server of this start answers. False where it has not in ``seconds``, or before ``stopping``: it
    goes on starting.

    Raises ServeError with the end of the log, and the error in it, where it ends before, or is stopped.
    """
    begun = last_line = time.monotonic()
    log = folder / LOGS_FOLDER / state.log
    while True:
        current = read_state(folder)
        if current is None or current.id != state.id or current.stop_asked_at is not None:
            raise ServeError(f"{folder}: the server was stopped, or restarted, while it was waited for")
        if not _runs(current):
            how = _ending(current, _await_outcome(folder, current))
            cause = root_cause(log)
            shown = "" if cause is None else f"\n\nThe error in it that seems to be the cause:\n{cause}"
            raise ServeError(f"{how}. The end of its log:\n{last_lines(log)}{shown}\n\nThe whole log: {log}")
        if _problem(state, _pids(folder, state)) is None:
            return True
        now = time.monotonic()
        if now - begun > seconds or stopping.is_set():
            return False
        if now - last_line > SECONDS_BETWEEN_LINES:
            last_line = now
            tell(f"waiting for health, {now - begun:.0f} s; the log says: {last_lines(log, 1)[:SHOWN_OF_A_LINE]}")
        time.sleep(SECONDS_BETWEEN_CHECKS)


def _launch(folder: Path, config: ServeConfig, release: str | None, lock_fd: int, *, cwd: str) -> ServeState:
    """Start the supervisor, which starts the engine. Under the lock."""
    host, port = config.host, config.listens_on
    if not is_free(host, port):
        pid = listener(port)
        holder = f"process {pid} ({command_line(pid)})" if pid is not None else "a process of another user"
        raise ServeError(f"--port {port}: {holder} listens there; stop it, or give another port")
    log = new_log(folder)
    state = ServeState(
        id=secrets.token_hex(8),
        host=socket.gethostname(),
        boot=boot_id(),
        config=config,
        command=tuple(server_command(config)),
        cwd=cwd,
        engine_release=release,
        log=log.name,
        started_at=time.time(),
        gpu_memory=memory_in_use(),
    )
    write_state(folder, state)
    ready, ready_fd = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    try:
        with open(log, "ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", "eyas.serve.supervisor", str(folder.resolve()), str(lock_fd), str(ready_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[lock_fd, ready_fd],
                start_new_session=True,  # neither the terminal's signals nor the caller's end reach it
            )
    finally:
        os.close(ready_fd)
    try:
        answer = _read(ready)
    finally:
        os.close(ready)
    if answer != READY:
        raise ServeError(f"{answer.decode(errors='replace') or 'the supervisor ended'}\n{last_lines(log)}".strip())
    launched = read_state(folder)
    assert launched is not None
    return launched


def _read(pipe: int) -> bytes:
    """Everything the supervisor says before it closes its end."""
    said = b""
    deadline = time.monotonic() + SECONDS_FOR_THE_SUPERVISOR
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 4096)
        if not part:
            return said
        said += part
    return said or f"the supervisor says nothing in {SECONDS_FOR_THE_SUPERVISOR:g} s".encode()


def _stop(folder: Path, state: ServeState, *, grace: float, tell: Tell) -> bool:
    was_running = _runs(state)
    if was_running:
        state = replace(state, stop_asked_at=time.time())
        write_state(folder, state)
    num_ended = _end(folder, state, grace=grace, tell=tell)
    if was_running:
        _await_outcome(folder, state)
    return was_running or num_ended > 0


def _end(folder: Path, state: ServeState, *, grace: float, tell: Tell) -> int:
    """End what is left of a start. Nothing is, of one before the machine's last boot."""
    if state.boot != boot_id():
        return 0
    was_running = _runs(state)
    number = end(state.lineage(folder), grace=grace, tell=tell)
    if number and not was_running:
        tell(f"ended what a server that had died left behind (processes: {number})")
    return number


def _await_outcome(folder: Path, state: ServeState) -> Outcome | None:
    deadline = time.monotonic() + SECONDS_FOR_THE_OUTCOME
    while (outcome := read_outcome(folder, state)) is None:
        if not is_alive(state.supervisor) or time.monotonic() > deadline:
            return read_outcome(folder, state)
        time.sleep(SECONDS_BETWEEN_POLLS)
    return outcome


def _runs(state: ServeState) -> bool:
    return state.boot == boot_id() and is_alive(state.process)


def _pids(folder: Path, state: ServeState) -> tuple[int, ...]:
    if state.boot != boot_id():
        return ()
    return tuple(process.id.pid for process in members(state.lineage(folder)))


def _problem(state: ServeState, pids: Collection[int]) -> str | None:
    """Why the running server is not healthy; None where it is."""
    port = state.config.listens_on
    if (problem := unhealthy(state.config.host, port)) is not None:
        return problem
    if (pid := listener(port)) is not None and pid not in pids:
        return f"port {port} is answered by process {pid} ({command_line(pid)}), which is not the server's"
    return None


def _ending(state: ServeState, outcome: Outcome | None) -> str:
    """How a server that does not run has ended."""
    if outcome is not None:
        if outcome.exit_status < 0:
            return f"the engine was ended by {_signal_name(-outcome.exit_status)}"
        return f"the engine ended with exit status {outcome.exit_status}"
    if state.boot != boot_id():
        return "the machine has been booted since"
    if state.process is None:
        return "its start was killed before the engine ran"
    return "the engine has ended, and how is unknown: its supervisor was killed or could not write to the folder"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
