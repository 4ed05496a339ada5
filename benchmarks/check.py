"""The static check of a dataset with very many shards, in a process of its own: seconds, cold.

    PYTHONPATH=typings python benchmarks/check.py --shards 120000

The dataset is made first: a few real shards, hard-linked under all the names, each with its own ledger line. Linked
shards hold other samples than their line says, so the ones whose rows are read are real.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eyas.align.checks.data import LookedAt
from eyas.align.checks.subject import Subject
from eyas.shards.ledger import LEDGER_FOLDER, SHARDS_FOLDER, format_line, read_ledgers
from tests.align.made import draft_config, draft_tensors, make_dataset, make_draft, make_identity, make_sample

SAMPLES_A_SHARD = 12  # 1.4 M samples in 120 000 shards


def make(folder: Path, num_shards: int) -> None:
    """A dataset of ``num_shards`` shards."""
    identity = make_identity("after:1,after:15,after:28")
    template = make_dataset(folder, identity, _samples(identity, 0), worker="w-0")
    (line,) = read_ledgers(template).entries
    names = [f"w-0-{n:06d}.safetensors" for n in range(num_shards)]
    source = folder / SHARDS_FOLDER / names[0]
    for n, name in enumerate(names[1:], start=1):
        if n % 50_000 == 0:  # file systems bound the links of one file
            shutil.copyfile(source, folder / SHARDS_FOLDER / name)
            source = folder / SHARDS_FOLDER / name
        else:
            os.link(source, folder / SHARDS_FOLDER / name)
    ids = [tuple(f"{n * SAMPLES_A_SHARD + i:016x}" for i in range(SAMPLES_A_SHARD)) for n in range(num_shards)]
    lines = [replace(line, shard=name, sample_ids=own) for name, own in zip(names, ids, strict=True)]
    places = LookedAt(Subject(dataset=folder, identity=identity, ledgers=replace_entries(folder, lines))).places
    for n in places:
        (folder / SHARDS_FOLDER / names[n]).unlink()
        real = make_dataset(folder.parent / f"real-{n}", identity, _samples(identity, n), worker="w-0")
        (entry,) = read_ledgers(real).entries
        os.rename(real / SHARDS_FOLDER / entry.shard, folder / SHARDS_FOLDER / names[n])
        lines[n] = replace(entry, shard=names[n])
    replace_entries(folder, lines)


def replace_entries(folder: Path, lines: list) -> object:  # type: ignore[type-arg]
    """Write the ledger anew, and read it."""
    (folder / LEDGER_FOLDER / "w-0.jsonl").write_bytes(b"".join(format_line(line) for line in lines))
    return read_ledgers(folder)


def _samples(identity: object, seed: int) -> list:  # type: ignore[type-arg]
    ids = [
        [(seed + i + k) % 90 for k in range(16)] + [(seed // 90**j) % 90 for j in range(4)]
        for i in range(SAMPLES_A_SHARD)
    ]
    return [make_sample(identity, own, [0] * 8 + [1] * 12, seed=i) for i, own in enumerate(ids)]  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=120_000)
    parser.add_argument("--folder", type=Path, help="where the dataset is made; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.folder or Path(scratch)
        make(root / "dataset", arguments.shards)
        draft = make_draft(root / "draft", draft_config(), draft_tensors())
        command = [sys.executable, "-m", "eyas.cli.main", "check", str(root / "dataset")]
        command += ["--draft", str(draft), "--engine", "sglang@0.5.23"]
        begin = time.perf_counter()
        status = subprocess.run(command, check=False).returncode
        print(f"{arguments.shards:,} shards: {time.perf_counter() - begin:.1f} s, exit status {status}")


if __name__ == "__main__":
    main()
