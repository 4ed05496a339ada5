"""Drafts of eyas and of speculators 0.9.0 from the same data, judged by one evaluator.

    python benchmarks/against_speculators.py data WORK --conversations smol-sharegpt.jsonl.gz --target TARGET
    python benchmarks/against_speculators.py eyas WORK --name best --seeds 0 1 2 --options "--optimizer muon"
    python benchmarks/against_speculators.py speculators WORK --name theirs --seeds 0 1 2
    python benchmarks/against_speculators.py collect WORK --out DRAFTS
    python benchmarks/against_speculators.py judge WORK --drafts DRAFTS --prompts mt_bench.jsonl gsm8k.jsonl

``data`` splits the conversations once into training, validation and a test part that nobody trains on, captures both
with eyas (taps after:1,14,26) and writes the first as speculators reads it, training rows first, so that its
--train-data-ratio makes the same validation split. Both train 3 epochs with a draft vocabulary of 16 384 ids, the same
one; speculators with its defaults but for the loss implementation (its fused loss crashed under torch 2.11).
``collect`` copies the best checkpoint of each, without optimizer, with its wall time. ``judge`` measures every draft of
a folder at 3 steps: on the test part, or with --prompts by real greedy decoding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from eyas.shards.dataset import open_dataset
from eyas.shards.sample import parse_sample_ids
from eyas.standardize.formats.registry import create_writer
from eyas.standardize.formats.write_rows import write_rows
from eyas.train.split import validation_mask
from eyas.train.vocabulary import DraftVocabulary

ROOT = Path(__file__).parents[1]
VOCAB, EPOCHS, VALIDATION, LAYER_IDS = 16_384, 3, 0.05, ("2", "15", "27")
COMMON = ["--draft-vocab-size", VOCAB, "--epochs", EPOCHS, "--ttt-steps", 3]


def eyas(*arguments: object) -> str:
    command = [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]
    started, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"eyas {arguments[0]}: {time.time() - started:.0f} s, {processor:.0f} s of processor", flush=True)
    return output


def data(options: argparse.Namespace) -> None:
    work, target = options.work, options.target
    work.mkdir(parents=True, exist_ok=True)
    with gzip.open(options.conversations, "rt") as file:
        rows = file.readlines()
    random.Random(0).shuffle(rows)
    rows = rows[: options.max_conversations]
    parts = {"test": rows[: options.test], "train": rows[options.test :]}
    for name, lines in parts.items():
        (work / f"{name}.jsonl").write_text("".join(lines))
        eyas("prepare", work / f"{name}.jsonl", work / f"{name}-prepared", "--target", target)
        eyas("capture", work / f"{name}-prepared", work / f"{name}-captured", "--target", target, "--taps",
             "after:1,after:14,after:26")  # fmt: skip
        eyas("standardize", work / f"{name}-captured", work / name, "--taps", "after:1,after:14,after:26")
    # A run of no steps worth mentioning, for its draft vocabulary.
    eyas("train", work / "train", work / "run-vocabulary", "--target", target, "--draft-vocab-size", VOCAB,
         "--max-steps", 1, "--batch-tokens", 1024, "--no-compile", "--validation", 0)  # fmt: skip
    vocabulary = DraftVocabulary.load(work / "run-vocabulary" / "vocabulary.safetensors")
    dataset = open_dataset(work / "train")
    ids = np.array([sample for shard in dataset.iter_shards() for sample in shard.sample_ids])
    held_out = validation_mask(parse_sample_ids(ids.tolist()), VALIDATION)
    order = [*ids[~held_out].tolist(), *ids[held_out].tolist()]
    started, before = time.time(), time.process_time()
    writer = create_writer("speculators", d2t=vocabulary.d2t, t2d=vocabulary.t2d)
    write_rows(dataset, work / "speculators", writer, format="speculators", sample_ids=order)
    print(f"export: {time.time() - started:.0f} s, {time.process_time() - before:.0f} s of processor", flush=True)
    share = (int((~held_out).sum()) + 0.5) / len(ids)
    facts = {"target": str(target), "train_share": share, "samples": len(ids), "tokens": dataset.num_tokens}
    (work / "facts.json").write_text(json.dumps(facts))
    print(facts, "held out", int(held_out.sum()), "test", open_dataset(work / "test").num_samples)


def train_ours(options: argparse.Namespace, facts: dict[str, object]) -> None:
    for seed in options.seeds:
        run = options.work / f"eyas-{options.name}-{seed}"
        started = time.time()
        eyas("train", options.work / "train", run, "--target", facts["target"], *COMMON, "--validation", VALIDATION,
             "--seed", seed, *options.options.split())  # fmt: skip
        (run / "wall.json").write_text(json.dumps(time.time() - started))
        print(f"{run.name}: {time.time() - started:.0f} s", flush=True)


def train_theirs(options: argparse.Namespace, facts: dict[str, object]) -> None:
    for seed in options.seeds:
        out = options.work / f"speculators-{options.name}-{seed}"
        command = [
            sys.executable, ROOT / "benchmarks" / "speculators_run.py", options.work / f"{out.name}-times.json", 0,
            "--speculator-type", "eagle3", "--verifier-name-or-path", facts["target"], "--data-path",
            options.work / "speculators", "--save-path", out, "--on-missing", "raise", "--train-data-ratio",
            facts["train_share"], "--loss-implementation", "eager", "--target-layer-ids", *LAYER_IDS, "--seed", seed,
            "--log-freq", 1000, *COMMON, *options.options.split(),
        ]  # fmt: skip
        started = time.time()
        with open(options.work / f"{out.name}.log", "w") as log:
            subprocess.run([str(part) for part in command], check=True, stdout=log, stderr=subprocess.STDOUT)
        (out / "wall.json").write_text(json.dumps(time.time() - started))
        print(f"{out.name}: {time.time() - started:.0f} s", flush=True)


def collect(options: argparse.Namespace, facts: dict[str, object]) -> None:
    for wall in sorted(options.work.glob("*/wall.json")):
        run, out = wall.parent, options.out / wall.parent.name
        if run.name.startswith("eyas-"):
            named = json.loads((run / "checkpoints" / "best.json").read_text())["checkpoint"]
            best = run / "checkpoints" / named / "draft"
        else:
            best = (run / "checkpoint_best").resolve()
        shutil.copytree(best, out, ignore=lambda _, names: [name for name in names if "optim" in name])
        shutil.copy(wall, out)


def judge(options: argparse.Namespace, facts: dict[str, object]) -> None:
    drafts = sorted(wall.parent for wall in options.drafts.glob("*/wall.json") if options.name in wall.parent.name)
    walls = {str(draft): float(json.loads((draft / "wall.json").read_text())) for draft in drafts}
    common = [*drafts, "--target", options.target or facts["target"], "--draft-tokens", 3, "--json"]

    def show(draft: str, where: str, length: float, acceptance: list[float]) -> None:
        steps = " / ".join(f"{share:.3f}" for share in acceptance)
        label = f"{Path(draft).name:<28} {walls[draft]:5.0f} s"
        print(f"{label}  {where}: accepted length {length:.3f}, {steps}", flush=True)

    if not options.prompts:
        report = json.loads(eyas("eval", *common, "--dataset", options.work / "test", "--validation", 0))
        for draft, found in report["held_out"].items():
            show(draft, "test part", found["accepted_length"], found["acceptance"])
    for prompts in options.prompts:
        decode = ["--decode", prompts, "--max-prompts", options.max_prompts]
        decoding = json.loads(eyas("eval", *common, *decode))["decoding"]
        for tally in decoding["drafts"]:
            same = f"{tally['num_identical']} of {tally['num_turns']} as plain, {tally['num_unexplained']} unexplained"
            where = f"{prompts.stem}, {tally['num_forwards']:,} cycles, {same}"
            show(tally["name"], where, tally["accepted_length"], tally["acceptance"])
            print(f"    {tally['tokens_per_second']:.0f} tokens/s, plain "
                  f"{decoding['plain']['tokens_per_second']:.0f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "eyas", "speculators", "collect", "judge"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--conversations", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--max-conversations", type=int)
    parser.add_argument("--name", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--options", default="", help="further options of the trainer")
    parser.add_argument("--out", type=Path, help="of collect")
    parser.add_argument("--drafts", type=Path, help="of judge")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--max-prompts", type=int, default=80)
    options = parser.parse_args()
    if options.what == "data":
        data(options)
        return
    facts = json.loads((options.work / "facts.json").read_text())
    steps = {"eyas": train_ours, "speculators": train_theirs, "collect": collect, "judge": judge}
    steps[options.what](options, facts)


if __name__ == "__main__":
    main()
