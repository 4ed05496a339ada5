"""Training speed beside speculators 0.9.0's, in one run: a Llama-3.1-8B-shaped draft on random states.

    python benchmarks/train.py --scratch /dev/shm --steps 120 --optimizer adamw

Both read the same samples from ``--scratch`` as in real training: eyas its shards, speculators a file a sample. 8192
rows a batch of 2048-token documents, 32 000 ids of draft vocabulary, frozen lm_head, three steps of training-time test.
Tokens per second are those of the steps after the first ``--skip``, compilation left out on both sides. speculators
runs with its own defaults but for ``--loss`` (its fused loss crashed under torch 2.11) and ``--log-freq``: by default
it profiles every step, which waits for the GPU; ``--log-freq 1`` measures that, the value here its faster setting.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from random_training_data import LLAMA_8B, TINY, make_dataset, make_target, speculators_layer_ids

from eyas.shards.dataset import open_dataset
from eyas.standardize.formats.registry import create_writer
from eyas.standardize.formats.write_rows import write_rows
from eyas.train.vocabulary import DraftVocabulary

ROOT = Path(__file__).parents[1]


def eyas(scratch: Path, target: Path, options: argparse.Namespace, *, processes: int = 1) -> float:
    """Tokens per second after the first steps."""
    run = scratch / "run-eyas"
    shutil.rmtree(run, ignore_errors=True)
    command = [
        sys.executable, "-m", "eyas.cli.main", "train", scratch / "eyas", run, "--target", target,
        "--draft-vocab-size", options.vocab, "--batch-tokens", options.batch_tokens, "--max-steps", options.steps,
        "--optimizer", options.optimizer, "--validation", 0, "--dp", processes, *options.eyas_options.split(),
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "train" and line["step"] > options.skip]
    rate = sum(line["num_tokens"] for line in kept) / sum(line["seconds"] for line in kept)
    wait = sum(line["seconds"] * line["data_wait"] for line in kept) / sum(line["seconds"] for line in kept)
    per_step = sum(line["seconds"] for line in kept) / len(kept)
    mfu = f", MFU {sum(line['mfu'] for line in kept) / len(kept):.0%}" if "mfu" in kept[0] else ""
    print(
        f"eyas, {processes} process: {rate:,.0f} tokens/s, {1000 * per_step:.1f} ms a step, data wait {wait:.1%}{mfu}"
    )
    return rate


def speculators(scratch: Path, target: Path, options: argparse.Namespace) -> float:
    data, out, times = scratch / "speculators", scratch / "run-speculators", scratch / "times.json"
    shutil.rmtree(out, ignore_errors=True)
    ids = [str(number) for number in speculators_layer_ids()]
    command = [
        sys.executable, ROOT / "benchmarks" / "speculators_run.py", times, options.steps, "--speculator-type", "eagle3",
        "--verifier-name-or-path", target, "--data-path", data, "--save-path", out, "--on-missing", "raise",
        "--train-data-ratio", 0.99, "--total-seq-len", options.batch_tokens, "--ttt-steps", 3, "--epochs", 1000,
        "--optimizer", options.optimizer, "--draft-vocab-size", options.vocab,
        "--loss-implementation", options.loss, "--log-freq", options.log_freq, "--target-layer-ids", *ids,
        "--checkpoint-freq", 1000,
    ]  # fmt: skip
    started = time.time()
    subprocess.run([str(part) for part in command], check=True, env=os.environ)
    steps = dict(json.loads(times.read_text())["steps"])
    kept = sorted(step for step in steps if step >= options.skip)
    # The median, since an epoch may end in between: it starts its loaders anew and validates.
    seconds = statistics.median((steps[b] - steps[a]) / (b - a) for a, b in pairwise(kept))
    rate = options.batch_tokens / seconds
    print(
        f"speculators, log-freq {options.log_freq}: {rate:,.0f} tokens/s, {1000 * seconds:.1f} ms a step "
        f"({time.time() - started:.0f} s in all)"
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="a memory file system")
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--skip", type=int, default=40)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--loss", default="eager", help="of speculators")
    parser.add_argument("--log-freq", type=int, default=1000, help="of speculators; its default is 1")
    parser.add_argument("--only", choices=["eyas", "speculators"])
    parser.add_argument("--eyas-options", default="", help="further options of eyas train")
    parser.add_argument("--dp", type=int, default=1, help="and eyas once more on so many GPUs")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU (eyas alone)")
    options = parser.parse_args()
    if options.tiny:
        options.samples, options.length, options.batch_tokens, options.vocab, options.only = 32, 256, 1024, 256, "eyas"
    target = options.scratch / "target"
    if not (options.scratch / "ready").exists():
        make_target(target, TINY if options.tiny else LLAMA_8B)
        make_dataset(options.scratch / "eyas", target, num_samples=options.samples, length=options.length)
        dataset = open_dataset(options.scratch / "eyas")
        vocabulary = DraftVocabulary(ids=np.arange(options.vocab), vocab_size=dataset.identity.target.vocab_size,
                                     coverage=1.0)  # fmt: skip
        order = [sample.sample_id for sample in dataset]
        writer = create_writer("speculators", d2t=vocabulary.d2t, t2d=vocabulary.t2d)
        write_rows(dataset, options.scratch / "speculators", writer, format="speculators", sample_ids=order)
        (options.scratch / "ready").touch()
    ours = eyas(options.scratch, target, options) if options.only != "speculators" else None
    if ours is not None and options.dp > 1:
        print(f"{options.dp} GPUs over one: {eyas(options.scratch, target, options, processes=options.dp) / ours:.2f}")
    theirs = speculators(options.scratch, target, options) if options.only != "eyas" else None
    if ours is not None and theirs is not None:
        print(f"eyas over speculators, {options.optimizer}: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
