"""Codec zstd on real activations: ratio, bit-exactness, and MB/s of one core, beside ZipNN and plain zstandard.

    python benchmarks/codec.py --target DIR CONVERSATIONS.jsonl[.gz] [--tokens 16384] [--taps after:1,after:14,after:26]

Runs the target over the conversations (ShareGPT's or OpenAI's keys) with its chat template, takes the taps from
transformers' own hidden_states, and compresses each conversation by itself, as a shard does. Speeds are of bfloat16
bytes, over CPU time of one thread, the best of --repeats: another process on the machine does not change them much.
ZipNN (pip install zipnn) is left out, and said to be, where it is not installed. Exits 1 where codec zstd is not
bit-exact or its ratio is under 1.45.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from eyas.shards.codec import CODECS
from eyas.taps.notation import Tap, default_taps, format_taps, parse_taps

REQUIRED_RATIO = 1.45
MAX_SAMPLE_TOKENS = 1024  # a conversation is cut there: this bounds the forward, and longer frames change nothing

Bytes = npt.NDArray[np.uint8]


def conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    """Messages of each line that is a conversation of users and assistants."""
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        for line in file:
            row = json.loads(line)
            turns = row.get("conversations") or row.get("messages") or []
            messages = [
                {
                    "role": roles.get(turn.get("from") or turn.get("role"), ""),
                    "content": turn.get("value", turn.get("content")),
                }
                for turn in turns
            ]
            if messages and all(message["role"] and isinstance(message["content"], str) for message in messages):
                yield messages


@torch.inference_mode()
def activations(target: Path, path: Path, num_tokens: int, taps: str | None) -> tuple[list[Bytes], tuple[Tap, ...]]:
    """One uint8 [T_n, A*H*2] per conversation: bfloat16 features as a shard stores them; and their taps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    num_layers = model.config.get_text_config().num_hidden_layers
    chosen = default_taps(num_layers) if taps is None else parse_taps(taps)
    if any(tap.kind != "after" or tap.layer >= num_layers - 1 for tap in chosen):
        sys.exit(f"--taps {format_taps(chosen)}: hidden_states holds after:J for J up to {num_layers - 2}")
    samples, taken = [], 0
    for messages in conversations(path):
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]  # [1, T]
        hidden = model(ids[:, :MAX_SAMPLE_TOKENS], output_hidden_states=True, logits_to_keep=1).hidden_states
        features = torch.cat([hidden[tap.layer + 1][0] for tap in chosen], dim=-1)  # [T, A*H]
        samples.append(features.contiguous().view(torch.uint8).numpy())
        taken += len(features)
        if taken >= num_tokens:
            return samples, chosen
    sys.exit(f"{path}: {taken} tokens in all, asked for {num_tokens}")


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of ``work``, the best of ``repeats``."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def eyas(samples: list[Bytes], repeats: int) -> tuple[int, float, float, bool]:
    """Compressed bytes, seconds to compress, seconds to decompress, bit-exactness: as each of these functions."""
    codec, row_bytes = CODECS["zstd"], samples[0].shape[1]
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
    with ThreadPoolExecutor(1) as pool:

        def encode() -> dict[str, list[Bytes]]:
            encoder = codec.Encoder("features", pool)
            for sample in samples:
                encoder.add(sample)
            return encoder.finish()

        stored = encode()
        compress = seconds(encode, repeats)
    tensors = {name: np.concatenate([piece.reshape(-1) for piece in pieces]) for name, pieces in stored.items()}

    def decode() -> Iterator[Bytes]:
        for n, sample in enumerate(samples):
            yield codec.decode("features", tensors, offsets, row_bytes, n, slice(0, len(sample)))

    exact = all(np.array_equal(a, b) for a, b in zip(samples, decode(), strict=True))
    num_bytes = sum(tensor.size for tensor in tensors.values())  # medians and frame index included
    return num_bytes, compress, seconds(lambda: [None for _ in decode()], repeats), exact


def zipnn(samples: list[Bytes], repeats: int) -> tuple[int, float, float, bool]:
    from zipnn import ZipNN

    codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It may reorder the bits of its input in place, so that each run gets a copy; the copies are not timed.
    packed = [bytes(codec.compress(bytearray(sample.tobytes()))) for sample in samples]
    compress = decompress = float("inf")
    for _ in range(repeats):
        copies = [bytearray(sample.tobytes()) for sample in samples]
        compress = min(compress, seconds(lambda copies=copies: [codec.compress(copy) for copy in copies], 1))
        copies = [bytearray(frame) for frame in packed]
        decompress = min(decompress, seconds(lambda copies=copies: [codec.decompress(copy) for copy in copies], 1))
    exact = all(
        bytes(codec.decompress(bytearray(frame))) == sample.tobytes()
        for frame, sample in zip(packed, samples, strict=True)
    )
    return sum(map(len, packed)), compress, decompress, exact


def plain_zstandard(samples: list[Bytes], repeats: int) -> tuple[int, float, float, bool]:
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed = [compressor.compress(sample) for sample in samples]
    exact = all(
        decompressor.decompress(frame) == sample.tobytes() for frame, sample in zip(packed, samples, strict=True)
    )
    return (
        sum(map(len, packed)),
        seconds(lambda: [compressor.compress(sample) for sample in samples], repeats),
        seconds(lambda: [decompressor.decompress(frame) for frame in packed], repeats),
        exact,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path, metavar="CONVERSATIONS")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--taps", help="after:J only (default: the target's default taps)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    samples, taps = activations(options.target, options.conversations, options.tokens, options.taps)
    num_bytes = sum(sample.size for sample in samples)
    print(
        f"{options.target.name}, taps {format_taps(taps)}: {sum(map(len, samples))} tokens of {len(samples)} "
        f"conversations, {num_bytes / 1e6:.1f} MB of bfloat16\n"
    )
    print(f"{'':<22}{'ratio':>8}{'compress MB/s':>16}{'decompress MB/s':>18}{'bit-exact':>12}")
    results = {}
    rows = {"eyas zstd": eyas, "zipnn": zipnn, "zstandard level 1": plain_zstandard}
    if importlib.util.find_spec("zipnn") is None:
        del rows["zipnn"]
        print("zipnn is not installed, and not measured")
    for name, measure in rows.items():
        size, compress, decompress, exact = measure(samples, options.repeats)
        results[name] = num_bytes / size, exact
        print(
            f"{name:<22}{num_bytes / size:>8.3f}{num_bytes / compress / 1e6:>16.0f}"
            f"{num_bytes / decompress / 1e6:>18.0f}{'yes' if exact else 'NO':>12}"
        )
    ratio, exact = results["eyas zstd"]
    if ratio < REQUIRED_RATIO or not exact:
        sys.exit(f"codec zstd: ratio {ratio:.3f}, bit-exact {exact}; required {REQUIRED_RATIO} and True")


if __name__ == "__main__":
    main()
