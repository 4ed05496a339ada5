"""What the driver and SGLang's worker processes say to each other, and the socket they say it over.

The driver listens on a Unix socket in a folder of its own; every worker connects while it builds its model and stays
connected. Token ids and masks go to the workers, what became of samples comes back; tensors only in the self-test.
When either end closes, the other knows that its peer is gone.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import tempfile
import threading
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.base import Event, Sink
from eyas.shards.sample import TokenSample

ENVIRONMENT = "EYAS_SGLANG"
EVERY = -1  # in place of a member: all of them
RID_PREFIX = "eyas-"  # of the ids of our requests; SGLang's own (warmups, health checks) have others


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a worker process has to know before there is a connection; it stands in the environment."""

    socket: str
    key: str  # hex
    architecture: str  # of the target, as config.json names it
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    taps: tuple[str, ...]
    last_hidden: str | None
    aux_taps: tuple[str, ...]  # those that SGLang's own EAGLE-3 capture gives, ascending
    aux_ids: tuple[int, ...]  # how SGLang names them for this model
    target_statistics: bool
    # SGLang's own capture is what is looked at: every after:j is then the sum of a layer's outputs instead.
    from_layers: bool = False

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Place | None:
        text = os.environ.get(ENVIRONMENT)
        if text is None:
            return None
        fields: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A worker has built its model."""

    pid: int
    member: int  # its rank among those that hold the same rows and share their writing
    logit_scale: float
    logit_softcap: float | None


@dataclass(frozen=True, kw_only=True)
class Start:
    """Open the shard writer."""

    sink: Sink
    rank: int
    metadata: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """A request follows."""

    rid: str
    sample: TokenSample
    member: int | None  # which member writes it, or EVERY; None: all send its tensors to the driver


@dataclass(frozen=True, kw_only=True)
class Drop:
    """This request failed: forget it."""

    rid: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Everything was captured: seal it; or, when aborted, leave what is not sealed."""

    abort: bool


@dataclass(frozen=True, kw_only=True)
class Captured:
    """All rows of a request are on their way to a shard."""

    rid: str


@dataclass(frozen=True, kw_only=True)
class Array:
    """A tensor's bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What one member captured of a request of the self-test."""

    rid: str
    member: int
    columns: dict[str, Array]  # by tap: [T, H]
    target_lse: Array | None  # [T]


@dataclass(frozen=True, kw_only=True)
class Happened:
    """What became of samples."""

    event: Event


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The writer is closed."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The worker cannot go on capturing."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A worker's connection closed."""


class Hub:
    """The driver's end: all workers' connections. Messages arrive on ``inbox`` as (worker's number, message)."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.key = secrets.token_bytes(32)
        self._folder = tempfile.mkdtemp(prefix="eyas-")  # only this user may enter it
        self.socket = str(Path(self._folder) / "workers")
        self._listener = Listener(self.socket, family="AF_UNIX", authkey=self.key)
        self._connections: list[Connection] = []
        self._closed = False
        threading.Thread(target=self._accept, name="eyas-accept", daemon=True).start()

    def broadcast(self, message: Any) -> None:
        """To every worker. One that is gone is found out by its reader."""
        for number in range(len(self._connections)):
            self.send(number, message)

    def send(self, number: int, message: Any) -> None:
        try:
            self._connections[number].send(message)
        except OSError:
            self.inbox.put((number, Gone()))

    def close(self) -> None:
        """Hang up on every worker."""
        self._closed = True
        for connection in self._connections:
            connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue
            except OSError:  # the listener is closed
                return
            number = len(self._connections)
            self._connections.append(connection)
            threading.Thread(target=self._read, args=(number, connection), name="eyas-worker", daemon=True).start()

    def _read(self, number: int, connection: Connection) -> None:
        try:
            while True:
                self.inbox.put((number, connection.recv()))
        except (EOFError, OSError):
            self.inbox.put((number, Gone()))


def connect(place: Place) -> Connection:
    """A worker's connection to the driver."""
    return Client(place.socket, family="AF_UNIX", authkey=bytes.fromhex(place.key))


def to_array(tensor: Any) -> Array:
    """A tensor's bytes, whatever its dtype."""
    import torch

    host = tensor.detach().cpu().contiguous()
    data = host.view(torch.uint8) if host.dim() else host.reshape(1).view(torch.uint8)
    return Array(dtype=str(host.dtype).removeprefix("torch."), shape=tuple(host.shape), data=data.numpy().tobytes())


def from_array(array: Array) -> Any:
    """The tensor that ``array`` was made from."""
    import torch

    data: npt.NDArray[np.uint8] = np.frombuffer(array.data, dtype=np.uint8).copy()
    return torch.from_numpy(data).view(getattr(torch, array.dtype)).view(array.shape)
