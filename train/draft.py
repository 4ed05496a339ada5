"""The EAGLE-3 draft: fused taps and the next token's embedding in, a hidden state that is carried on out.

Module names are those of speculators 0.9.0 (models/eagle3/core.py), which vLLM loads too, so checkpoints need no table.

Shapes: N rows (of a batch, or of a decoding step), H the target's hidden size, A taps, D the draft's hidden size,
V the target's vocabulary, Vd the draft's.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.train.rope import apply_rotary
from eyas.train.shape import DraftShape

INIT_STD = 0.02  # of embedding and lm_head where they are the draft's own, as transformers'


class Attend(Protocol):
    """Owns the keys and values of earlier rows and steps."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, d], key and value [N, kv_heads, d], after RoPE -> [N, heads, d]."""
        ...


class RMSNorm(nn.Module):
    """As Llama's: normed in float32, scaled in the dtype of the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]"""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class Linear(nn.Linear):
    """Without bias, computed in the dtype of its input: float32 master weights are rounded where they are used."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, num_in] -> [N, num_out]"""
        return F.linear(x, self.weight.to(x.dtype))


class TargetLinear(Linear):
    """Uninitialised, for what will be loaded."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is: filling 10**8 numbers takes a second."""


class Attention(nn.Module):
    """Projections of a layer's attention; the attending itself is the caller's."""

    def __init__(self, shape: DraftShape, num_in: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Linear(num_in, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(num_in, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(num_in, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def project(self, x: Tensor, columns: slice) -> list[Tensor]:
        """x [N, D] times these columns of the weights: its share of query, key and value, [N, heads * d] each."""
        return [F.linear(x, proj.weight[:, columns].to(x.dtype)) for proj in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, shares: list[Tensor], cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        """shares: query, key and value before RoPE -> [N, D]"""
        query, key, value = (share.view(len(share), -1, self.head_dim) for share in shares)
        attended = attend(layer, apply_rotary(query, cos, sin), apply_rotary(key, cos, sin), value)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    """A Llama layer; the first attends over [norm(embedding), norm(hidden)]."""

    def __init__(self, shape: DraftShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if layer == 0:
            self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size * (2 if layer == 0 else 1))
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, tokens: list[Tensor], hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """tokens: of ``DraftModel.project``, hidden [N, D] -> [N, D]"""
        residual, width = hidden, hidden.shape[-1]
        if self.layer == 0:
            hidden = self.hidden_norm(hidden)
            residual = hidden if self.norm_before_residual else residual
            own = self.self_attn.project(hidden, slice(width, 2 * width))
            shares = [a + b for a, b in zip(tokens, own, strict=True)]
        else:
            shares = self.self_attn.project(self.input_layernorm(hidden), slice(width))
        hidden = residual + self.self_attn(shares, cos, sin, attend, self.layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class DraftModel(nn.Module):
    """An EAGLE-3 draft.

    Where D == H, ``embed_tokens`` and ``lm_head`` are the target's (the latter's rows of the draft vocabulary): frozen,
    and uninitialised until they are loaded. Otherwise they are the draft's own, initialised and trained.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        taps_width = shape.num_taps * shape.target_hidden_size
        own = not shape.shares_target_width
        weight = torch.empty(shape.vocab_size, shape.hidden_size)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size, _weight=weight, _freeze=not own)
        self.input_norm = RMSNorm(taps_width, shape.rms_norm_eps) if shape.norm_before_fc else None
        norms = [RMSNorm(shape.target_hidden_size, shape.rms_norm_eps) for _ in range(shape.num_taps)]
        self.fc_norm = nn.ModuleList(norms) if shape.fc_norm else None
        self.fc = Linear(taps_width, shape.hidden_size)
        self.layers = nn.ModuleList([DraftLayer(shape, layer) for layer in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = TargetLinear(shape.hidden_size, shape.draft_vocab_size)
        self.lm_head.requires_grad_(own)
        if own:
            for module in (self.embed_tokens, self.lm_head):
                nn.init.normal_(module.weight, std=INIT_STD)

    def use_target(self, embedding: Tensor, head: Tensor) -> None:
        """Take the target's embedding [V, D] and its lm_head's rows of the draft vocabulary [Vd, D] without copying, in
        their own dtype. For D == H."""
        for module, weight in ((self.embed_tokens, embedding), (self.lm_head, head)):
            assert module.weight.shape == weight.shape
            module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int [N], the target's ids -> [N, D]"""
        return self.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def fuse(self, features: Tensor) -> Tensor:
        """Taps side by side [N, A*H] -> [N, D], the hidden state of step 0."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return self.fc(features)  # type: ignore[no-any-return]

    def project(self, embeds: Tensor) -> list[Tensor]:
        """What embeds [N, D] add to the first layer's query, key and value: [N, heads * d] each. It does not depend on
        the hidden state, so that steps which see the same tokens in other rows can share it."""
        first = self.layers[0]
        assert isinstance(first, DraftLayer)
        return first.self_attn.project(first.input_layernorm(embeds), slice(embeds.shape[-1]))

    def step(self, tokens: list[Tensor], hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """``forward`` from the tokens' projections."""
        for layer in self.layers:
            hidden = layer(tokens, hidden, cos, sin, attend)
        return self.norm(hidden) if self.shape.norm_output else hidden

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """One draft step: embeds and hidden [N, D], cos and sin [N, head_dim] -> the hidden state to carry on [N, D]"""
        return self.step(self.project(embeds), hidden, cos, sin, attend)

    def head_input(self, carried: Tensor) -> Tensor:
        """[N, D]: what lm_head multiplies."""
        return carried if self.shape.norm_output else self.norm(carried)

    def logits(self, carried: Tensor) -> Tensor:
        """[N, Vd]"""
        return self.lm_head(self.head_input(carried))  # type: ignore[no-any-return]
