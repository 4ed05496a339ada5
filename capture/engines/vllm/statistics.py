"""target_top1 and target_lse where vLLM's logits are: on shards of the vocabulary, combined over the workers.

Shapes: K rows that predict a training target, H hidden_size, V this worker's rows of lm_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.reduce_logits import reduce_logits, rows_at_once
from eyas.capture.errors import TargetError
from eyas.capture.pump import Piece

if TYPE_CHECKING:
    from torch import Tensor

# Logits that exist at one time on a worker. On a GPU 2**28 of them are 512 MiB in bfloat16; on a CPU they should stay
# near the cache.
CHUNK_LOGITS = {"cuda": 2**28, "cpu": 2**22}


class Head:
    """The model's way from ``final`` to logits, as its own LogitsProcessor goes it."""

    def __init__(self, processor: Any, lm_head: Any, bias: Tensor | None) -> None:
        self._processor = processor
        self._lm_head = lm_head
        self._bias = bias
        shard = lm_head.shard_indices
        self._first_id = int(shard.org_vocab_start_index)
        # Rows beyond are padding, or an adapter's.
        self._num_ids = int(shard.org_vocab_end_index) - self._first_id
        self._tp_size = int(getattr(lm_head, "tp_size", 1))

    def top1_and_lse(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax (int32 [K]) and logsumexp (float32 [K]) of the full-vocabulary logits of ``final`` [K, H].

        A collective with tensor parallelism: every worker calls it with the same rows.
        """
        import torch

        parts = torch.empty(len(final), 3, dtype=torch.float32, device=final.device)  # largest, its id, logsumexp
        step = rows_at_once(CHUNK_LOGITS[final.device.type], self._num_ids)
        for start in range(0, len(final), step):
            largest, index, lse = reduce_logits(self._logits(final[start : start + step]))  # [step] each
            part = parts[start : start + step]
            part[:, 0] = largest
            part[:, 1] = index + self._first_id  # exact up to 2**24
            part[:, 2] = lse
        if self._tp_size > 1:
            from vllm.distributed import get_tp_group

            shards = get_tp_group().all_gather(parts.unsqueeze(0), 0)  # [tp, K, 3]
            best = shards[:, :, 0].argmax(0)  # [K]; ids ascend with the rank, so the lowest id wins a tie
            top1 = shards[:, :, 1].gather(0, best.unsqueeze(0))[0]
            return top1.to(torch.int32), shards[:, :, 2].logsumexp(0)
        return parts[:, 1].to(torch.int32), parts[:, 2].contiguous()

    @property
    def scale(self) -> float:
        return float(self._processor.scale)

    @property
    def softcap(self) -> float | None:
        cap = self._processor.soft_cap
        return None if cap is None else float(cap)

    def _logits(self, final: Tensor) -> Tensor:
        processor = self._processor
        if hasattr(processor, "_apply_head"):  # 0.32: honours an lm_head of another dtype
            logits = processor._apply_head(self._lm_head, final, self._bias)
        else:
            logits = self._lm_head.quant_method.apply(self._lm_head, final, bias=self._bias)
        logits = logits[:, : self._num_ids]
        if processor.soft_cap is not None:
            logits = (logits / processor.soft_cap).tanh() * processor.soft_cap
        if processor.scale != 1.0:
            logits = logits * processor.scale
        return logits  # type: ignore[no-any-return]


def head_of_call(processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Head:
    """The head that a call of ``processor`` used. Raises TargetError where it is of another kind."""
    named = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args, strict=False)) | kwargs
    lm_head = named.get("lm_head")
    if getattr(processor, "logits_as_input", False) or not hasattr(lm_head, "shard_indices"):
        raise TargetError(
            "target statistics: this model's logits are not made by an lm_head that eyas knows in vLLM: capture "
            "without them, with --no-target-statistics"
        )
    return Head(processor, lm_head, named.get("embedding_bias"))


def predicting_rows(pieces: Sequence[Piece], starts: Sequence[int]) -> npt.NDArray[np.int64]:
    """The rows of a batch whose next token is a training target, ascending. int64 [K]

    starts: the row at which each piece begins.
    """
    rows = [
        np.flatnonzero(piece.sample.loss_mask[piece.begin + 1 : piece.begin + piece.num_rows + 1]) + start
        for piece, start in zip(pieces, starts, strict=True)
    ]
    return np.concatenate(rows).astype(np.int64) if rows else np.empty(0, np.int64)
