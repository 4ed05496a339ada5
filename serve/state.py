"""What a folder knows of its server: serve.json, the lock, the logs, and how a start ended."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eyas.serve.command import ServeConfig
from eyas.serve.errors import ServeError
from eyas.serve.processes import SECONDS_BETWEEN_POLLS, Lineage, ProcessId, boot_id, command_line, writers
from eyas.shards.atomic import publish

STATE_FILE = "serve.json"
LOCK_FILE = "serve.lock"
LOGS_FOLDER = "logs"
LATEST_LOG = "serve.log"
VERSION = 1

_LOG_PREFIX = re.compile(r"^\([^)]* pid=\d+[^)]*\) (ERROR \S+ \S+ \[[^\]]*\] ?)?")  # vLLM's
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)(: |:?$)")  # the last of a traceback
_SEARCHED_BYTES = 1 << 20
_SHOWN_OF_AN_ERROR = 1000  # characters of a line

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
    """The last start in ``folder``; None for none.

    Raises ServeError for one that cannot be told from here, and for none where processes still write to the last log.
    """
    path = folder / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=ServeState)
    except FileNotFoundError as error:
        log = folder / LOGS_FOLDER / LATEST_LOG
        # Asked again after the processes: a first start may have written it meanwhile.
        if not log.exists() or not writers(log) or path.exists():
            return None
        raise ServeError(
            f"{path}: not there, though a server started here seems to run. {_what_else_is_known(folder)}. Put the "
            "file back, or end by hand what still runs"
        ) from error
    except msgspec.MsgspecError as error:
        raise ServeError(
            f"{path}: not as eyas serve writes it ({error}). {_what_else_is_known(folder)}. End by hand what still "
            f"runs, then remove {path}"
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
    """None while the server runs, and where its supervisor was killed or could not write it. Raises ServeError."""
    path = _outcome_path(folder, state)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ServeError(
            f"{path}: not as eyas serve writes it ({error}). It says how the server ended, and nothing else: remove it"
        ) from error


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
                    raise ServeError(
                        f"{folder} is held by another eyas serve ({_holder(folder)}): wait for its end"
                    ) from error
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


def root_cause(log: Path) -> str | None:
    """The error that ended the engine, as far as its log shows one; None where it shows none.

    The processes of an engine end one after the other, each with a traceback of its own, and the last ones say no more
    than that another failed ("See root cause above", vLLM's v1/engine/utils.py): what counts is the last error before
    the first that refers to another.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES))
            lines = [_LOG_PREFIX.sub("", line) for line in file.read().decode(errors="replace").splitlines()]
    except FileNotFoundError:
        return None
    found = [n for n, line in enumerate(lines) if _ERROR_LINE.match(line)]
    own = list(itertools.takewhile(lambda n: "root cause" not in lines[n].lower(), found)) or found
    if not own:
        return None
    end = own[-1] + 1
    while end < len(lines) and lines[end][:1].isspace():  # more of its message: a traceback's frames stand before it
        end += 1
    return "\n".join(line[:_SHOWN_OF_AN_ERROR] for line in lines[own[-1] : end])


def _what_else_is_known(folder: Path) -> str:
    """Of a folder whose serve.json is gone or cannot be read: what may still run, and where to look."""
    log = folder / LOGS_FOLDER / LATEST_LOG
    running = ", ".join(f"{pid} ({command_line(pid)})" for pid in writers(log))
    known = f"Processes that write to its last log, {log}: {running or 'none that can be seen from here'}"
    holder = _holder(folder)
    return f"{known}. The last eyas serve command that started or stopped it: {holder}" if holder else known


def _holder(folder: Path) -> str:
    """Who holds the lock, or held it last; empty where nobody is known."""
    try:
        return (folder / LOCK_FILE).read_bytes()[:200].decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _outcome_path(folder: Path, state: ServeState) -> Path:
    return (folder / LOGS_FOLDER / state.log).with_suffix(".json")
