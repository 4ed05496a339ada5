"""Capture tokens/s against the plain forward's, in one process, on a random model of Llama-3.1-8B's shape.

One GPU:   python benchmarks/capture.py --scratch /dev/shm --disk /tmp
Two, tp 2: torchrun --nproc-per-node 2 benchmarks/capture.py --tp 2 --scratch /dev/shm --disk /tmp

The plain forward is transformers' own, last-token logits only, on the same batches, timed before and after the
captures. Each capture is the engine as `eyas capture` runs it: taps after:1, after:15, after:28 and the last hidden
state, checksums, shards, ledger. Printed: tokens/s, the share of the plain forward, TFLOP/s, GB/s written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eyas.capture.engines import create_engine
from eyas.capture.engines.base import EngineSettings, Forwarded, Rejected, Sealed, Sink, Work
from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TokenizerIdentity
from eyas.shards.sample import TokenSample, sample_id
from eyas.taps.notation import after

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
TINY = {
    **LLAMA_8B,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TAPS = (after(1), after(15), after(28))
GPU_TFLOPS = 790.0  # bf16 matrix products measured on one H200


@dataclass
class RandomSamples:
    """``num`` samples of ``length`` random tokens; the second half of each is trained."""

    num: int
    length: int
    vocab_size: int

    def __getitem__(self, row: int) -> TokenSample:
        ids = np.random.default_rng(row).integers(0, self.vocab_size, self.length, dtype=np.int32)
        mask = (np.arange(self.length) >= self.length // 2).astype(np.uint8)
        return TokenSample(sample_id=sample_id(ids, mask), input_ids=ids, loss_mask=mask)

    def work(self) -> Work:
        return Work(
            source=self,
            rows=np.arange(self.num, dtype=np.int64),
            lengths=np.full(self.num, self.length, dtype=np.int64),
        )


def make_target(folder: Path, shape: dict[str, int | float]) -> None:
    """A random checkpoint in bfloat16, its weights drawn on the GPU where there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def flops_per_token(shape: dict[str, int | float], length: int) -> float:
    """Of the decoder's matrix products and causal attention, without lm_head (2 * multiply-adds)."""
    hidden, layers = int(shape["hidden_size"]), int(shape["num_hidden_layers"])
    head_dim = hidden // int(shape["num_attention_heads"])
    kv = head_dim * int(shape["num_key_value_heads"])
    weights = hidden * hidden * 2 + hidden * kv * 2 + 3 * hidden * int(shape["intermediate_size"])
    attention = 2 * hidden * length / 2  # q·k and p·v over the causal half
    return 2.0 * layers * (weights + attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="a memory file system: the target and raw shards")
    parser.add_argument("--disk", type=Path, required=True, help="a folder on a real disk")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--codec-threads", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script on a CPU")
    options = parser.parse_args()
    shape = TINY if options.tiny else LLAMA_8B
    rank = int(os.environ.get("RANK", "0"))
    target, ready = options.scratch / "bench-target", options.scratch / "bench-target.ready"
    if rank == 0 and not ready.exists():
        make_target(target, shape)
        ready.touch()
    while not ready.exists():
        time.sleep(0.5)
    samples = RandomSamples(options.samples, options.length, int(shape["vocab_size"]))
    settings = EngineSettings(
        target=str(target),
        taps=TAPS,
        last_hidden=after(31),
        dtype="bfloat16",
        target_statistics=True,
        tp=options.tp,
        batch_tokens=options.batch_tokens,
    )
    say: Callable[[str], None] = print if rank == 0 else lambda _: None
    num_tokens = options.samples * options.length
    per_token = flops_per_token(shape, options.length)

    def report(name: str, seconds: float, plain: float | None, num_bytes: int = 0) -> None:
        rate = num_tokens / seconds
        tflops = rate * per_token / 1e12 / options.tp
        share = f"{plain / seconds:6.3f}" if plain else "      "
        say(
            f"{name:<34} {rate:9,.0f} tokens/s  {share}  {tflops:5.0f} TFLOP/s a GPU ({tflops / GPU_TFLOPS:4.0%})"
            + (f"  {num_bytes / seconds / 1e9:5.2f} GB/s" if num_bytes else "")
        )

    say(f"{options.samples} samples of {options.length} tokens, batches of {options.batch_tokens}, tp {options.tp}")
    plains: list[float] = []

    def capture(name: str, folder: Path, *, statistics: bool, codec: str = "raw") -> None:
        shutil.rmtree(folder, ignore_errors=True) if rank == 0 else None
        with create_engine("transformers", replace(settings, target_statistics=statistics)) as engine:
            probe = [samples[0]]
            engine.self_test(probe)
            identity = DatasetIdentity(
                stage="captured",
                taps=TAPS,
                last_hidden=settings.last_hidden,
                dtype=settings.dtype,
                codec=codec,
                target_statistics=statistics,
                target=engine.target,
                tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
                prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=options.samples),
            )
            folder.mkdir(parents=True, exist_ok=True)
            sink = Sink(
                dataset=folder,
                identity=identity,
                worker="bench",
                shard_bytes=1 << 30,
                codec_threads=options.codec_threads,
            )
            plain = time_plain(engine._loaded.model, samples, options.batch_tokens)  # type: ignore[attr-defined]
            plains.append(plain)
            report("plain forward", plain, None)
            started = time.perf_counter()
            num_bytes = forwarded = 0
            for event in engine.capture(samples.work(), sink, lambda: False):
                if isinstance(event, Sealed):
                    num_bytes += event.shard.num_bytes
                elif isinstance(event, Forwarded):
                    forwarded += event.num_tokens
                elif isinstance(event, Rejected):
                    raise SystemExit(f"rejected: {event.reason}")
            seconds = time.perf_counter() - started
            report(name, seconds, plain, num_bytes * options.tp)
        shutil.rmtree(folder, ignore_errors=True) if rank == 0 else None

    memory, disk = options.scratch / "bench-dataset", options.disk / "bench-dataset"
    capture("raw, no target statistics, memory", memory, statistics=False)
    capture("raw, target statistics, memory", memory, statistics=True)
    capture("zstd, target statistics, memory", memory, statistics=True, codec="zstd")
    capture("zstd, no target statistics, memory", memory, statistics=False, codec="zstd")
    capture("raw, target statistics, disk", disk, statistics=True)
    say(f"plain forwards: {', '.join(f'{num_tokens / seconds:,.0f}' for seconds in plains)} tokens/s")


def time_plain(model: torch.nn.Module, samples: RandomSamples, batch_tokens: int) -> float:
    """Seconds of transformers' own forward over all samples, logits of the last token only."""
    rows = max(1, batch_tokens // samples.length)
    device = next(model.parameters()).device

    def batch(start: int) -> torch.Tensor:
        ids = np.stack([samples[row].input_ids for row in range(start, min(start + rows, samples.num))])
        return torch.from_numpy(ids.astype(np.int64)).to(device)  # [B, T]

    with torch.inference_mode():
        for start in (0, 0):  # warm-up
            model(batch(start), use_cache=False, logits_to_keep=1)
        _synchronize(device)
        started = time.perf_counter()
        for start in range(0, samples.num, rows):
            model(batch(start), use_cache=False, logits_to_keep=1)
        _synchronize(device)
        return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
