"""What capturing costs vLLM: tokens a second of the same prompts with plain vLLM and with eyas writing shards, in turn.

    python benchmarks/vllm_capture.py TARGET SCRATCH --prompts 64 --tokens 512 --rounds 3
    python benchmarks/vllm_capture.py TARGET SCRATCH --prompts 512 --tokens 2048 -- --load-format dummy

TARGET may be a folder with a config.json alone where the options for vLLM say --load-format dummy. One vLLM runs
everything: plain rounds have no hooks in it. Prompts are random ids. Nothing is self-tested here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eyas.capture.engines.base import EngineSettings, Forwarded, Sealed, Sink, Work
from eyas.capture.engines.vllm.engine import VllmEngine, add_request, install
from eyas.capture.engines.vllm.load import read_outline
from eyas.shards.identity import DatasetIdentity, PreparedIdentity, TokenizerIdentity, create_or_match
from eyas.shards.sample import TokenSample, sample_id
from eyas.taps.notation import after, default_taps

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def main() -> None:
    arguments, engine_options = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--codec", choices=["raw", "zstd"], default="raw")
    parser.add_argument("--codec-threads", type=int, default=4)
    parser.add_argument(
        "--statistics", choices=["none", "every"], default="none", help="target statistics: of which rows"
    )
    options = parser.parse_args(arguments)

    outline = read_outline(options.target)
    settings = EngineSettings(
        target=options.target,
        taps=default_taps(outline.num_layers),
        last_hidden=after(outline.num_layers - 1),
        dtype=options.dtype,
        target_statistics=options.statistics == "every",
        tp=options.tp,
        batch_tokens=options.batch_tokens,
        engine_options=tuple(engine_options),
    )
    samples = _samples(options.prompts, options.tokens, outline.vocab_size)
    work = Work(
        source=samples,
        rows=np.arange(len(samples), dtype=np.int64),
        lengths=np.full(len(samples), options.tokens, dtype=np.int64),
    )
    num_tokens = options.prompts * options.tokens
    plain, captured = [], []
    with VllmEngine(settings) as engine:
        identity = DatasetIdentity(
            stage="captured",
            taps=settings.taps,
            last_hidden=settings.last_hidden,
            dtype=settings.dtype,
            codec=options.codec,
            target_statistics=settings.target_statistics,
            target=engine.target,
            tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
            prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=len(samples)),
        )
        for number in range(options.rounds + 1):  # the first one warms up
            engine.vllm.collective_rpc("eyas_remove")
            plain.append(num_tokens / _plain(engine.vllm, samples))
            install(engine.vllm, settings, outline)
            out = options.scratch / f"round-{number}"
            create_or_match(out, identity)
            sink = Sink(
                dataset=out, identity=identity, worker="bench", shard_bytes=1 << 30, codec_threads=options.codec_threads
            )
            started = time.monotonic()
            events = list(engine.capture(work, sink, lambda: False))
            captured.append(num_tokens / (time.monotonic() - started))
            assert sum(event.num_samples for event in events if isinstance(event, Forwarded)) == len(samples)
            assert sum(len(event.shard.sample_ids) for event in events if isinstance(event, Sealed)) == len(samples)
            num_bytes = sum(event.shard.num_bytes for event in events if isinstance(event, Sealed))
            shutil.rmtree(out)
    ratios = [c / p for c, p in zip(captured[1:], plain[1:], strict=True)]
    print(
        json.dumps(
            {
                "plain_tokens_per_second": [round(rate) for rate in plain[1:]],
                "captured_tokens_per_second": [round(rate) for rate in captured[1:]],
                "captured_of_plain": round(statistics.median(ratios), 4),
                "bytes": num_bytes,
                "tp": options.tp,
                "codec": options.codec,
                "target_statistics": options.statistics,
            }
        )
    )


def _plain(engine: LLMEngine, samples: list[TokenSample]) -> float:
    """Seconds that vLLM takes without hooks."""
    started = time.monotonic()
    for row, sample in enumerate(samples):
        add_request(engine, f"plain-{row}", sample.input_ids.tolist(), {})
    while engine.has_unfinished_requests():
        engine.step()
    return time.monotonic() - started


def _samples(num_samples: int, num_tokens: int, vocab_size: int) -> list[TokenSample]:
    draw = np.random.default_rng(0)
    mask = np.ones(num_tokens, dtype=np.uint8)
    ids = [draw.integers(0, vocab_size, num_tokens, dtype=np.int32) for _ in range(num_samples)]
    return [TokenSample(sample_id=sample_id(row, mask), input_ids=row, loss_mask=mask) for row in ids]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main()
