"""Losses and acceptance of a draft against the target's distribution, without logits ever being whole in memory.

Rows of the target are taken some thousand at a time. Their logits over the draft vocabulary are computed once and serve
every step: target row r judges draft row r-1-k at step k. The gradient with respect to the draft's hidden states is
computed in the forward, as fused linear cross-entropies do (Liger Kernel, arXiv 2410.10989), so nothing of the size
rows x vocabulary outlives its chunk.

With z the draft's logits and q = softmax(z) over the draft vocabulary, p the target's probabilities of the same ids
under its full vocabulary, truncated and not renormalised (the missing mass is the target's outside the draft
vocabulary, where no draft can be accepted), and alpha = sum min(p, q), the probability that speculative sampling
accepts (Leviathan et al., arXiv 2211.17192, section 3.1):

    kl   sum p (log p - log q)                    d/dz = q sum p - p
    tv   1 - alpha                                d/dz = q (sum q [q < p] - [q < p])
    lk   l kl + (1 - l) tv, l = exp(-3 alpha)     l held constant

``lk`` is the hybrid of Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding"
(arXiv 2602.23881), the weight per row as in speculators 0.9.0 (losses/eager.py, lk_hybrid_loss, eta = 3); SpecForge
(core/lk_loss.py, type "lambda") takes one weight for the batch.

Shapes: T rows of the batch, C of a chunk, R target rows, K steps, D the draft's hidden size, H the target's, V and Vd
the target's and the draft's vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from eyas.taps.errors import EyasError
from eyas.train.target_parts import TargetParts

LossName: TypeAlias = Literal["kl", "tv", "lk"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
LK_ETA = 3.0  # the paper's best hybrid
CHUNK_ROWS = 2048  # target rows whose logits exist at one time; 2048 x 32 000 in bf16 are 131 MB, and three such exist
_FULL_LOGITS = 2**26  # full-vocabulary logits at one time, where they are needed


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """How target rows become probabilities."""

    parts: TargetParts  # lm_head's rows of the draft vocabulary
    ids: Tensor  # int64 [Vd], the target's ids of the draft vocabulary, on the device
    last_hidden_is_final: bool  # whether the shards' last_hidden is tap `final`; else after:{L-1}
    full: TargetParts | None = None  # whole lm_head, where shards carry no target_top1 and target_lse

    def targets(self, hidden: Tensor, lse: Tensor | None, top1: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of last_hidden rows [C, H] and what is stored of them, lse and top1 [C]: logits of the draft vocabulary
        [C, Vd], full-vocabulary logsumexp [C], full-vocabulary argmax int64 [C]."""
        final = hidden if self.last_hidden_is_final else self.parts.final(hidden)
        logits = self.parts.logits(final)
        if lse is None or top1 is None:
            assert self.full is not None
            found_lse, found_top1 = _full_statistics(self.full, final)
            lse, top1 = (found_lse if lse is None else lse), (found_top1 if top1 is None else top1)
        return logits, lse, top1


def _full_statistics(full: TargetParts, final: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp (float32 at least) and argmax (int64) of the full-vocabulary logits of ``final`` [C, H]: [C] each."""
    sums, tops = [], []
    step = max(1, _FULL_LOGITS // len(full.head))
    for begin in range(0, len(final), step):
        logits = full.logits(final[begin : begin + step])  # [step, V]
        tops.append(logits.argmax(-1))
        sums.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1))
    return torch.cat(sums), torch.cat(tops)


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """What the steps of one batch are judged against."""

    last_hidden: Tensor  # [T, H]
    target_lse: Tensor | None  # float32 [T]
    target_top1: Tensor | None  # int64 [T]
    rows: Tensor  # int64 [R], target rows; -1 in padding
    valid: Tensor  # bool [K, R]: step k has a draft row for this target row
    weights: Tensor  # float [K], of a row's loss in the sum
    loss: LossName


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Of all steps of one batch, on the device."""

    loss: Tensor  # scalar, the weighted sum; differentiable
    loss_sums: Tensor  # [K], unweighted
    overlap_sums: Tensor  # [K], of alpha
    outside_sums: Tensor  # [K], of the target's mass outside the draft vocabulary
    correct: Tensor  # bool [K, T], by draft row: the draft's argmax is the target's


def steps_loss(hidden: list[Tensor], head_weight: Tensor, head: TargetHead, judged: LossRows) -> LossOutput:
    """hidden: for each step what lm_head multiplies, [T, D]; head_weight [Vd, D], its gradient accumulated in float32
    where it is trained. Raises EyasError where the shards lack the target's statistics and no full lm_head is given."""
    if (judged.target_lse is None or judged.target_top1 is None) and head.full is None:
        missing = "target_lse" if judged.target_lse is None else "target_top1"
        raise EyasError(f"these shards carry no {missing}: the target's whole lm_head is needed to train on them")
    loss, sums, correct = _StepsLoss.apply(head, judged, head_weight, *hidden)  # type: ignore[no-untyped-call]
    return LossOutput(
        loss=loss, loss_sums=sums[:, 0], overlap_sums=sums[:, 1], outside_sums=sums[:, 2], correct=correct
    )


class _StepsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: TargetHead, judged: LossRows, head_weight: Tensor, *hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, width = hidden[0].shape
        wide = torch.promote_types(hidden[0].dtype, torch.float32)
        weight = head_weight.to(hidden[0].dtype)  # [Vd, D]
        want_weight, want_hidden = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3:])
        d_weight = torch.zeros_like(head_weight, dtype=wide) if want_weight else None
        # One row more than the batch's takes what padding writes.
        d_hidden = [h.new_zeros(num_rows + 1, width) if want_hidden else None for h in hidden]
        sums = torch.zeros(len(hidden), 3, dtype=wide, device=weight.device)
        loss = torch.zeros((), dtype=wide, device=weight.device)
        correct = torch.zeros(len(hidden), num_rows + 1, dtype=torch.bool, device=weight.device)
        row_losses = _row_losses_on(weight.device.type)
        for begin in range(0, len(judged.rows), CHUNK_ROWS):
            rows = judged.rows[begin : begin + CHUNK_ROWS]  # [C]
            at = rows.clamp(min=0)
            logits, lse, top1 = head.targets(
                judged.last_hidden[at],
                None if judged.target_lse is None else judged.target_lse[at],
                None if judged.target_top1 is None else judged.target_top1[at],
            )
            for k, step in enumerate(hidden):
                valid = judged.valid[k, begin : begin + CHUNK_ROWS]  # [C]
                draft_rows = (rows - 1 - k).clamp(min=0)
                given = step[draft_rows]  # [C, D]
                values, gradient, best = row_losses(
                    given @ weight.T, logits, lse, valid, judged.weights[k], judged.loss, want_weight or want_hidden
                )
                sums[k] += values
                loss += values[0] * judged.weights[k]
                place = torch.where(valid, draft_rows, num_rows)
                correct[k, place] = valid & (head.ids[best] == top1)
                if (target := d_hidden[k]) is not None:
                    target[place] = gradient @ weight
                if d_weight is not None:
                    d_weight += gradient.T @ given
        kept = [d[:-1] for d in d_hidden if d is not None]
        ctx.save_for_backward(d_weight, *kept)
        ctx.mark_non_differentiable(sums, correct)
        return loss, sums, correct[:, :-1]

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_weight, *d_hidden = ctx.saved_tensors
        num_steps = len(ctx.needs_input_grad) - 3
        scaled = [d * d_loss.to(d.dtype) for d in d_hidden] or [None] * num_steps
        return None, None, None if d_weight is None else d_weight * d_loss, *scaled


def _row_losses(
    draft: Tensor, target: Tensor, lse: Tensor, valid: Tensor, weight: Tensor, loss: LossName, want_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """draft and target logits [C, Vd], lse [C], valid bool [C], weight scalar -> sums over valid rows of (loss, alpha,
    outside mass) [3]; gradient of weight * loss with respect to the draft's logits [C, Vd], in their dtype (empty
    without ``want_gradient``); the draft's argmax [C]. Elementwise work in float32 at least."""
    wide = torch.promote_types(draft.dtype, torch.float32)
    # Rows without a loss may hold anything, NaN in lse for one: they must not reach the sums through 0 * NaN.
    lse = torch.where(valid, lse.to(wide), target.amax(-1).to(wide))
    log_p = (target.to(wide) - lse[:, None]).clamp(max=0)  # recomputed logits may exceed the stored lse by rounding
    log_q = draft.to(wide).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    mass = p.sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    share = _kl_share(loss, alpha)
    losses = kl if share is None else share * kl + (1 - share) * (1 - alpha)
    rows = torch.stack([losses, alpha, (1 - mass).clamp(min=0)], dim=-1)  # [C, 3]
    sums = torch.where(valid[:, None], rows, 0).sum(0)
    best = draft.argmax(-1)
    if not want_gradient:
        return sums, draft.new_empty(0), best
    gradient = q * mass[:, None] - p
    if share is not None:
        below = (q < p).to(wide)
        d_tv = q * ((q * below).sum(-1, keepdim=True) - below)
        gradient = share[:, None] * gradient + (1 - share[:, None]) * d_tv
    return sums, (gradient * torch.where(valid, weight, 0)[:, None]).to(draft.dtype), best


def _kl_share(loss: LossName, alpha: Tensor) -> Tensor | None:
    """The weight of kl against tv for rows [C]; None: kl alone."""
    if loss == "kl":
        return None
    return torch.zeros_like(alpha) if loss == "tv" else torch.exp(-LK_ETA * alpha)


@functools.cache
def _row_losses_on(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """On CUDA fused: eager would pass over the logits some twenty times. The number of rows, which differs in the last
    chunk, becomes dynamic by itself; the vocabulary stays a constant."""
    return torch.compile(_row_losses, fullgraph=True) if device == "cuda" else _row_losses
