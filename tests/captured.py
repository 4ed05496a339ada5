"""Captured datasets small enough for tests, written as a capture writes them, with the samples that went in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TargetIdentity, TokenizerIdentity, create_or_match
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import after, parse_taps

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 8, 16, 64


def captured_identity(
    *, num_samples: int, taps: str = "embed,after:1,after:3,after:5", **changes: Any
) -> DatasetIdentity:
    identity = DatasetIdentity(
        stage="captured",
        taps=parse_taps(taps),
        last_hidden=after(NUM_LAYERS - 1),
        dtype="bfloat16",
        codec="raw",
        target_statistics=True,
        target=TargetIdentity(
            name="some/target",
            revision=None,
            config_hash="00" * 16,
            weights_hash=None,
            model_class="LlamaForCausalLM",
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
            vocab_size=VOCAB_SIZE,
            weight_dtype="bfloat16",
            quantization=None,
            final_norm="LlamaRMSNorm",
            final_norm_eps=1e-5,
            logit_scale=1.0,
            logit_softcap=None,
            lm_head_bias=False,
            lm_head_rows=VOCAB_SIZE,
        ),
        tokenizer=TokenizerIdentity(files_hash="11" * 16, chat_template_hash=None, probe_hash="22" * 16),
        prepared=PreparedIdentity(fingerprint="33" * 16, num_samples=num_samples),
    )
    return replace(identity, **changes)


def make_samples(identity: DatasetIdentity, num_samples: int, *, seed: int = 0, max_tokens: int = 40) -> list[Sample]:
    """Distinct random samples that fit ``identity``."""
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, identity.dtype)
    samples = []
    for _ in range(num_samples):
        T = int(torch.randint(4, max_tokens + 1, (1,), generator=draw))
        input_ids = torch.randint(0, VOCAB_SIZE, (T,), generator=draw, dtype=torch.int32)
        loss_mask = torch.randint(0, 2, (T,), generator=draw, dtype=torch.uint8)
        statistics = identity.target_statistics
        samples.append(
            Sample(
                sample_id=sample_id(input_ids.numpy(), loss_mask.numpy()),
                input_ids=input_ids,
                loss_mask=loss_mask,
                features=torch.randn(T, identity.features_width, generator=draw).to(dtype),
                last_hidden=None
                if identity.last_hidden is None
                else torch.randn(T, identity.hidden_size, generator=draw).to(dtype),
                target_top1=torch.randint(0, VOCAB_SIZE, (T,), generator=draw, dtype=torch.int32)
                if statistics
                else None,
                target_lse=torch.randn(T, generator=draw) if statistics else None,
            )
        )
    return samples


def write_captured(
    folder: Path,
    identity: DatasetIdentity,
    samples: Sequence[Sample],
    *,
    workers: int = 2,
    shard_bytes: int = 20_000,
    metadata: dict[str, str] | None = None,
) -> Path:
    """``samples`` dealt to ``workers`` workers named host-0, host-1, ..."""
    create_or_match(folder, identity)
    for rank in range(workers):
        with ShardWriter(
            folder, identity=identity, worker=f"host-{rank}", shard_bytes=shard_bytes, metadata=metadata or {"tp": "1"}
        ) as writer:
            for sample in samples[rank::workers]:
                writer.add(sample)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """Every file of ``folder`` with the hash of its bytes and its modification time."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
