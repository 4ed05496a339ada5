"""What a folder knows of its server: serve.json, the lock, the logs, and how a start ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eyas.serve.command import ServeConfig
from eyas.serve.errors import ServeError
from eyas.serve.processes import SECONDS_BETWEEN_POLLS, Lineage, ProcessId, boot_id
from eyas.shards.atomic import publish

STATE_FILE = "serve.json"
LOCK_FILE = "serve.lock"
LOGS_FOLDER = "logs"
LATEST_LOG = "serve.log"
VERSION = 1

KEPT_LOGS = 10  # of earlier starts
SECONDS_FOR_THE_LOCK = 180.0  # a restart holds it while the server ends and its GPU memory is freed


@dataclass(frozen=True, kw_only=True)
class ServeState:
    """A start of the server, as serve.json holds it."""

    version: int = VERSION
    id: str  # in the environment of every process of this start
    host: str
    boot: str
    config: ServeConfig
    command: tuple[str, ...]
    cwd: str  # the engine's, for the relative paths among its options
    engine_release: str | None
    log: str  # file name in logs/
    started_at: float  # unix time
    gpu_memory: dict[str, int] = field(default_factory=dict)  # MiB in use before the start, by GPU
    supervisor: ProcessId | None = None
    process: ProcessId | None = None  # leads a session and process group of its own; None while it is being started
    stop_asked_at: float | None = None  # unix time

    def lineage(self, folder: Path) -> Lineage:
        return Lineage(
            serve_id=self.id, main=self.process, supervisor=self.supervisor, log=folder / LOGS_FOLDER / self.log
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a start ended, as its supervisor saw it."""

    exit_status: int  # negative: the signal that ended it
    ended_at: float  # unix time


def read_state(folder: Path) -> ServeState | None:
    """The last start in ``folder``; None for none. Raises ServeError for one that cannot be told from here."""
    path = folder / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=ServeState)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ServeError(
            f"{path}: not as eyas serve writes it ({error}); stop its server by hand and remove it"
        ) from error
    if state.version != VERSION:
        raise ServeError(f"{path}: version {state.version}, expected {VERSION}: use the eyas that started the server")
    if state.host != socket.gethostname() and state.boot != boot_id():
        raise ServeError(
            f"{path}: the server was started on {state.host}, and its processes cannot be seen from "
            f"{socket.gethostname()}: run eyas serve there, or remove the file if that machine is gone"
        )
    return state


def write_state(folder: Path, state: ServeState) -> None:
    """Call under ``lock``."""
    publish(folder / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def read_outcome(folder: Path, state: ServeState) -> Outcome | None:
    """None while the server runs, and where its supervisor was killed before it ended."""
    try:
        return msgspec.json.decode(_outcome_path(folder, state).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None


def write_outcome(folder: Path, state: ServeState, outcome: Outcome) -> None:
    publish(_outcome_path(folder, state), msgspec.json.encode(outcome) + b"\n")


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[int]:
    """Hold ``folder`` for one command that starts or stops its server, and yield the lock's file descriptor.

    The lock is flock's: it ends with its process and the processes that were given the descriptor. Raises ServeError
    naming the holder where it is not to be had.
    """
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + SECONDS_FOR_THE_LOCK
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
                    raise ServeError(f"{folder} is held by another eyas serve ({holder}): wait for its end") from error
                time.sleep(SECONDS_BETWEEN_POLLS)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def new_log(folder: Path) -> Path:
    """An empty log for a start, the latest from now on; of earlier ones the newest KEPT_LOGS stay."""
    logs = folder / LOGS_FOLDER
    logs.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
    path = logs / f"serve-{stamp}.log"
    path.touch(exist_ok=False)
    fresh = logs / f".tmp-{path.name}"
    fresh.symlink_to(path.name)
    fresh.replace(logs / LATEST_LOG)
    for old in sorted(logs.glob("serve-*.log"))[: -KEPT_LOGS - 1]:
        old.unlink(missing_ok=True)
        old.with_suffix(".json").unlink(missing_ok=True)
    return path


def last_lines(log: Path, number: int = 20) -> str:
    """The end of a log, for messages."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-number:])
    except FileNotFoundError:
        return ""


def _outcome_path(folder: Path, state: ServeState) -> Path:
    return (folder / LOGS_FOLDER / state.log).with_suffix(".json")
