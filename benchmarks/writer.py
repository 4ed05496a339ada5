"""How fast one worker seals shards, per codec and number of codec threads: GB/s of bfloat16 taken in.

    python benchmarks/writer.py --folder /dev/shm

Random activations of hidden size 4096 with a scale of their own per channel, samples of 2048 tokens, shards of 1 GiB:
checksums, ledger and fsync included. The engine needs 1.4 GB/s of it beside a Llama-3.1-8B on one H200.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch

from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TargetIdentity, TokenizerIdentity
from eyas.shards.sample import Sample, sample_id
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import after

HIDDEN_SIZE, NUM_TOKENS, NUM_TAPS = 4096, 2048, 3


def identity(codec: str) -> DatasetIdentity:
    return DatasetIdentity(
        stage="captured",
        taps=(after(1), after(15), after(28)),
        last_hidden=after(31),
        dtype="bfloat16",
        codec=codec,
        target_statistics=False,
        target=TargetIdentity(
            name="random",
            revision=None,
            config_hash="0" * 32,
            weights_hash=None,
            model_class="LlamaForCausalLM",
            num_layers=32,
            hidden_size=HIDDEN_SIZE,
            vocab_size=128_256,
            weight_dtype="bfloat16",
            quantization=None,
            final_norm="LlamaRMSNorm",
            final_norm_eps=1e-5,
            logit_scale=1.0,
            logit_softcap=None,
            lm_head_bias=False,
            lm_head_rows=128_256,
        ),
        tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
        prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=1),
    )


def activations(seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 128_256, (NUM_TOKENS,), generator=generator, dtype=torch.int32)
    mask = torch.ones(NUM_TOKENS, dtype=torch.uint8)
    scale = torch.exp(torch.randn(HIDDEN_SIZE, generator=generator))  # [H]
    rows = torch.randn(NUM_TOKENS, NUM_TAPS + 1, HIDDEN_SIZE, generator=generator)  # [T, A+1, H]
    rows = (rows * scale).to(torch.bfloat16)
    return Sample(
        sample_id=sample_id(ids.numpy(), mask.numpy()),
        input_ids=ids,
        loss_mask=mask,
        features=rows[:, :NUM_TAPS].flatten(1).contiguous(),
        last_hidden=rows[:, NUM_TAPS].contiguous(),
        target_top1=None,
        target_lse=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8, 12])
    options = parser.parse_args()
    samples = [activations(seed) for seed in range(options.samples)]
    statistics = [torch.zeros(NUM_TAPS + 1, 4, dtype=torch.float64) for _ in samples]  # as the engine gives them
    num_bytes = sum(sample.features.nbytes + sample.last_hidden.nbytes for sample in samples)  # type: ignore[union-attr]
    for codec, threads in [("raw", 1), ("raw", 1), *(("zstd", threads) for threads in options.threads)]:
        out = options.folder / "bench-writer"
        shutil.rmtree(out, ignore_errors=True)
        started = time.perf_counter()
        with ShardWriter(out, identity=identity(codec), worker="w", codec_threads=threads, metadata={}) as writer:
            shards = [shard for pair in zip(samples, statistics, strict=True) for shard in writer.add(*pair)]
            stored = sum(shard.num_bytes for shard in [*shards, *writer.close()])
        seconds = time.perf_counter() - started
        print(f"{codec:<5} {threads:2} threads  {num_bytes / seconds / 1e9:6.2f} GB/s  ratio {num_bytes / stored:.3f}")
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
