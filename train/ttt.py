"""Training-time test (EAGLE-3, arXiv 2503.01840): the draft is unrolled K steps, each on its own hidden states.

What stands in row t of a document at step k (tokens x, taps f, target logits p; p[r] predicts x[r+1]):

    row t                            0        1        2      ...   t
    hidden state, step 0             f[0]     f[1]     f[2]         f[t]           fused taps
    hidden state, step k             row t's own output of step k-1
    embedding, step 0                x[1]     x[2]     x[3]         x[t+1]
    embedding, step k                x[1+k]   x[2+k]   x[3+k]       x[t+1+k]
    RoPE position, step k            k        1+k      2+k          t+k            (any constant offset is the same)
    keys of step 0 attended to       0        0..1     0..2         0..t
    keys of step 1..k attended to    0        1        2            t              its own row's alone
    target row                       p[1+k]   p[2+k]   p[3+k]       p[t+1+k]
    token it predicts                x[2+k]   x[3+k]   x[4+k]       x[t+2+k]
    counts where loss_mask[t+2+k] is 1 and x[t+2+k] is in the same document

In decoding terms: the target has run up to t and emitted x[t+1]; step k guesses x[t+2+k] after its own guesses of
x[t+2] .. x[t+1+k], for which training puts the true tokens.

``loss_rows`` lists the target rows r = t+1+k once for all steps; they are the same for every k but for a document's
first K rows.

Shapes: T rows of the batch, R target rows, K steps, D the draft's hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.train.attention import Documents, StepAttention, prepare_documents
from eyas.train.draft import DraftModel
from eyas.train.loss import LossName, LossRows, TargetHead, steps_loss

if TYPE_CHECKING:
    from eyas.train.batches import Batch

ROW_MULTIPLE = 512  # of target rows where the device compiles for their number


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step, sums over this batch's rows that carry its loss: float scalars on the device."""

    loss: Tensor  # unweighted
    num_rows: Tensor
    greedy_accepted: Tensor  # rows whose argmax is the target's, as were those of all former steps of the same row
    greedy_reached: Tensor  # rows where all former steps were accepted; accepted / reached is conditional acceptance
    overlap: Tensor  # sum_v min(p, q): the acceptance of speculative sampling
    out_of_vocabulary: Tensor  # the target's mass outside the draft vocabulary


@dataclass(frozen=True, kw_only=True)
class TTTOutput:
    """Of one batch."""

    loss: Tensor  # scalar: over steps, the sum of weight * mean loss per row; differentiable
    steps: list[StepResult]


def loss_rows(loss_mask: Tensor, document: Tensor, *, multiple: int = ROW_MULTIPLE) -> Tensor:
    """Target rows of a batch: int64 [R], ascending, padded with -1 to a multiple. For the host, before the batch
    goes to the device: its length depends on the data.

    loss_mask: bool [T]; document: int [T], -1 in padding. Row r is one where loss_mask[r+1] is 1 and both r+1 and r-1
    are of the same document.
    """
    inside = (document[1:] == document[:-1]) & (document[1:] >= 0)  # r and r+1 of one document
    rows = torch.nonzero(inside[:-1] & inside[1:] & loss_mask[2:].bool()).flatten() + 1
    return F.pad(rows, (0, -len(rows) % multiple), value=-1)


def ttt_forward(
    model: DraftModel,
    batch: Batch,
    head: TargetHead,
    *,
    rows: Tensor,
    rotary: tuple[Tensor, Tensor],
    num_steps: int,
    loss: LossName = "kl",
    step_weights: Sequence[float] | None = None,
) -> TTTOutput:
    """Unroll ``num_steps`` steps on a batch and judge them; nothing waits for the device.

    rows: of ``loss_rows``, on the device. rotary: ``rotary_table`` of at least largest position + num_steps positions.
    step_weights: [num_steps], 1 each by default. Computed in the dtype of ``batch.features``; losses in float32.
    Raises EyasError where the batch lacks the target's statistics and ``head`` a full lm_head.
    """
    weights = [1.0] * num_steps if step_weights is None else list(step_weights)
    if len(weights) != num_steps:
        raise ValueError(f"{len(weights)} step weights for {num_steps} steps")
    unroll = _unroll_on(batch.features.device.type)
    hidden = unroll(
        model, batch.features, batch.input_ids, batch.position, *rotary, prepare_documents(batch.document), num_steps
    )
    valid = _valid(rows, batch.document, num_steps)  # [K, R]
    num_rows = valid.sum(-1)  # [K]
    scale = torch.tensor(weights, dtype=torch.float32).to(rows.device, non_blocking=True)
    judged = LossRows(
        last_hidden=batch.last_hidden,
        target_lse=batch.target_lse,
        target_top1=batch.target_top1,
        rows=rows,
        valid=valid,
        weights=scale / num_rows.clamp(min=1),
        loss=loss,
    )
    out = steps_loss(hidden, model.lm_head.weight, head, judged)
    steps = []
    accepted: Tensor | None = None  # bool [T], at all former steps
    for k in range(num_steps):
        reached = _scattered(valid[k], rows - 1 - k, len(batch.document))
        if accepted is not None:
            reached = reached & accepted
        accepted = reached & out.correct[k]
        steps.append(
            StepResult(
                loss=out.loss_sums[k],
                num_rows=num_rows[k].float(),
                greedy_accepted=accepted.sum().float(),
                greedy_reached=reached.sum().float(),
                overlap=out.overlap_sums[k],
                out_of_vocabulary=out.outside_sums[k],
            )
        )
    return TTTOutput(loss=out.loss, steps=steps)


def unroll(
    model: DraftModel,
    features: Tensor,
    input_ids: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    documents: Documents,
    num_steps: int,
) -> list[Tensor]:
    """What lm_head multiplies at each step, [T, D] each.

    features [T, A*H], input_ids and position int64 [T], cos and sin [P, head_dim]. Rows whose tokens lie beyond their
    document's end hold what no loss and no other row sees.
    """
    attend = StepAttention(documents, model.shape.num_layers)
    carried = model.fuse(features)
    tokens = model.project(model.embed(input_ids).to(carried.dtype))  # of x[t]
    outputs = []
    for k in range(num_steps):
        following = [_shifted(share, 1 + k) for share in tokens]  # of x[t+1+k]
        carried = model.step(following, carried, cos[position + k], sin[position + k], attend)
        outputs.append(model.head_input(carried))
    return outputs


def _shifted(x: Tensor, num_rows: int) -> Tensor:
    """Row t is x's row t + num_rows; zeros at the end."""
    return F.pad(x[num_rows:], (0, 0, 0, min(num_rows, len(x))))


@functools.cache
def _unroll_on(device: str) -> Callable[..., list[Tensor]]:
    """On CUDA all steps are one graph: weights are rounded to bf16 once, and norms, RoPE and merges fuse."""
    return torch.compile(unroll, dynamic=False, fullgraph=True) if device == "cuda" else unroll


def _valid(rows: Tensor, document: Tensor, num_steps: int) -> Tensor:
    """bool [K, R]: whether step k's draft row r-1-k is in the document of target row r."""
    draft_rows = rows - 1 - torch.arange(num_steps, device=rows.device)[:, None]  # [K, R]
    same = document[draft_rows.clamp(min=0)] == document[rows.clamp(min=0)]
    return same & (draft_rows >= 0)


def _scattered(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """bool [R] by row -> bool [T]; rows below 0 are dropped."""
    placed = torch.zeros(num_rows + 1, dtype=torch.bool, device=values.device)
    placed[torch.where(values, rows, num_rows)] = values
    return placed[:-1]
