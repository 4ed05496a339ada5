"""The ranks of a launch: tensor-parallel groups, who takes which batch, and which targets a plan can split."""

from __future__ import annotations

import itertools
import os
import re
import time
from typing import TYPE_CHECKING, Any

from eyas.capture.engines.transformers.load import text_config
from eyas.capture.errors import TargetError
from eyas.capture.ranks import SECONDS_BETWEEN_POLLS, TIMEOUT, open_store

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

# What a rule of transformers' tensor-parallel plan splits, by the module it names: (rule, attributes of the
# configuration of which each one that exists must divide, what they count).
_SPLIT_SIZES = (
    (
        r"(attn|attention)\.(q_proj|q_b_proj|kv_b_proj|qkv_proj|query_key_value)$",
        ("num_attention_heads",),
        "attention heads",
    ),
    (r"(attn|attention)\.(k_proj|v_proj|qkv_proj|query_key_value)$", ("num_key_value_heads",), "key/value heads"),
    (
        r"(mlp|feed_forward)\.(gate_proj|up_proj|gate_up_proj|fc1|c_fc|dense_h_to_4h)$",
        ("intermediate_size", "ffn_dim"),
        "channels of the MLP",
    ),
    (r"experts\.(gate_up_proj|gate_proj|up_proj)$", ("moe_intermediate_size",), "channels of an expert"),
    (r"shared_expert\.(gate_proj|up_proj)$", ("shared_expert_intermediate_size",), "channels of the shared expert"),
)


def check_tp(config: Any, tp: int) -> None:
    """Refuse a tensor-parallel size that the target cannot be split by, from its configuration alone.

    transformers' plan (``base_model_tp_plan``) splits attention by heads and MLPs and experts by channels. Raises
    TargetError naming each size that ``tp`` does not divide, and the sizes that fit.
    """
    if tp == 1:
        return
    text = text_config(config)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise TargetError(
            f"--tp {tp}: transformers has no tensor-parallel plan for {text.model_type}; "
            f"use --tp 1, with --dp {tp} for as many independent copies"
        )
    sizes = _split_sizes(text, plan)
    bad = {what: size for what, size in sizes.items() if size % tp}
    if bad:
        fitting = [n for n in range(1, max(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
        raise TargetError(
            f"--tp {tp} does not divide this target's {' and '.join(f'{size} {what}' for what, size in bad.items())}: "
            f"use --tp {' or '.join(str(n) for n in fitting[:8])}"
            + (f" (with --dp {tp} for as many independent copies)" if fitting == [1] else "")
        )


def _split_sizes(text: Any, plan: dict[str, str]) -> dict[str, int]:
    """What the plan splits and how large it is, e.g. {"attention heads": 9, "key/value heads": 3}."""
    sizes: dict[str, int] = {}
    for rule, attributes, what in _SPLIT_SIZES:
        if not any(re.search(rule, name) and "colwise" in style for name, style in plan.items()):
            continue
        for attribute in attributes:
            size = getattr(text, attribute, None)
            if isinstance(size, int) and size > 0:
                sizes[what] = size
    if "channels of an expert" not in sizes and any("experts." in name for name in plan):
        # Mixtral's experts are as wide as intermediate_size says.
        sizes["channels of an expert"] = getattr(text, "intermediate_size", 0)
    return sizes


class Ranks:
    """This process's place in a launch. Each ``tp`` consecutive ranks are one group, which runs one copy of the target.

    Every group is a torch.distributed world of its own (transformers' plan spans the whole default process group), so
    groups never wait for each other; what they share is one key-value store that hands out batches.
    """

    _joined = itertools.count()  # launches joined by this process: every rank makes the same calls

    def __init__(self, tp: int, device: torch.device) -> None:
        """Join the launch that the environment describes (torchrun's variables); a plain process is rank 0 of 1.

        Raises TargetError where the number of processes is no multiple of ``tp``.
        """
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.tp = tp
        self._store: Store | None = None
        self._control: ProcessGroup | None = None
        self._claimed: dict[str, int] = {}
        if self.world_size % tp:
            raise TargetError(
                f"--tp {tp}: this launch has {self.world_size} processes, expected a multiple of {tp} "
                f"(eyas capture starts them; under torchrun give --nproc-per-node)"
            )
        if self.world_size > 1:
            self._join(device)

    def _join(self, device: torch.device) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore(f"eyas/engine-{next(self._joined)}", open_store())  # type: ignore[attr-defined]
        if self.tp == 1:
            return
        on_cuda = device.type == "cuda"
        dist.init_process_group(
            backend="nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"group-{self.group}", self._store),  # type: ignore[attr-defined]
            rank=self.rank_in_group,
            world_size=self.tp,
            timeout=TIMEOUT,
            device_id=device if on_cuda else None,
        )
        # Decisions between batches go over the CPU: they must not wait for the device.
        self._control = dist.new_group(backend="gloo", timeout=TIMEOUT) if on_cuda else dist.group.WORLD

    @property
    def group(self) -> int:
        return self.rank // self.tp

    @property
    def num_groups(self) -> int:
        return self.world_size // self.tp

    @property
    def rank_in_group(self) -> int:
        return self.rank % self.tp

    def claim(self, counter: str, stop: bool) -> int | None:
        """The next number of ``counter`` that no group has taken yet, or None once any rank of this group says stop.

        Every rank of a group calls this in step and gets the same answer.
        """
        if self.tp == 1:
            return None if stop else self._take(counter)
        import torch
        import torch.distributed as dist

        number = self._take(counter) if self.rank_in_group == 0 else 0
        votes = torch.tensor([int(stop), number], dtype=torch.int64)  # [2]
        dist.all_reduce(votes, group=self._control)
        stops, number = votes.tolist()
        return None if stops else int(number)

    def _take(self, counter: str) -> int:
        if self._store is not None:
            return int(self._store.add(counter, 1)) - 1
        self._claimed[counter] = self._claimed.get(counter, 0) + 1
        return self._claimed[counter] - 1

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """``tensor`` of every rank of the group, in rank order; they must agree in shape and dtype."""
        if self.tp == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.tp)]
        dist.all_gather(parts, tensor)
        return parts

    def leave(self, *, failed: bool) -> None:
        """Take leave of the launch. Unless this rank failed, wait for the others: rank 0 may be hosting the store."""
        import torch.distributed as dist

        if self._store is not None and not failed:
            self._store.add("left", 1)
            if self.rank == 0:
                while self._store.add("left", 0) < self.world_size:
                    time.sleep(SECONDS_BETWEEN_POLLS)
        if dist.is_initialized() and not failed:  # which could wait for a rank that is gone
            dist.destroy_process_group()
        self._store = self._control = None
