"""What capturing costs vLLM: tokens a second of the same prompts with plain vLLM and with eyas writing shards, in turn.

    python benchmarks/vllm_capture.py TARGET SCRATCH --prompts 64 --tokens 512 --rounds 3
    python benchmarks/vllm_capture.py TARGET SCRATCH --prompts 512 --tokens 2048 --modes raw statistics zstd \\
        -- --load-format dummy
    python benchmarks/vllm_capture.py TARGET SCRATCH --prompts 512 --tokens 2048 --modes connector \\
        -- --load-format dummy

TARGET may be a folder with a config.json alone where the options for vLLM say --load-format dummy. One vLLM runs
everything: plain rounds have no hooks in it. Modes of eyas: ``raw`` and ``zstd`` shards without target statistics,
``statistics`` of every row in raw shards. ``connector`` is vLLM's own way (extract_hidden_states with its
ExampleHiddenStatesConnector without locks, one file a prompt, on a GPU), which needs a vLLM to itself. Prompts are
random ids. Nothing is self-tested here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.base import EngineSettings, Forwarded, Sealed, Sink, TargetOutline, Work
from eyas.capture.engines.vllm.engine import VllmEngine, add_request, install
from eyas.capture.engines.vllm.load import engine_arguments, launch, read_outline, set_environment
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
    parser.add_argument("--modes", nargs="+", choices=["raw", "statistics", "zstd", "connector"], default=["raw"])
    parser.add_argument("--codec-threads", type=int, default=4)
    parser.add_argument("--shard-bytes", type=int, default=1 << 30)
    options = parser.parse_args(arguments)

    outline = read_outline(options.target)
    settings = EngineSettings(
        target=options.target,
        taps=default_taps(outline.num_layers),
        last_hidden=after(outline.num_layers - 1),
        dtype=options.dtype,
        target_statistics=False,
        tp=options.tp,
        batch_tokens=options.batch_tokens,
        engine_options=tuple(engine_options),
    )
    samples = _samples(options.prompts, options.tokens, outline.vocab_size)
    if options.modes == ["connector"]:
        _run_connector(settings, outline, samples, options.scratch, rounds=options.rounds)
    else:
        _run_eyas(settings, outline, samples, options)


def _run_eyas(
    settings: EngineSettings, outline: TargetOutline, samples: list[TokenSample], options: argparse.Namespace
) -> None:
    plain: list[float] = []
    captured: dict[str, list[float]] = {mode: [] for mode in options.modes}
    num_bytes: dict[str, int] = {}
    with VllmEngine(settings) as engine:
        for number in range(options.rounds + 1):
            given = samples if number else _few(samples)  # round 0 warms up
            lengths = np.full(len(given), options.tokens, dtype=np.int64)
            work = Work(source=given, rows=np.arange(len(given), dtype=np.int64), lengths=lengths)
            num_tokens = int(lengths.sum())
            engine.vllm.collective_rpc("eyas_remove")
            plain.append(num_tokens / _plain(engine.vllm, given))
            for mode in options.modes:
                asked = replace(settings, target_statistics=mode == "statistics")
                install(engine.vllm, asked, outline)
                identity = DatasetIdentity(
                    stage="captured",
                    taps=asked.taps,
                    last_hidden=asked.last_hidden,
                    dtype=asked.dtype,
                    codec="zstd" if mode == "zstd" else "raw",
                    target_statistics=asked.target_statistics,
                    target=engine.target,
                    tokenizer=TokenizerIdentity(files_hash="0" * 32, chat_template_hash=None, probe_hash="0" * 32),
                    prepared=PreparedIdentity(fingerprint="0" * 32, num_samples=len(given)),
                )
                out = options.scratch / f"round-{number}"
                create_or_match(out, identity)
                sink = Sink(dataset=out, identity=identity, worker="bench", shard_bytes=options.shard_bytes,
                            codec_threads=options.codec_threads)  # fmt: skip
                started = time.monotonic()
                events = list(engine.capture(work, sink, lambda: False))
                captured[mode].append(num_tokens / (time.monotonic() - started))
                sealed = [event.shard for event in events if isinstance(event, Sealed)]
                assert sum(event.num_samples for event in events if isinstance(event, Forwarded)) == len(given)
                assert sum(len(shard.sample_ids) for shard in sealed) == len(given)
                num_bytes[mode] = sum(shard.num_bytes for shard in sealed)
                shutil.rmtree(out)
                engine.vllm.collective_rpc("eyas_remove")
            shown = ", ".join(f"{mode} {rates[-1]:,.0f}" for mode, rates in captured.items())
            print(f"round {number}: plain {plain[-1]:,.0f}, {shown}", flush=True)
    print(json.dumps({"tp": options.tp, "plain_tokens_per_second": [round(rate) for rate in plain[1:]]}))
    for mode, rates in captured.items():
        of_plain = statistics.median(c / p for c, p in zip(rates[1:], plain[1:], strict=True))
        print(
            json.dumps(
                {
                    "mode": mode,
                    "tokens_per_second": [round(rate) for rate in rates[1:]],
                    "of_plain": round(of_plain, 4),
                    "bytes": num_bytes[mode],
                }
            ),
            flush=True,
        )


def _run_connector(
    settings: EngineSettings, outline: TargetOutline, samples: list[TokenSample], scratch: Path, *, rounds: int
) -> None:
    """vLLM's own capture of the same taps and last hidden state, to files in ``scratch``."""
    set_environment()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    from vllm.config import KVTransferConfig

    out = scratch / "connector"
    # vLLM's id i is what enters decoder layer i; L is what leaves the last one.
    layer_ids = [*(tap.layer + 1 for tap in settings.taps), outline.num_layers]
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(out), "use_synchronization_lock": False},
    }
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    arguments = engine_arguments(settings, outline)
    arguments.kv_transfer_config = KVTransferConfig(**transfer)
    arguments.speculative_config = speculative
    engine = launch(arguments)
    rates = []
    for number in range(rounds + 1):
        given = samples if number else _few(samples)  # round 0 warms up
        num_tokens = sum(sample.num_tokens for sample in given)
        out.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        _plain(engine, given)
        _plain(engine, samples[:1], name="last")  # a prompt's file is begun when the engine steps once more
        while len(_finished(out)) < len(given):
            time.sleep(0.01)
        rates.append(num_tokens / (time.monotonic() - started))
        num_bytes = sum(_finished(out))
        shutil.rmtree(out)
        print(f"round {number}: connector {rates[-1]:,.0f}", flush=True)
    found = {"mode": "connector", "tp": settings.tp, "tokens_per_second": [round(rate) for rate in rates[1:]],
             "bytes": num_bytes}  # fmt: skip
    print(json.dumps(found), flush=True)
    engine.engine_core.shutdown()


def _few(samples: list[TokenSample]) -> list[TokenSample]:
    return samples[: max(1, len(samples) // 8)]


def _finished(out: Path) -> list[int]:
    """Sizes of the files that hold what was captured."""
    return [path.stat().st_size for path in out.glob("**/*.safetensors") if path.stat().st_size]


def _plain(engine: LLMEngine, samples: Sequence[TokenSample], name: str = "plain") -> float:
    """Seconds that vLLM takes without hooks."""
    started = time.monotonic()
    for row, sample in enumerate(samples):
        add_request(engine, f"{name}-{row}", sample.input_ids.tolist(), {})
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
