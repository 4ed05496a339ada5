"""Rotary tables are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.align.draft import DraftConfig
from eyas.train.rope import apply_rotary, rotary_table
from eyas.train.shape import DraftShape
from tests.train.made_drafts import make_shape

DIM = 16
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope", "short_factor": [1.0] * (DIM // 2), "long_factor": [2.0] * (DIM // 2),
        "original_max_position_embeddings": 64, "factor": 4.0,
    },
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"] if scaling else "default")
@pytest.mark.parametrize("length", [40, 256, 300])
def test_table_equals_transformers(scaling: dict[str, Any] | None, length: int) -> None:
    shape = make_shape(head_dim=DIM, max_positions=256, rope_theta=5000.0, rope_scaling=scaling)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=DIM, max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **(scaling or {"rope_type": "default"})},
    )  # fmt: skip
    positions = torch.arange(length)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    for ours, theirs in zip(rotary_table(shape, length), expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs[0])


def test_rotation_equals_transformers() -> None:
    cos, sin = rotary_table(make_shape(head_dim=DIM), 7)
    x = torch.randn(7, 4, DIM, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected[0].transpose(0, 1))
    assert apply_rotary(x.bfloat16(), cos, sin).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_both_places_of_a_config(keys: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 29}
    shape = DraftShape.from_draft_config(DraftConfig({**sizes, **keys, "norm_output": True, "fc_norm": True}), 3)
    assert (shape.rope_theta, shape.rope_scaling) == (5000.0, {"rope_type": "linear", "factor": 4.0})
    assert (shape.fc_norm, shape.norm_before_fc, shape.norm_output, shape.norm_before_residual) == (1, 0, 1, 0)
    assert (shape.num_kv_heads, shape.head_dim, shape.num_layers, shape.draft_vocab_size) == (4, 4, 1, 29)
