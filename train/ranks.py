"""The processes of one training run: torch.distributed's groups, and the little that all ranks agree on.

Ranks are started by ``--dp N`` (capture/launch.py) or by the user's own torchrun; both set RANK and WORLD_SIZE.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from eyas.capture.ranks import is_launched

# Rank 0 reads every shard's header, or writes a checkpoint, while the others wait.
TIMEOUT = timedelta(minutes=60)


class Ranks:
    """A context in which this process is one of ``world_size`` ranks; of one where nobody launched it."""

    def __init__(self, device_type: str) -> None:
        launched = is_launched()
        self.rank = int(os.environ["RANK"]) if launched else 0
        self.world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if launched else 0
        self.device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
        self._host_group: dist.ProcessGroup | None = None

    def __enter__(self) -> Ranks:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            if self.device.type == "cuda":
                dist.init_process_group("nccl", timeout=TIMEOUT, device_id=self.device)
                self._host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            else:
                dist.init_process_group("gloo", timeout=TIMEOUT)
                self._host_group = dist.group.WORLD
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure the other ranks are in some collective: destroying the group would wait for them.
        if self.world_size > 1 and error is None:
            self.barrier()
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every rank, on the host."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Waits for every rank, on the host and not on the GPU."""
        if self.world_size == 1:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, group=self._host_group)
        return bool(found.item())

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` summed over all ranks, in place, on the device and without waiting for it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values
