"""Tiny random targets of many families, and what a capture needs around an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from eyas.capture.engines.base import EngineSettings, Forwarded, Rejected, Sealed, Sink, Work
from eyas.capture.engines.transformers.engine import TransformersEngine
from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TokenizerIdentity, create_or_match
from eyas.shards.sample import TokenSample, sample_id
from eyas.taps.notation import FINAL, after

VOCAB = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}


def _llama() -> Any:
    return transformers.LlamaConfig(**TEXT)


def _longrope() -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 5.0, 7.0, 9.0],
        "original_max_position_embeddings": 10,
    }
    return transformers.Phi3Config(**TEXT, rope_parameters=rope, original_max_position_embeddings=10)


FAMILIES: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(**TEXT, head_dim=8),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3MoeForCausalLM": lambda: transformers.Qwen3MoeConfig(**TEXT, **MOE, head_dim=8),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **TEXT, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8
    ),
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **(TEXT | {"num_key_value_heads": 4}),
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(
        **TEXT, head_dim=8, sliding_window=8, final_logit_softcapping=0.5
    ),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=8),
    "CohereForCausalLM": lambda: transformers.CohereConfig(**TEXT, logit_scale=0.0625),
    "GraniteForCausalLM": lambda: transformers.GraniteConfig(**TEXT, logits_scaling=3.0),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "OPTForCausalLM": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "PhiForCausalLM": lambda: transformers.PhiConfig(**TEXT),  # a bias in lm_head
    "Phi3ForCausalLM": _longrope,
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "sliding_window": 8},
        vision_config=VISION | {"image_size": 16, "patch_size": 8},
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        mm_tokens_per_image=4,
    ),
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=16, patch_size=8, projection_dim=16),
        image_token_index=90,
    ),
    "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 4, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
    ),
}


def build_target(folder: Path, family: str, change: Callable[[Any], None] | None = None) -> Path:
    """A tiny random checkpoint of ``family``; ``change`` may edit the model before it is saved."""
    torch.manual_seed(0)
    model = getattr(transformers, family)(FAMILIES[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh weights are so small that all layers would be alike; norms at exactly 1 or 0 hide a missed scale.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return folder


def token_samples(lengths: Sequence[int], seed: int = 0) -> list[TokenSample]:
    """Random samples of those lengths; about half of their tokens are training targets. Ids below 90 are plain text
    in every family."""
    rng = np.random.default_rng(seed)
    return [tokens_sample(rng.integers(3, 90, length), rng.integers(0, 2, length)) for length in lengths]


def tokens_sample(input_ids: npt.ArrayLike, loss_mask: npt.ArrayLike | None = None) -> TokenSample:
    """A sample of those ids, every one of them a training target unless said otherwise."""
    ids = np.array(input_ids, dtype=np.int32)
    mask = np.ones(len(ids), dtype=np.uint8) if loss_mask is None else np.array(loss_mask, dtype=np.uint8)
    return TokenSample(sample_id=sample_id(ids, mask), input_ids=ids, loss_mask=mask)


def work_of(samples: Sequence[TokenSample]) -> Work:
    return Work(
        source=samples,
        rows=np.arange(len(samples), dtype=np.int64),
        lengths=np.array([sample.num_tokens for sample in samples], dtype=np.int64),
    )


def sink_for(engine: TransformersEngine, settings: EngineSettings, dataset: Path) -> Sink:
    identity = DatasetIdentity(
        stage="captured",
        taps=settings.taps,
        last_hidden=settings.last_hidden,
        dtype=settings.dtype,
        codec="raw",
        target_statistics=settings.target_statistics,
        target=engine.target,
        tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
        prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=1),
    )
    create_or_match(dataset, identity)
    return Sink(dataset=dataset, identity=identity, worker="test", shard_bytes=1 << 16, codec_threads=1)


class Captured:
    """The outcome of one capture: the dataset as read back, and the engine's events."""

    def __init__(self, dataset: Path, events: list[Any], target: Any) -> None:
        self.dataset = Dataset.open(dataset)
        self.events = events
        self.target = target
        self.rejects = {event.sample_id: event.reason for event in events if isinstance(event, Rejected)}
        self.sealed_ids = [i for event in events if isinstance(event, Sealed) for i in event.shard.sample_ids]
        self.forwarded = sum(event.num_tokens for event in events if isinstance(event, Forwarded))


def run_capture(
    target: Path,
    dataset: Path,
    samples: Sequence[TokenSample],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    self_test: bool = True,
    **options: Any,
) -> Captured:
    settings = EngineSettings(
        target=str(target),
        **{"taps": (after(0), after(1), FINAL), "last_hidden": after(3), "dtype": "float32", "device": "cpu"} | options,
    )
    with TransformersEngine(settings) as engine:
        if self_test:
            engine.self_test(samples[:4])
        events = list(engine.capture(work_of(samples), sink_for(engine, settings, dataset), should_stop))
        identity = engine.target
    return Captured(dataset, events, identity)
