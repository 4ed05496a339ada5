"""Converting speculators' layout to eyas's and back, against a plain copy of the same files on the same disk.

    python benchmarks/convert.py /scratch [--gigabytes 4] [--hidden-size 4096] [--tokens 1024] [--workers 2]

Makes a random speculators 0.9 folder, then takes turns (copy, import, copy, export), each in a process of its own that
ends once everything is on the disk: the copy fsyncs every file at its end (after writing all, as the export does batch
by batch). Before each the sources are read once, so that all start from the page cache; whatever does not fit is read
from the disk by all alike. Prints bytes/s of the source's bytes, the processor seconds that a GB took, and the
process's peak memory (mapped files count). Both sides want idle cores: a copy needs half of one, a conversion two.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from eyas.shards.dataset import Dataset
from eyas.shards.identity import TargetIdentity, TokenizerIdentity
from eyas.standardize.events import Summary
from eyas.standardize.foreign import foreign_request, import_folder
from eyas.standardize.formats.registry import create_writer, detect, open_reader
from eyas.standardize.formats.write_rows import write_rows
from eyas.taps.notation import after

NUM_TAPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sample, on average")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", choices=["copy", "import", "export"], help="internal: one measured step")
    parser.add_argument("--source", type=Path, help="internal")
    options = parser.parse_args()
    if options.step is not None:
        _step(options)
        return
    folder = options.scratch / "eyas-convert"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = folder / "speculators"
    num_bytes = make(source, options)
    print(f"{num_bytes / 1e9:.2f} GB in {len(list(source.rglob('*.safetensors'))):,} files of states")
    results: dict[str, list[tuple[float, float, float]]] = {"copy in": [], "import": [], "copy out": [], "export": []}
    for _ in range(options.rounds):
        for name, step, given, out in (
            ("copy in", "copy", source, folder / "copied"),
            ("import", "import", source, folder / "standard"),
            ("copy out", "copy", folder / "standard", folder / "copied"),
            ("export", "export", folder / "standard", folder / "written"),
        ):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            size = _read_all(given)
            seconds, processor, peak = _measured(step, given, out, options)
            results[name].append((size / seconds, processor / size, peak))
            print(f"  {name}: {size / seconds / 1e9:.2f} GB/s, {processor / size * 1e9:.2f} s of processor a GB, peak "
                  f"{peak / 2**30:.2f} GiB", flush=True)  # fmt: skip
    for copy, convert in (("copy in", "import"), ("copy out", "export")):
        plain, ours = (statistics.median(rate for rate, _, _ in results[name]) for name in (copy, convert))
        peak = max(peak for _, _, peak in results[convert])
        print(f"{convert}: {ours / 1e9:.2f} GB/s, a plain copy {plain / 1e9:.2f} GB/s: {100 * ours / plain:.0f} %, "
              f"peak {peak / 2**30:.2f} GiB")  # fmt: skip
    shutil.rmtree(folder)


def _measured(step: str, source: Path, out: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak bytes of one step in a process of its own: loading libraries is none."""
    command = [sys.executable, __file__, str(out), "--step", step, "--source", str(source)]
    command += ["--hidden-size", str(options.hidden_size), "--workers", str(options.workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, processor, peak = done.stdout.split()[-3:]
    return float(seconds), float(processor), float(peak)


def _step(options: argparse.Namespace) -> None:
    import datasets  # noqa: F401  (loading libraries is no conversion)

    started, before = time.perf_counter(), time.process_time()
    {"copy": _copy, "import": _import, "export": _export}[options.step](options.source, options.scratch, options)
    seconds, processor = time.perf_counter() - started, time.process_time() - before
    print(seconds, processor, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _copy(source: Path, out: Path, options: argparse.Namespace) -> None:
    shutil.copytree(source, out)
    for path in out.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _import(source: Path, out: Path, options: argparse.Namespace) -> None:
    reader = open_reader(source, detect(source, "speculators"))
    request = foreign_request(
        source,
        out,
        reader,
        beside="pre-norm",
        target=_target(options.hidden_size),
        tokenizer=TokenizerIdentity(files_hash="0", chat_template_hash=None, probe_hash="0"),
        taps=[after(1), after(15), after(28)],
    )
    *_, summary = import_folder(request, workers=options.workers, shard_bytes=512 << 20, should_stop=lambda: False)
    assert isinstance(summary, Summary)
    assert summary.num_samples == len(reader.items())


def _export(source: Path, out: Path, options: argparse.Namespace) -> None:
    dataset = Dataset.open(source)
    write_rows(dataset, out, create_writer("speculators"), format="speculators", threads=options.workers)


def _read_all(folder: Path) -> int:
    """Through the page cache; returns the bytes."""
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while block := file.read(16 << 20):
                    total += len(block)
    return total


def make(folder: Path, options: argparse.Namespace) -> int:
    """A speculators folder with random states of the size of real ones; returns its bytes of states."""
    import datasets
    from safetensors.torch import save_file

    states = folder / "hidden_states"
    states.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    ids_of, masks_of = [], []
    total, row = 0, 0
    values = torch.randn(1 << 24, generator=draw).to(torch.bfloat16)
    while total < options.gigabytes * 1e9:
        T = int(torch.randint(options.tokens // 2, options.tokens * 3 // 2, (1,), generator=draw))
        needed = T * (NUM_TAPS + 1) * options.hidden_size
        start = int(torch.randint(0, len(values), (1,), generator=draw))
        hidden = values.roll(-start).repeat(-(-needed // len(values)))[:needed]
        ids = torch.randint(0, 128_000, (T,), generator=draw)
        tensors = {"hidden_states": hidden.view(T, NUM_TAPS + 1, options.hidden_size), "token_ids": ids}
        save_file(tensors, states / f"hs_{row}.safetensors")
        ids_of.append(ids.numpy())
        masks_of.append((np.arange(T) % 3 > 0).astype(np.int64))
        total += needed * 2
        row += 1
    datasets.disable_progress_bars()
    lengths = [len(ids) for ids in ids_of]
    rows = datasets.Dataset.from_dict({"input_ids": ids_of, "loss_mask": masks_of, "seq_len": lengths})
    rows.with_format("torch").save_to_disk(str(folder))
    return total


def _target(hidden_size: int) -> TargetIdentity:
    return TargetIdentity(
        name="random",
        revision=None,
        config_hash="0",
        weights_hash=None,
        model_class="LlamaForCausalLM",
        num_layers=32,
        hidden_size=hidden_size,
        vocab_size=128_000,
        weight_dtype="bfloat16",
        quantization=None,
        final_norm="LlamaRMSNorm",
        final_norm_eps=1e-5,
        logit_scale=1.0,
        logit_softcap=None,
        lm_head_bias=False,
        lm_head_rows=128_000,
    )


if __name__ == "__main__":
    main()
