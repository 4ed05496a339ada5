"""Rotary position tables, for every scaling that transformers knows."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.train.shape import DraftShape


def rotary_table(shape: DraftShape, num_positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 .. num_positions - 1: float32 [P, head_dim] each, as transformers' Llama makes them.

    Scalings whose frequencies depend on the length of the sequence (dynamic, longrope) take it to be
    ``num_positions``.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(shape.rope_scaling or {})
    kind = scaling.get("rope_type", "default")
    positions = torch.arange(num_positions, dtype=torch.float32)
    factor = 1.0  # on cos and sin: yarn's and longrope's attention factor
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = 1.0 / shape.rope_theta**exponents  # [head_dim / 2]
    else:
        config = LlamaConfig(
            hidden_size=shape.num_heads * shape.head_dim,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters={"rope_theta": shape.rope_theta, **scaling},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=num_positions)
    angles = torch.outer(positions, frequencies).repeat(1, 2)  # [P, head_dim]
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, heads, d] by cos and sin [N, d], the two halves of d being the planes' coordinates (Llama, NeoX).

    Computed in float32 at least; returned in x's dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos[:, None] + turned * sin[:, None]).to(x.dtype)
