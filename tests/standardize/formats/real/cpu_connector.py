"""vLLM's ExampleHiddenStatesConnector with the one step replaced that needs CUDA, the copy from the device.

What is written, where and when is its own. For golden files and tests alone: named to vLLM by kv_connector_module_path.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class _Copied:
    """In place of the CUDA event that tells that the copy is there."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]
    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        event = self._req_copy_events[pending.req_id] = _Copied()
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
