"""The processes of one capture: who this one is, and the few things that all of them agree on.

Ranks are started by capture/launch.py or by the user's own torchrun (several nodes); both set RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. A single process has none of them and needs no torch.distributed.
"""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from eyas.taps.errors import UsageError

Value = TypeVar("Value")

# Rank 0 may verify shards that a crash left behind, and large targets load slowly, while the others wait.
TIMEOUT = timedelta(hours=2)
SECONDS_BETWEEN_POLLS = 0.02


def is_launched() -> bool:
    """Whether this process is one rank of a launch."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_world_size(*, tp: int, dp: int) -> None:
    """Refuse a launch by torchrun whose number of processes is not tp * dp. Raises UsageError."""
    if is_launched() and int(os.environ["WORLD_SIZE"]) != tp * dp:
        raise UsageError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, and --tp {tp} --dp {dp} needs {tp * dp}: "
            f"make the two agree"
        )


def open_store() -> Any:
    """The key-value store that all ranks of a launch share (torch.distributed.Store); rank 0 or torchrun hosts it."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(
        iter(rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT))
    )
    return store


class Ranks:
    """A context in which all ranks can agree. It goes over the store alone, so that torch.distributed's process groups
    are left to the engine.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"]) if is_launched() else 0
        self.world_size = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
        self._store: Any = None
        self._broadcasts = 0
        self._counters: dict[str, int] = {}

    def __enter__(self) -> Ranks:
        if self.world_size > 1:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            self._store = PrefixStore("session", open_store())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Rank 0 may host the store: it leaves last, unless somebody failed, which ends the launch anyway.
        if self._store is not None and error is None:
            self.count("left", 1)
            while self.rank == 0 and self.count("left") < self.world_size:
                time.sleep(SECONDS_BETWEEN_POLLS)

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's ``value``, on every rank."""
        if self._store is not None:
            key = f"broadcast-{self._broadcasts}"
            self._broadcasts += 1
            if self.rank == 0:
                self._store.set(key, pickle.dumps(value))
            else:
                value = pickle.loads(self._store.get(key))
        assert value is not None
        return value

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._store is not None:
            self._broadcasts += 1
            name = f"barrier-{self._broadcasts}"
            self.count(name, 1)
            while self.count(name) < self.world_size:
                time.sleep(SECONDS_BETWEEN_POLLS)

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its value: no rank waits for another."""
        if self._store is not None:
            return int(self._store.add(name, amount))
        self._counters[name] = self._counters.get(name, 0) + amount
        return self._counters[name]
