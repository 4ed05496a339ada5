"""Datasets and draft checkpoints made on the spot, right by default, each with one thing that a test makes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.align.verdict import Finding, Report
from eyas.shards.identity import (
    DatasetIdentity,
    PreparedIdentity,
    TargetIdentity,
    TokenizerIdentity,
    create_or_match,
)
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import parse_tap, parse_taps

H, VOCAB, HEADS, HEAD_DIM, KV_HEADS, WIDTH = 16, 96, 4, 4, 2, 32


def make_identity(
    taps: str,
    *,
    model_class: str = "LlamaForCausalLM",
    num_layers: int = 32,
    last_hidden: str | None = None,
    dtype: str = "bfloat16",
    target: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> DatasetIdentity:
    """A dataset's identity, with hidden size H and VOCAB ids."""
    facts: dict[str, Any] = {
        "name": "/nowhere/target",
        "revision": None,
        "config_hash": "0" * 32,
        "weights_hash": None,
        "model_class": model_class,
        "num_layers": num_layers,
        "hidden_size": H,
        "vocab_size": VOCAB,
        "weight_dtype": dtype,
        "quantization": None,
        "final_norm": "LlamaRMSNorm",
        "final_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "logit_softcap": None,
        "lm_head_bias": False,
        "lm_head_rows": VOCAB,
    }
    hashes = {"files_hash": "1" * 32, "chat_template_hash": "2" * 32, "probe_hash": "3" * 32}
    return DatasetIdentity(
        stage="captured",
        taps=parse_taps(taps),
        last_hidden=parse_tap(last_hidden or f"after:{num_layers - 1}"),
        dtype=dtype,
        codec="raw",
        target_statistics=False,
        target=TargetIdentity(**{**facts, **(target or {})}),
        tokenizer=TokenizerIdentity(**{**hashes, **(tokenizer or {})}),
        prepared=PreparedIdentity(fingerprint="4" * 32, num_samples=1),
    )


def make_sample(
    identity: DatasetIdentity,
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    seed: int = 0,
    spoil: Callable[[Tensor], None] | None = None,
) -> Sample:
    """A sample with random hidden states; ``spoil`` may write into its features [T, A, H]."""
    draw = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, identity.dtype)
    features = torch.randn(len(ids), len(identity.taps), H, generator=draw).to(dtype)  # [T, A, H]
    if spoil is not None:
        spoil(features)
    input_ids, loss_mask = torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)
    return Sample(
        sample_id=sample_id(input_ids.numpy(), loss_mask.numpy()),
        input_ids=input_ids,
        loss_mask=loss_mask,
        features=features.flatten(1),
        last_hidden=None if identity.last_hidden is None else torch.randn(len(ids), H, generator=draw).to(dtype),
        target_top1=None,
        target_lse=None,
    )


def make_dataset(
    folder: Path, identity: DatasetIdentity, samples: Sequence[Sample] | None = None, *, worker: str = "made-0"
) -> Path:
    """A sealed dataset; of six random samples where none are given."""
    if samples is None:
        draw = np.random.default_rng(0)
        samples = [
            make_sample(identity, draw.integers(0, VOCAB, 12 + n).tolist(), [0] * 4 + [1] * (8 + n), seed=n)
            for n in range(6)
        ]
    create_or_match(folder, identity)
    with ShardWriter(folder, identity=identity, worker=worker, metadata={"engine": "made"}) as writer:
        for sample in samples:
            writer.add(sample)
    return folder


def draft_config(**changes: Any) -> dict[str, Any]:
    """A flat Llama-like draft's config; a key changed to ``...`` is left out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB // 3,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def draft_tensors(
    *, num_taps: int = 3, draft_vocab: int = VOCAB // 3, layer: str = "midlayer", **changes: Tensor | None
) -> dict[str, Tensor]:
    """The tensors of such a draft. Names in ``changes`` have __ for a dot; None leaves a tensor out."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    ids = torch.arange(draft_vocab) * 2 if draft_vocab < VOCAB else torch.arange(draft_vocab)
    ids[: draft_vocab // 2] = torch.arange(draft_vocab // 2)  # frequent ids are dense at the start
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    tensors: dict[str, Tensor] = {
        "embed_tokens.weight": ones(VOCAB, H),
        "fc.weight": ones(H, num_taps * H),
        "norm.weight": ones(H),
        "lm_head.weight": ones(draft_vocab, H),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": t2d,
        f"{layer}.hidden_norm.weight": ones(H),
        f"{layer}.input_layernorm.weight": ones(H),
        f"{layer}.post_attention_layernorm.weight": ones(H),
        f"{layer}.self_attn.q_proj.weight": ones(HEADS * HEAD_DIM, 2 * H),
        f"{layer}.self_attn.k_proj.weight": ones(KV_HEADS * HEAD_DIM, 2 * H),
        f"{layer}.self_attn.v_proj.weight": ones(KV_HEADS * HEAD_DIM, 2 * H),
        f"{layer}.self_attn.o_proj.weight": ones(H, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": ones(WIDTH, H),
        f"{layer}.mlp.up_proj.weight": ones(WIDTH, H),
        f"{layer}.mlp.down_proj.weight": ones(H, WIDTH),
    }
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    return tensors


def make_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A draft's folder; of the config alone where ``tensors`` is None."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def bad(report: Report) -> dict[str, Finding]:
    """The findings that are not ok, by their subject."""
    return {finding.check: finding for finding in report.findings if finding.status != "ok"}
