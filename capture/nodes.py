"""The nodes of one launch: `eyas capture` runs on each; node 0 drives, the others run workers and do what it says.

A serving engine's workers on another node know nothing of the process that drives them: when it ends or dies they wait
for ever, and where one of them dies the others do. So each node's eyas holds a connection to node 0, over which go a
few lines of JSON and no data: it proves first that the nodes mean the same, and whoever finds the other end gone ends
its own workers. Node 0 listens on the port above the engine's own. Like the engine's, the connection is for a network
that is trusted.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from eyas.capture.errors import CaptureFailed
from eyas.taps.errors import EXIT_STOPPED_EARLY, UsageError

PATIENCE_SECONDS = 600.0  # until all nodes are there
SECONDS_TO_SEE = 30.0  # a file that another node has made, on a shared file system
SECONDS_BETWEEN_POLLS = 0.2
MOST_BYTES = 1 << 16  # of a line
# A machine that is switched off closes no connection: three minutes of silence end it.
_KEEPALIVE = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
              (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Node:
    """Which node of a launch this is."""

    rank: int
    num_nodes: int
    address: str  # of node 0
    port: int  # where eyas listens there
    means: Mapping[str, str]  # what all nodes must agree on, by name

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_nodes:
            raise UsageError(f"--node-rank {self.rank} with --nnodes {self.num_nodes}: expected less, and from 0")

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


class Workers(Protocol):
    """An engine's workers on a node that does not drive it."""

    def have_failed(self) -> bool: ...


class Leader:
    """Node 0, while the others are there. Used as a context manager around all that it does.

    Raises CaptureFailed where a node does not come, or goes while it is needed; UsageError where one means something
    else.
    """

    def __init__(
        self,
        node: Node,
        dataset: Path,
        *,
        stopping: threading.Event,  # this node was asked to stop; set where another one was
        say: Callable[[str], None],
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._node, self._dataset, self._stopping, self._say = node, dataset, stopping, say
        self._patience = patience
        self._lines: dict[int, _Lines] = {}  # by node
        self._gone: list[str] = []
        self._ended = threading.Event()

    def __enter__(self) -> Leader:
        try:
            with _listening(self._node) as listener:
                self._gather(listener)
            self._prove_one_folder()
        except BaseException as error:
            stopped = isinstance(error, SystemExit)
            self._tell({"end": EXIT_STOPPED_EARLY} if stopped else {"refused": f"node 0 ended: {error}"})
            self._close()
            raise
        for rank, lines in self._lines.items():
            threading.Thread(target=self._watch, args=(rank, lines), name=f"eyas-node-{rank}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._tell({"end": _exit_status(error)})
        self._close()
        if self._gone and isinstance(error, Exception):
            raise CaptureFailed(
                f"{self._gone[0]}, see its own output. What was sealed is kept: run the same command again on "
                f"every node"
            ) from error

    def start(self) -> None:
        """This node's engine is about to start: have the others start their part of it."""
        self._tell({"run": True})

    def stop(self) -> None:
        """This node's engine has done its work: have the others end theirs."""
        self._tell({"run": False})

    def _gather(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self._patience
        wanted = set(range(1, self._node.num_nodes))
        self._say(f"node 0 of {self._node.num_nodes}: waiting for the others on port {self._node.port}")
        while missing := wanted - set(self._lines):
            listener.settimeout(SECONDS_BETWEEN_POLLS)
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                _end_if(self._stopping)
                if time.monotonic() < deadline:
                    continue
                names = ", ".join(f"node {rank}" for rank in sorted(missing))
                raise CaptureFailed(
                    f"{names} did not come to {self._node.place} within {self._patience:.0f} s: run the same command "
                    f"there with its --node-rank, and see that it reaches that address"
                ) from None
            lines = _Lines(connection)
            try:
                hello = lines.receive(timeout=SECONDS_TO_SEE)
                rank, means = int(hello["node"]), dict(hello["means"])
            except (OSError, ValueError, KeyError, TypeError):
                lines.close()  # not one of us
                continue
            reason = f"node {rank} is none of the others, or there already" if rank not in missing else ""
            reason = reason or _difference(rank, self._node.means, means)
            if reason:
                with contextlib.suppress(OSError):
                    lines.send({"refused": reason})
                lines.close()
                raise UsageError(reason)
            self._lines[rank] = lines
            self._say(f"node 0 of {self._node.num_nodes}: node {rank} is here, from {peer[0]}")

    def _prove_one_folder(self) -> None:
        self._dataset.mkdir(parents=True, exist_ok=True)
        mark = self._dataset / f".nodes-{secrets.token_hex(8)}"
        mark.touch(exist_ok=False)
        try:
            for rank, lines in self._lines.items():
                try:
                    lines.send({"sees": mark.name})
                    seen = lines.receive(timeout=2 * SECONDS_TO_SEE).get("seen")
                except (OSError, ValueError) as error:
                    raise CaptureFailed(f"node {rank} is gone ({error})") from error
                if seen is not True:
                    raise UsageError(
                        f"{self._dataset} on node {rank} is not that folder on node 0: give an OUT that all nodes share"
                    )
        finally:
            mark.unlink(missing_ok=True)

    def _watch(self, rank: int, lines: _Lines) -> None:
        """Until the connection ends. A node that was asked to stop has all of them stop."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                if lines.receive().get("stop"):
                    self._stopping.set()
        if not self._ended.is_set():
            self._gone.append(f"node {rank} is gone")
            _kill_workers(until=self._ended)

    def _tell(self, message: dict[str, Any]) -> None:
        for lines in self._lines.values():
            with contextlib.suppress(OSError):  # its watcher finds out
                lines.send(message)

    def _close(self) -> None:
        for lines in self._lines.values():
            lines.close()


def follow(
    node: Node,
    dataset: Path,
    run: Callable[[], AbstractContextManager[Workers]],
    *,
    stopping: threading.Event,
    say: Callable[[str], None],
    patience: float = PATIENCE_SECONDS,
) -> int:
    """Be one of the other nodes until node 0 ends: run workers while it says so. Returns its exit status.

    Raises CaptureFailed where node 0 does not come or goes, or a worker here fails; UsageError where it means
    something else.
    """
    lines = _connect(node, dataset, stopping, say, patience)
    words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    gone, ended = threading.Event(), threading.Event()
    asked = False

    def listen() -> None:
        word: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            while not {"end", "refused"} & word.keys():
                words.put(word := lines.receive())
            return
        gone.set()
        _kill_workers(until=ended)

    def wait() -> dict[str, Any] | None:
        """Node 0's next word; None where there is none for now."""
        nonlocal asked
        if stopping.is_set() and not asked:
            asked = True
            with contextlib.suppress(OSError):
                lines.send({"stop": True})
        try:
            return words.get(timeout=SECONDS_BETWEEN_POLLS)
        except queue.Empty:
            if gone.is_set():
                raise CaptureFailed(f"node 0 ({node.place}) is gone; what it said stands in its own output") from None
            return None

    threading.Thread(target=listen, name="eyas-node-0", daemon=True).start()
    try:
        while True:
            word = wait()
            if word is None:
                continue
            if "refused" in word:
                raise UsageError(str(word["refused"]))
            if "end" in word:
                say(f"node {node.rank} of {node.num_nodes}: node 0 ended with exit status {int(word['end'])}")
                return int(word["end"])
            if word.get("run"):
                _run_workers(node, run, wait, words, gone)
    finally:
        ended.set()
        lines.close()


def _run_workers(
    node: Node,
    run: Callable[[], AbstractContextManager[Workers]],
    wait: Callable[[], dict[str, Any] | None],
    words: queue.SimpleQueue[dict[str, Any]],
    gone: threading.Event,
) -> None:
    """Until node 0's next word, which is left for whoever asks for it."""
    try:
        with run() as workers:
            word = wait()
            while word is None and not workers.have_failed():
                word = wait()
            if workers.have_failed() and (word is None or word.get("end")):
                raise CaptureFailed(f"a worker of node {node.rank} ended; what it said, if it could, stands above")
    except Exception as error:
        if gone.is_set():  # the workers were ended for it, which the engine calls a failure of theirs
            raise CaptureFailed(f"node 0 ({node.place}) is gone; what it said stands in its own output") from error
        raise
    if word is not None and "run" not in word:
        words.put(word)


def _connect(
    node: Node, dataset: Path, stopping: threading.Event, say: Callable[[str], None], patience: float
) -> _Lines:
    """The connection to node 0, once it has taken this node in."""
    deadline = time.monotonic() + patience
    say(f"node {node.rank} of {node.num_nodes}: looking for node 0 at {node.place}")
    while True:
        try:
            lines = _Lines(socket.create_connection((node.address, node.port), timeout=10))
            break
        except OSError as error:
            _end_if(stopping)
            if time.monotonic() > deadline:
                raise CaptureFailed(
                    f"node 0 is not at {node.place} after {patience:.0f} s ({error}): run the same command there with "
                    f"--node-rank 0, and give its address as --master-addr"
                ) from error
            time.sleep(SECONDS_BETWEEN_POLLS)
    try:
        lines.send({"node": node.rank, "means": dict(node.means)})
        word: dict[str, Any] = {}
        while not word:
            try:
                word = lines.receive(timeout=SECONDS_BETWEEN_POLLS)
            except TimeoutError:
                _end_if(stopping)
                if time.monotonic() > deadline:
                    raise
        if "sees" in word:
            mark = dataset / Path(str(word["sees"])).name
            until = time.monotonic() + SECONDS_TO_SEE
            while not (seen := mark.exists()) and time.monotonic() < until:
                time.sleep(SECONDS_BETWEEN_POLLS)
            lines.send({"seen": seen})
            return lines
    except (OSError, ValueError) as error:
        lines.close()
        raise CaptureFailed(f"node 0 ({node.place}) is gone; what it said stands in its own output") from error
    lines.close()
    if "end" in word:
        raise SystemExit(int(word["end"]))
    raise UsageError(str(word.get("refused", f"{node.place} does not speak as node 0 of eyas does")))


class _Lines:
    """A connection, as lines of JSON. One thread receives; several may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        for option in _KEEPALIVE:
            connection.setsockopt(*option)
        self._sending = threading.Lock()
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next line. Raises OSError where there is none, ValueError where it is not one of ours."""
        self._connection.settimeout(timeout)
        while b"\n" not in self._received:
            part = self._connection.recv(MOST_BYTES)
            if not part:
                raise ConnectionError("the connection ended")
            self._received += part
            if len(self._received) > MOST_BYTES:
                raise ValueError("a line is too long")
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line is no object")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes up who receives
        self._connection.close()


def _listening(node: Node) -> socket.socket:
    try:
        family = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((node.address, node.port), family=family)
    except OSError as error:
        raise UsageError(
            f"--master-addr {node.address}: node 0 cannot listen on {node.place} ({error}): give an address of this "
            f"machine, and a --master-port whose next port is free too"
        ) from error


def _difference(rank: int, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What node ``rank`` means otherwise than node 0; empty where nothing."""
    differs = [
        f"{name} is {theirs.get(name)!r} on node {rank} and {ours.get(name)!r} on node 0"
        for name in sorted({*ours, *theirs})
        if theirs.get(name) != ours.get(name)
    ]
    return f"the nodes differ: {'; '.join(differs)}" if differs else ""


def _end_if(stopping: threading.Event) -> None:
    if stopping.is_set():
        raise SystemExit(EXIT_STOPPED_EARLY)


def _exit_status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0 if error is None else 2 if isinstance(error, UsageError) else 1


def _kill_workers(*, until: threading.Event) -> None:
    """End this process's workers, those that are still to start too: they would wait for the others for ever.

    The engine then finds out by itself.
    """
    while not until.is_set():
        for child in multiprocessing.active_children():
            child.kill()
        until.wait(SECONDS_BETWEEN_POLLS)
