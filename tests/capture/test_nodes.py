"""Several nodes of one launch, as threads here: who waits for whom, what is refused, and how each of them ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.capture.errors import CaptureFailed
from eyas.capture.nodes import Leader, Node, follow
from eyas.taps.errors import UsageError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Workers:
    """An engine's workers on another node."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failed = False
        self.running = threading.Event()

    @contextlib.contextmanager
    def run(self) -> Iterator[Workers]:
        self.log.append("start")
        self.running.set()
        yield self
        self.log.append("end")

    def have_failed(self) -> bool:
        return self.failed


class Follower:
    """Node 1, in a thread."""

    def __init__(self, node: Node, dataset: Path, **options: Any) -> None:
        self.workers = Workers()
        self.stopping = threading.Event()
        self.result: int | Exception | None = None
        self._arguments = (node, dataset, options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        node, dataset, options = self._arguments
        try:
            self.result = follow(node, dataset, self.workers.run, stopping=self.stopping, say=lambda _: None, **options)
        except SystemExit as error:
            self.result = int(str(error.code))
        except Exception as error:  # noqa: BLE001  looked at by the test
            self.result = error

    def end(self) -> int | Exception | None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self.result


@pytest.fixture
def node() -> Callable[..., Node]:
    port = free_port()

    def make(rank: int, num_nodes: int = 2, **means: str) -> Node:
        return Node(rank=rank, num_nodes=num_nodes, address="127.0.0.1", port=port, means={"--tp": "2", **means})

    return make


def lead(node: Node, dataset: Path, *, stopping: threading.Event | None = None, **options: Any) -> Leader:
    return Leader(node, dataset, stopping=stopping or threading.Event(), say=lambda _: None, **options)


def test_workers_run_while_node_0_says_so_and_all_end_alike(node: Callable[..., Node], tmp_path: Path) -> None:
    followers = [Follower(node(rank, 3), tmp_path / "out") for rank in (1, 2)]

    def capture(leader: Leader) -> None:
        for _ in range(2):  # a capture whose first samples are checked starts the engine twice
            leader.start()
            for follower in followers:
                assert follower.workers.running.wait(60)
                follower.workers.running.clear()
            leader.stop()
        raise SystemExit(75)

    with pytest.raises(SystemExit), lead(node(0, 3), tmp_path / "out") as leader:
        capture(leader)
    for follower in followers:
        assert follower.end() == 75
        assert follower.workers.log == ["start", "end"] * 2
    assert list((tmp_path / "out").iterdir()) == []


def test_a_node_that_is_asked_to_stop_has_node_0_stop(node: Callable[..., Node], tmp_path: Path) -> None:
    asked = threading.Event()
    follower = Follower(node(1), tmp_path)
    with lead(node(0), tmp_path, stopping=asked) as leader:
        leader.start()
        assert follower.workers.running.wait(60)
        follower.stopping.set()
        assert asked.wait(60)
        leader.stop()
    assert follower.end() == 0


def test_where_a_worker_of_another_node_fails_both_say_so(node: Callable[..., Node], tmp_path: Path) -> None:
    follower = Follower(node(1), tmp_path)

    def capture(leader: Leader) -> None:
        leader.start()
        assert follower.workers.running.wait(60)
        follower.workers.failed = True
        follower.end()
        while not leader._gone:
            time.sleep(0.01)
        raise RuntimeError("the engine lost its workers")

    with pytest.raises(CaptureFailed, match="node 1 is gone"), lead(node(0), tmp_path) as leader:
        capture(leader)
    assert "a worker of node 1 ended" in str(follower.end())


def test_where_node_0_dies_the_others_end(node: Callable[..., Node], tmp_path: Path) -> None:
    follower = Follower(node(1), tmp_path)
    with lead(node(0), tmp_path) as leader:
        leader.start()
        assert follower.workers.running.wait(60)
        leader._close()  # as the kernel does it for a process that is killed
        assert "is gone" in str(follower.end())


def test_nodes_that_mean_something_else_are_refused_with_the_difference(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    follower = Follower(node(1, taps="after:1"), tmp_path)
    with pytest.raises(UsageError, match="taps is 'after:1' on node 1 and 'after:2' on node 0"):
        lead(node(0, taps="after:2"), tmp_path).__enter__()
    assert isinstance(follower.end(), UsageError)
    assert "taps is 'after:1' on node 1" in str(follower.end())


def test_a_folder_that_is_not_shared_is_refused(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.capture.nodes.SECONDS_TO_SEE", 1.0)
    follower = Follower(node(1), tmp_path / "mine")
    with pytest.raises(UsageError, match="give an OUT that all nodes share"):
        lead(node(0), tmp_path / "its").__enter__()
    assert "give an OUT that all nodes share" in str(follower.end())


def test_who_does_not_come_is_named(node: Callable[..., Node], tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed, match="node 1, node 2 did not come to"):
        lead(node(0, 3), tmp_path, patience=0.3).__enter__()
    with pytest.raises(CaptureFailed, match="node 0 is not at"):
        follow(node(1), tmp_path, Workers().run, stopping=threading.Event(), say=lambda _: None, patience=0.3)


def test_a_signal_ends_the_wait_for_the_others(node: Callable[..., Node], tmp_path: Path) -> None:
    follower = Follower(node(1, 3), tmp_path)
    stopping = threading.Event()
    timer = threading.Timer(1.0, stopping.set)
    timer.start()
    with pytest.raises(SystemExit, match="75"):
        lead(node(0, 3), tmp_path, stopping=stopping).__enter__()
    assert follower.end() == 75
    alone = Follower(node(1), tmp_path)  # and nobody comes
    alone.stopping.set()
    assert alone.end() == 75


def test_strangers_are_hung_up_on(node: Callable[..., Node], tmp_path: Path) -> None:
    def knock() -> None:
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"node": "x"}\n', b"x" * 70_000):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", node(0).port), timeout=10) as stranger:
                        stranger.sendall(content)
                        with contextlib.suppress(OSError):
                            stranger.recv(1)
                    break
                except ConnectionRefusedError:
                    continue

    follower: list[Follower] = []
    thread = threading.Thread(target=lambda: (knock(), follower.append(Follower(node(1), tmp_path))), daemon=True)
    thread.start()
    with lead(node(0), tmp_path):
        pass
    thread.join(60)
    assert follower[0].end() == 0


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_wrong_usage(node: Callable[..., Node], rank: int) -> None:
    with pytest.raises(UsageError, match="--node-rank"):
        node(rank)
