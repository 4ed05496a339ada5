"""Training-time test written plainly: one document at a time, one row at a time, autograd for every gradient.

Nothing here is packed, merged, chunked or shared with the product but the weights, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.train.shape import DraftShape


@dataclass
class Document:
    """One document: tokens, mask, taps, last hidden state (tap final)."""

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    features: Tensor  # [T, A*H]
    final: Tensor  # [T, H]


@dataclass
class Reference:
    """Sums by step."""

    loss: Tensor  # scalar: sum over steps of weight * mean
    loss_sums: list[Tensor]
    num_rows: list[int]
    accepted: list[int]
    reached: list[int]
    overlap: list[float]
    outside: list[float]
    hidden: list[list[Tensor]]  # document, step -> [T, D], what lm_head multiplies


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, d] at one position, by complex multiplication."""
    half = x.shape[-1] // 2
    turn = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def draft_step(shape: DraftShape, weights: Mapping[str, Tensor], embed: Tensor, hidden: Tensor, position: int,
               attend_to: list[list[tuple[Tensor, Tensor]]]) -> Tensor:  # fmt: skip
    """One row through all layers. attend_to: for each layer the (key, value) [kv_heads, d] it sees beside its own;
    its own is appended. embed and hidden [D] -> [D], before the final norm."""
    for i in range(shape.num_layers):
        w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{i}.")}
        residual = hidden
        if i == 0:
            normed = rms_norm(hidden, w["hidden_norm.weight"], shape.rms_norm_eps)
            residual = normed if shape.norm_before_residual else hidden
            x = torch.cat([rms_norm(embed, w["input_layernorm.weight"], shape.rms_norm_eps), normed])
        else:
            x = rms_norm(hidden, w["input_layernorm.weight"], shape.rms_norm_eps)
        query, key, value = (
            (w[f"self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim) for name in ("q", "k", "v")
        )
        query, key = rotate(query, position, shape.rope_theta), rotate(key, position, shape.rope_theta)
        attend_to[i].append((key, value))
        outputs = []
        for head in range(shape.num_heads):
            shared = head // (shape.num_heads // shape.num_kv_heads)
            scores = torch.stack([query[head] @ k[shared] for k, _ in attend_to[i]]) / math.sqrt(shape.head_dim)
            outputs.append(scores.softmax(0) @ torch.stack([v[shared] for _, v in attend_to[i]]))
        hidden = residual + w["self_attn.o_proj.weight"] @ torch.cat(outputs)
        y = rms_norm(hidden, w["post_attention_layernorm.weight"], shape.rms_norm_eps)
        gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
        hidden = hidden + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return hidden


def fuse(shape: DraftShape, weights: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """[A*H] -> [D]"""
    if shape.norm_before_fc:
        features = rms_norm(features, weights["input_norm.weight"], shape.rms_norm_eps)
    if shape.fc_norm:
        taps = features.view(shape.num_taps, -1)
        features = torch.cat(
            [rms_norm(tap, weights[f"fc_norm.{a}.weight"], shape.rms_norm_eps) for a, tap in enumerate(taps)]
        )
    return weights["fc.weight"] @ features


def run(
    shape: DraftShape,
    weights: Mapping[str, Tensor],
    documents: list[Document],
    target_head: Tensor,  # [V, H]
    draft_ids: Tensor,  # int64 [Vd]
    num_steps: int,
    loss: str,
    step_weights: list[float],
) -> Reference:
    """weights: the draft's by name, embed_tokens and lm_head among them."""
    losses: list[list[Tensor]] = [[] for _ in range(num_steps)]
    accepted, reached = [0] * num_steps, [0] * num_steps
    overlap, outside = [0.0] * num_steps, [0.0] * num_steps
    all_hidden = []
    for document in documents:
        length = len(document.input_ids)
        carried = [fuse(shape, weights, row) for row in document.features]
        seen: list[list[list[tuple[Tensor, Tensor]]]] = []  # row, layer -> own keys of steps 0..k
        per_step = []
        alive = [True] * length  # all former steps of this row accepted
        for k in range(num_steps):
            before = [[list(own) for own in row] for row in seen]
            outputs = []
            for t in range(length):
                token = int(document.input_ids[t + 1 + k]) if t + 1 + k < length else 0
                attend_to = [
                    [row[layer][0] for row in (before[:t] if k else seen[:t])] + (before[t][layer] if k else [])
                    for layer in range(shape.num_layers)
                ]
                out = draft_step(shape, weights, weights["embed_tokens.weight"][token], carried[t], t + k, attend_to)
                own = [layer[-1] for layer in attend_to]
                if k == 0:
                    seen.append([[pair] for pair in own])
                else:
                    for layer, pair in enumerate(own):
                        seen[t][layer].append(pair)
                outputs.append(out)
            heads = [rms_norm(out, weights["norm.weight"], shape.rms_norm_eps) for out in outputs]
            carried = heads if shape.norm_output else outputs
            per_step.append(torch.stack(heads))
            for t in range(length):
                if t + 2 + k >= length or not document.loss_mask[t + 2 + k]:
                    alive[t] = False
                    continue
                logits = target_head @ document.final[t + 1 + k]
                p_full = logits.softmax(-1)
                p, q = p_full[draft_ids], (weights["lm_head.weight"] @ heads[t]).softmax(-1)
                alpha = torch.minimum(p, q).sum()
                kl = (p * (p.log() - q.log())).sum()
                share = torch.exp(-3.0 * alpha.detach())
                losses[k].append({"kl": kl, "tv": 1 - alpha, "lk": share * kl + (1 - share) * (1 - alpha)}[loss])
                overlap[k] += float(alpha.detach())
                outside[k] += 1 - float(p.detach().sum())
                reached[k] += alive[t]
                alive[t] = alive[t] and int(draft_ids[q.argmax()]) == int(logits.argmax())
                accepted[k] += alive[t]
        all_hidden.append(per_step)
    sums = [torch.stack(values).sum() if values else torch.zeros(()) for values in losses]
    total = torch.stack(
        [w * s / max(len(values), 1) for w, s, values in zip(step_weights, sums, losses, strict=True)]
    ).sum()
    return Reference(
        loss=total, loss_sums=sums, num_rows=[len(values) for values in losses], accepted=accepted, reached=reached,
        overlap=overlap, outside=outside, hidden=all_hidden,
    )  # fmt: skip
