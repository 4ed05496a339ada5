"""target_top1 and target_lse: what a trainer needs of the target's full-vocabulary logits.

Shapes: N tokens, K of them followed by a training target, H hidden_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.base import TargetOutline
from eyas.capture.engines.reduce_logits import reduce_logits, rows_at_once
from eyas.capture.engines.transformers.load import text_config
from eyas.capture.engines.transformers.locate import TextStack, last_hidden_state, probe_ids

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# Logits that exist at one time: 2**26 of them are 256 MiB in float32.
CHUNK_LOGITS = 2**26

# Per-token relative L2 between our logits and the target's own. The arithmetic is the same up to the order of the
# scale and to the shape of the matrix product, so this is rounding noise.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Head:
    """The target's way from its last hidden state to logits: softcap(scale * lm_head(final)), lm_head's bias included.

    softcap(x) = softcap * tanh(x / softcap) (Gemma 2); scale as in Cohere (``logit_scale``) and Granite
    (1 / ``logits_scaling``). Rows of lm_head beyond the vocabulary are left out.
    """

    lm_head: Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, final: Tensor) -> Tensor:
        """Full-vocabulary logits of ``final`` [N, H]: [N, V] in the target's own dtype, as its forward gives them."""
        logits = self.lm_head(final)[..., : self.vocab_size]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits  # type: ignore[no-any-return]

    def top1_and_lse(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax (int32 [K], the lowest id among equals) and logsumexp at temperature 1 (float32 [K]) of the logits
        of ``final`` [K, H], in chunks of rows."""
        import torch

        top1 = torch.empty(len(final), dtype=torch.int32, device=final.device)
        lse = torch.empty(len(final), dtype=torch.float32, device=final.device)
        step = rows_at_once(CHUNK_LOGITS, self.vocab_size)
        for start in range(0, len(final), step):
            rows = slice(start, start + step)
            _, top1[rows], lse[rows] = reduce_logits(self.logits(final[rows]))  # [step] each
        return top1, lse


def predicting_rows(loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The rows t of a sample with loss_mask[t + 1] == 1: those whose logits predict a training target. int64 [K]"""
    return np.flatnonzero(loss_mask[1:]).astype(np.int64)


def find_head(model: Any, stack: TextStack, outline: TargetOutline) -> tuple[Head, float]:
    """How ``model`` post-processes its logits, and the largest per-token relative L2 error of doing so ourselves.

    Models apply the same few attributes of their configuration in different ways (Granite divides by
    ``logits_scaling``, HyperCLOVA X multiplies), so each way is tried on a short probe and the closest to the model's
    own logits is taken.
    """
    import torch

    config = text_config(outline.config)
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value not in (0, 1):
            scales += [float(value), 1.0 / float(value)]
    softcaps: list[float | None] = [None]
    cap = getattr(config, "final_logit_softcapping", None)
    if isinstance(cap, (int, float)) and cap > 0:
        softcaps.append(float(cap))

    probe = probe_ids(outline, model.device)
    with torch.inference_mode():
        own = model(input_ids=probe, use_cache=False).logits[0].float()  # [T, rows]
        final = last_hidden_state(stack.text_model(input_ids=probe, use_cache=False))[0]  # [T, H]
        own = own[:, : outline.vocab_size]
        tried = []
        for scale in scales:
            for softcap in softcaps:
                head = Head(lm_head=stack.lm_head, vocab_size=outline.vocab_size, scale=scale, softcap=softcap)
                difference = (head.logits(final).float() - own).norm(dim=-1)  # [T]
                error = float((difference / own.norm(dim=-1).clamp_min(1e-20)).max())
                tried.append((error, head))
    error, head = min(tried, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))
    return head, error
