"""The sizes and options of an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.align.draft import DraftConfig, DraftError

_SIZES = (
    "hidden_size", "target_hidden_size", "num_taps", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "max_positions", "vocab_size", "draft_vocab_size",
)  # fmt: skip
_OPTIONS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
DEFAULT_ROPE_THETA = 10_000.0  # transformers', where a Llama config says nothing
_DEFAULT_NORM_EPS = 1e-6  # the same


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What the forward of a draft needs to know. Raises DraftError for sizes that make no draft.

    The four options mean what speculators 0.9.0 (models/eagle3/core.py) and vLLM 0.32 (models/llama_eagle3.py) mean.
    """

    hidden_size: int  # D, of the draft
    target_hidden_size: int  # H, of a tap
    num_taps: int  # A
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # as transformers' rope_parameters without rope_theta; None: no scaling
    max_positions: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # Vd
    fc_norm: bool = False  # EAGLE-3.1: a norm for each tap before fc
    norm_before_fc: bool = False  # one norm over the cat [A*H] before fc, ahead of fc_norm where both are on
    norm_output: bool = False  # EAGLE-3.1: the hidden state that goes into the next step is the normed one
    norm_before_residual: bool = False  # the first layer's residual is the normed hidden state

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise DraftError(f"draft: {name} is {getattr(self, name)}, expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise DraftError(f"draft: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise DraftError(f"draft: head_dim is {self.head_dim}, rotary embedding needs an even one")
        if self.draft_vocab_size > self.vocab_size:
            raise DraftError(f"draft: draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")

    @property
    def shares_target_width(self) -> bool:
        """Whether the target's embedding and lm_head fit the draft (D == H), which then keeps them frozen."""
        return self.hidden_size == self.target_hidden_size

    @classmethod
    def from_draft_config(cls, config: DraftConfig, num_taps: int) -> DraftShape:
        """Of a draft's config.json in either layout. Raises DraftError for what this draft model does not compute."""
        layer = config.layer
        for key in ("attention_bias", "mlp_bias"):
            if layer.get(key):
                raise DraftError(f"draft config: {key} is {layer[key]!r}, and eyas's draft has no biases")
        if (act := layer.get("hidden_act")) not in (None, "silu"):
            raise DraftError(f"draft config: hidden_act is {act!r}, expected 'silu'")
        rope = config.rope
        options = {name: bool(declared[1]) for name in _OPTIONS if (declared := config.declared(name)) is not None}
        return cls(
            hidden_size=config.hidden_size,
            target_hidden_size=config.target_hidden_size,
            num_taps=num_taps,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=float(layer.get("rms_norm_eps") or _DEFAULT_NORM_EPS),
            rope_theta=DEFAULT_ROPE_THETA if rope.theta is None else rope.theta,
            rope_scaling=rope.scaling,
            max_positions=config.max_positions or 2048,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size or config.vocab_size,
            **options,
        )
