"""How long it takes to open a dataset of 120 000 shards and 1.4 M samples, by its ledgers alone.

    python benchmarks/ledger_scale.py [--folder FOLDER] [--shards 120000] [--samples 1400000] [--workers 64]

Makes synthetic ledgers, and shards as sparse files that hold no bytes (of the right apparent size), then reads them in
a fresh process: seconds, peak memory, that torch was not imported and that no shard file was opened.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from eyas.shards.identity import (
    DatasetIdentity,
    PreparedIdentity,
    TargetIdentity,
    TokenizerIdentity,
    create_or_match,
)
from eyas.shards.ledger import LEDGER_FOLDER, SHARDS_FOLDER, SealedShard, format_line
from eyas.taps.notation import after

HASH = "0" * 32
IDENTITY = DatasetIdentity(
    stage="captured",
    taps=(after(1), after(29), after(57)),
    last_hidden=after(60),
    dtype="bfloat16",
    codec="raw",
    target_statistics=True,
    target=TargetIdentity(
        name="synthetic",
        revision=None,
        config_hash=HASH,
        weights_hash=None,
        model_class="DeepseekV3ForCausalLM",
        num_layers=61,
        hidden_size=7168,
        vocab_size=163_840,
        weight_dtype="bfloat16",
        quantization=None,
        final_norm="DeepseekV3RMSNorm",
        final_norm_eps=1e-5,
        logit_scale=1.0,
        logit_softcap=None,
        lm_head_bias=False,
        lm_head_rows=163_840,
    ),
    tokenizer=TokenizerIdentity(files_hash=HASH, chat_template_hash=HASH, probe_hash=HASH),
    prepared=PreparedIdentity(fingerprint=HASH, num_samples=1_400_000),
)

# Run in a fresh process. strace is not everywhere, so an audit hook sees every file that Python opens.
READ = """
import json, resource, sys, time
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
started = time.perf_counter()
from eyas.shards import open_dataset
imported = time.perf_counter()
state = open_dataset(sys.argv[1]).ledgers
read = time.perf_counter()
num_samples = state.num_samples
ids = state.sample_ids()
known = int(state.contains(ids[::7]).sum())
print(json.dumps({
    "imports_seconds": imported - started, "read_seconds": read - imported, "ids_seconds": time.perf_counter() - read,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "num_shards": len(state.entries), "num_samples": num_samples, "num_tokens": state.num_tokens,
    "num_problems": len(state.problems), "known": known == len(ids[::7]),
    "torch_imported": "torch" in sys.modules, "shards_opened": sum(".safetensors" in name for name in opened),
}))
"""


def make(folder: Path, num_shards: int, num_samples: int, num_workers: int) -> None:
    generator = np.random.default_rng(0)
    (folder / SHARDS_FOLDER).mkdir(parents=True)
    (folder / LEDGER_FOLDER).mkdir()
    ids = generator.integers(0, 1 << 63, num_samples, dtype=np.uint64)
    bounds = np.linspace(0, num_samples, num_shards + 1).astype(int)
    taps = [*map(str, IDENTITY.taps), "last_hidden"]
    per_worker = -(-num_shards // num_workers)
    create_or_match(folder, IDENTITY)
    for first in range(0, num_shards, per_worker):
        worker = f"node{first // per_worker:03d}.cluster.example-0"
        with open(folder / LEDGER_FOLDER / f"{worker}.jsonl", "wb") as ledger:
            for seq, n in enumerate(range(first, min(first + per_worker, num_shards))):
                norms = generator.random((4, 2)) * 100
                shard = SealedShard(
                    shard=f"{worker}-{seq:06d}.safetensors",
                    num_bytes=(1 << 30) - int(generator.integers(0, 1 << 20)),
                    xxh3=f"{generator.integers(0, 1 << 63):016x}",
                    num_tokens=24_000,
                    num_trained_tokens=17_321,
                    sample_ids=tuple(f"{sample:016x}" for sample in ids[bounds[n] : bounds[n + 1]].tolist()),
                    statistics={
                        tap: {
                            "mean_norm": float(f"{norms[a, 0]:.6g}"),
                            "max_abs": float(f"{norms[a, 1]:.6g}"),
                            "zeros": float(f"{norms[a, 0] / 1e7:.6g}"),
                            "nonfinite": 0,
                        }
                        for a, tap in enumerate(taps)
                    },
                    seconds=round(float(norms[0, 0]), 3),
                    sealed_at=round(1.76e9 + seq * 60.123, 3),
                )
                ledger.write(format_line(shard))
                fd = os.open(folder / SHARDS_FOLDER / shard.shard, os.O_WRONLY | os.O_CREAT, 0o666)
                os.ftruncate(fd, shard.num_bytes)
                os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="kept, and used as it is where it exists (default: a temporary one)"
    )
    parser.add_argument("--shards", type=int, default=120_000)
    parser.add_argument("--samples", type=int, default=1_400_000)
    parser.add_argument("--workers", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "dataset"
        if not folder.exists():
            started = time.perf_counter()
            make(folder, options.shards, options.samples, options.workers)
            print(f"made {options.shards} shards in {time.perf_counter() - started:.1f} s", file=sys.stderr)
        num_bytes = sum(path.stat().st_size for path in (folder / LEDGER_FOLDER).iterdir())
        print(f"ledgers: {num_bytes / 1e6:.0f} MB")
        for _ in range(3):
            output = subprocess.run([sys.executable, "-c", READ, str(folder)], check=True, capture_output=True).stdout
            found = json.loads(output)
            total = found["imports_seconds"] + found["read_seconds"] + found["ids_seconds"]
            print(
                f"{total:.2f} s = imports {found['imports_seconds']:.2f} + ledgers {found['read_seconds']:.2f} "
                f"+ ids {found['ids_seconds']:.2f}; peak {found['peak_bytes'] / 1e6:.0f} MB; "
                f"{found['num_shards']} shards, {found['num_samples']} samples, {found['num_problems']} problems; "
                f"torch imported: {found['torch_imported']}; shards opened: {found['shards_opened']}"
            )


if __name__ == "__main__":
    main()
