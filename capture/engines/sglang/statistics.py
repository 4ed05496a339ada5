"""target_top1 and target_lse where every rank of a group holds a part of the vocabulary's logits.

No rank ever holds all logits of a row: each reduces its own part, and the parts' maxima and sums are combined.

Shapes: K rows followed by a training target, H hidden_size, V vocabulary entries of this rank's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eyas.capture.engines.reduce_logits import reduce_logits, rows_at_once
from eyas.capture.engines.transformers.statistics import CHUNK_LOGITS

if TYPE_CHECKING:
    from torch import Tensor


class PartialHead:
    """This rank's part of lm_head, with the logit processing of SGLang's LogitsProcessor.

    layers/logits_processor.py of SGLang 0.5.9 to 0.5.23: logits are softcap(scale * lm_head(final)), and entries from
    the vocabulary's end on are padding.
    """

    def __init__(self, logits_processor: Any, lm_head: Any, vocab_size: int, group: Any) -> None:
        """``group``: SGLang's GroupCoordinator of the ranks that lm_head is split over."""
        self._group = group
        self._processor = logits_processor
        self._lm_head = lm_head
        shard = lm_head.shard_indices
        self._first = int(shard.org_vocab_start_index)
        self._num_entries = max(0, min(int(shard.org_vocab_end_index), vocab_size) - self._first)
        self._num_parts = int(lm_head.tp_size)

    def top1_and_lse(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax over the whole vocabulary (int32 [K]) and logsumexp (float32 [K]) of the rows ``final`` [K, H].

        Every rank of the group calls it with the same rows.
        """
        import torch

        largest = torch.empty(len(final), dtype=torch.float32, device=final.device)
        top1 = torch.empty(len(final), dtype=torch.int32, device=final.device)
        lse = torch.empty(len(final), dtype=torch.float32, device=final.device)
        step = rows_at_once(CHUNK_LOGITS, self._num_entries)
        for start in range(0, len(final), step):
            rows = slice(start, start + step)
            if self._num_entries == 0:  # more ranks than the vocabulary needs
                largest[rows], top1[rows], lse[rows] = float("-inf"), self._first, float("-inf")
                continue
            largest[rows], index, lse[rows] = reduce_logits(self._logits(final[rows]))  # [step] each
            top1[rows] = index.int() + self._first
        if self._num_parts == 1:
            return top1, lse
        return self._combined(largest, top1, lse)

    def _logits(self, final: Tensor) -> Tensor:
        logits = self._processor._compute_lm_head(final, self._lm_head)  # [K, V + padding]
        logits = logits[:, : self._num_entries]
        if self._processor.logit_scale is not None:
            logits = logits * self._processor.logit_scale
        cap = self._processor.final_logit_softcapping
        return (logits.float() / cap).tanh() * cap if cap else logits  # type: ignore[no-any-return]

    def _combined(self, largest: Tensor, top1: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of all ranks as one. Ids stay exact: those of a vocabulary fit a float64."""
        import torch
        import torch.distributed as dist

        own = torch.stack([largest.double(), top1.double(), lse.double()], dim=-1)  # [K, 3]
        gathered = [torch.empty_like(own) for _ in range(self._num_parts)]
        dist.all_gather(gathered, own, group=self._group.device_group)
        parts = torch.stack(gathered)  # [ranks, K, 3]
        best = parts[:, :, 0].argmax(0, keepdim=True)  # [1, K]; the lowest ids among equals: ranks are in their order
        chosen = parts[:, :, 1].gather(0, best)[0]  # [K]
        return chosen.int(), parts[:, :, 2].logsumexp(0).float()
