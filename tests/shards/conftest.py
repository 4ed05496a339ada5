"""Tiny datasets: an identity, samples with every kind of bit pattern, and a folder that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from eyas.shards.identity import (
    DatasetIdentity,
    PreparedIdentity,
    TargetIdentity,
    TokenizerIdentity,
    create_or_match,
)
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import after

settings.register_profile("eyas", deadline=None)  # no test is about time
settings.load_profile("eyas")


def make_identity(hidden_size: int = 4, **changes: Any) -> DatasetIdentity:
    target = TargetIdentity(
        name="tiny",
        revision=None,
        config_hash="c0",
        weights_hash=None,
        model_class="LlamaForCausalLM",
        num_layers=8,
        hidden_size=hidden_size,
        vocab_size=100,
        weight_dtype="bfloat16",
        quantization=None,
        final_norm="LlamaRMSNorm",
        final_norm_eps=1e-5,
        logit_scale=1.0,
        logit_softcap=None,
        lm_head_bias=False,
        lm_head_rows=100,
    )
    identity = DatasetIdentity(
        stage="captured",
        taps=(after(1), after(3), after(4)),
        last_hidden=after(7),
        dtype="bfloat16",
        codec="raw",
        target_statistics=True,
        target=target,
        tokenizer=TokenizerIdentity(files_hash="f0", chat_template_hash=None, probe_hash="b0"),
        prepared=PreparedIdentity(fingerprint="a0", num_samples=12),
    )
    return replace(identity, **changes)


def make_sample(identity: DatasetIdentity, seed: int, num_tokens: int) -> Sample:
    """Random tensors; bfloat16 and float16 ones of any bit pattern, NaN and Inf included."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=dtype)

    def wide(width: int) -> torch.Tensor:  # [T, width]
        dtype = getattr(torch, identity.dtype)
        if identity.dtype == "float32":
            return torch.randn(num_tokens, width, generator=generator)
        bits = torch.randint(-(1 << 15), 1 << 15, (num_tokens, width), generator=generator, dtype=torch.int16)
        return bits.view(dtype)

    input_ids = integers(100, (num_tokens,), torch.int32)
    loss_mask = integers(2, (num_tokens,), torch.uint8)
    optional = identity.target_statistics
    return Sample(
        sample_id=sample_id(input_ids.numpy(), loss_mask.numpy()),
        input_ids=input_ids,
        loss_mask=loss_mask,
        features=wide(identity.features_width),
        last_hidden=None if identity.last_hidden is None else wide(identity.hidden_size),
        target_top1=integers(100, (num_tokens,), torch.int32) if optional else None,
        target_lse=torch.randn(num_tokens, generator=generator) if optional else None,
    )


def write_dataset(
    folder: Path, identity: DatasetIdentity, samples: list[Sample], *, worker: str = "host-0", shard_bytes: int = 1000
) -> None:
    create_or_match(folder, identity)
    with ShardWriter(
        folder, identity=identity, worker=worker, shard_bytes=shard_bytes, metadata={"engine": "test"}
    ) as writer:
        for sample in samples:
            writer.add(sample)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_sample(a: Sample, b: Sample) -> bool:
    """Equal to the bit, so that NaN equals itself."""
    names = ("input_ids", "loss_mask", "features", "last_hidden", "target_top1", "target_lse")
    return a.sample_id == b.sample_id and all(same_bits(getattr(a, name), getattr(b, name)) for name in names)


class Tiny:
    """What the tests of this folder need of the above, as one fixture."""

    identity = staticmethod(make_identity)
    sample = staticmethod(make_sample)
    write = staticmethod(write_dataset)
    same = staticmethod(same_sample)

    @staticmethod
    def samples(identity: DatasetIdentity, num_samples: int = 9, first_seed: int = 0) -> list[Sample]:
        return [make_sample(identity, seed, 3 + seed % 5) for seed in range(first_seed, first_seed + num_samples)]


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(params=["raw", "zstd"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dataset(tmp_path: Path, codec: str, tiny: type[Tiny]) -> Callable[..., tuple[Path, DatasetIdentity, list[Sample]]]:
    """Writes nine samples into tmp_path/data; gives folder, identity, samples."""

    def make(**changes: Any) -> tuple[Path, DatasetIdentity, list[Sample]]:
        identity = tiny.identity(codec=codec, **changes)
        samples = tiny.samples(identity)
        tiny.write(tmp_path / "data", identity, samples)
        return tmp_path / "data", identity, samples

    return make
