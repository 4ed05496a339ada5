"""The processes of one capture: who this one is, and the few things that all of them agree on.

Ranks are started by capture/launch.py or by the user's own torchrun (several nodes); both set RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. A single process has none of them and needs no torch.distributed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from eyas.taps.errors import UsageError

Value = TypeVar("Value")

# Rank 0 may verify shards that a crash left behind, and large targets load slowly, while the others wait.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


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


class Ranks:
    """A context: inside it torch.distributed's default group spans all ranks (where there are several)."""

    def __init__(self, *, cuda: bool) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if is_launched() else 0
        self.world_size = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
        self._cuda = cuda
        self._store: Any = None
        self._counters: dict[str, int] = {}

    def __enter__(self) -> Ranks:
        if is_launched():
            import torch
            import torch.distributed as dist

            if self._cuda:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT)))
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if self._cuda else "gloo",
                store=dist.PrefixStore("ranks", store),
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            self._store = dist.PrefixStore("counters", store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_launched():
            import torch.distributed as dist

            dist.destroy_process_group()

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's ``value``, on every rank."""
        if self.world_size == 1:
            assert value is not None
            return value
        import torch.distributed as dist

        box: list[Value | None] = [value]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.broadcast(0)

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its value: no rank waits for another."""
        if self._store is not None:
            return int(self._store.add(name, amount))
        self._counters[name] = self._counters.get(name, 0) + amount
        return self._counters[name]
