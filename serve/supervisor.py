"""The supervisor of one start: `python -m eyas.serve.supervisor FOLDER LOCK_FD READY_FD`.

Starts the engine from the folder's state, records its process, waits for its end and records that, then ends what the
engine left behind. The engine outlives it: if it is killed, only the exit status is lost.

It inherits the folder's lock and gives it up once the engine's process is recorded, so that nobody sees the folder in
between, even if the command that started it is killed. Over the pipe it says ``ok``, or what went wrong.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from eyas.serve.processes import MARKER, SECONDS_FOR_THE_REST, ProcessId, end, read_process, send
from eyas.serve.state import Outcome, ServeState, read_state, write_outcome, write_state

READY = b"ok"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(folder: Path, lock_fd: int, ready_fd: int) -> None:
    """Run until the engine has ended."""
    os.chdir(folder)
    folder = Path()  # wherever it is moved meanwhile
    adopt_orphans()
    state = read_state(folder)
    assert state is not None, f"{folder.resolve()}: the command that starts the supervisor writes the state first"
    try:
        engine = _start(state)
    except OSError as error:
        os.write(ready_fd, f"{state.command[0]}: {error.strerror}".encode())
        return
    try:
        process, itself = read_process(engine.pid), read_process(os.getpid())
        assert process is not None, "a child that was not waited for has its pid"
        assert itself is not None
        state = replace(state, process=process.id, supervisor=itself.id)
        write_state(folder, state)
    except BaseException:
        engine.kill()
        raise
    forward_signals(process.id)
    os.write(ready_fd, READY)
    os.close(ready_fd)
    os.close(lock_fd)
    outcome = Outcome(exit_status=_wait(engine.pid), ended_at=time.time())
    try:
        write_outcome(folder, state, outcome)
    finally:
        say(f"the engine ended with exit status {outcome.exit_status}")
        # On a clean end there is nothing; a crash may leave workers that hold a GPU.
        num_left = end(state.lineage(folder), grace=SECONDS_FOR_THE_REST, tell=say)
        if num_left:
            say(f"ended what it left behind (processes: {num_left})")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def forward_signals(engine: ProcessId) -> None:
    """What asks the supervisor to end asks the engine."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: send(engine, signal.SIGTERM))


def say(message: str) -> None:
    """Into the start's log."""
    print(f"eyas serve: {message}", file=sys.stderr, flush=True)


def _start(state: ServeState) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        state.command,
        cwd=state.cwd,
        env={**os.environ, MARKER: state.id},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait(pid: int) -> int:
    """The exit status of child ``pid``, negative for a signal. Adopted children are reaped on the way."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
