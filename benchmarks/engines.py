"""eyas with vLLM against vLLM's own connector with speculators 0.9.0: tokens a second of the same samples, in turn.

    python benchmarks/engines.py WORK --target SMOLLM2 --conversations smol-sharegpt.jsonl.gz \
        --speculators SITE_PACKAGES --max-samples 100 --rounds 3

Run by the interpreter of an environment with eyas and vLLM. Theirs: vLLM's server with ExampleHiddenStatesConnector
(on a CPU its copy replaced, tests/standardize/formats/real/cpu_connector.py) and ``speculators generate-offline-data``,
which moves one file a sample into its folder; timed by its own word, from its first request on. Ours: ``eyas capture
--engine vllm`` from its first sample on, the last shard's fsync included; without target statistics, which theirs does
not have, and with them. Beside them vLLM alone, in this process, which stores nothing: the most that any capture of
the same forwards can reach. Loading the target, eyas' self-test and a first round of theirs are in no figure. Both
store after:1, after:14, after:26 and after:29 in the target's dtype and run eagerly on all cores, 2048 tokens in a
batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

CONNECTOR = Path(__file__).parents[1] / "tests" / "standardize" / "formats" / "real"
LAYER_IDS = [2, 15, 27, 30]  # vLLM's, for the taps below and after the last layer
TAPS = "after:1,after:14,after:26"
ELAPSED = re.compile(r"Timing: ([\d.]+)s elapsed")
SECONDS_TO_START = 600


class Theirs:
    """vLLM's server, and speculators against it. Used as a context manager."""

    def __init__(self, options: argparse.Namespace, samples: Path) -> None:
        self._options, self._samples = options, samples
        self._work: Path = options.work / "theirs"
        self._work.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, "PYTHONPATH": options.speculators, "HF_HUB_OFFLINE": "1"}

    def __enter__(self) -> Theirs:
        options = self._options
        transfer = {
            "kv_connector": "CpuHiddenStatesConnector" if options.device == "cpu" else "ExampleHiddenStatesConnector",
            **({"kv_connector_module_path": "cpu_connector"} if options.device == "cpu" else {}),
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self._work / "states")},
        }
        extract = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.target, "--port",
            options.port, "--max-model-len", options.max_tokens + 16, "--enforce-eager", "--no-enable-prefix-caching",
            "--max-num-batched-tokens",
            options.batch_tokens, "--kv-transfer-config", json.dumps(transfer), "--speculative-config",
            json.dumps(extract),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, [str(CONNECTOR), os.environ.get("PYTHONPATH")]))
        with open(self._work / "server.log", "w") as log:
            self._server = subprocess.Popen(
                list(map(str, command)), env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._healthy():
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"vLLM's server does not start: {self._work / 'server.log'}")
            time.sleep(1)
        self._speculators("prepare-data", "--data", self._samples, "--output", self._work / "prepared",
                          "--num-preprocessing-workers", 1)  # fmt: skip
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.terminate()
        self._server.wait()

    def seconds(self, num_samples: int) -> float:
        """Of one pass over the samples."""
        out = self._work / "out"
        said = self._speculators(
            "generate-offline-data", "--endpoint", f"http://127.0.0.1:{self._options.port}/v1", "--preprocessed-data",
            self._work / "prepared", "--output", out, "--concurrency", self._options.concurrency, "--fail-on-error",
        )  # fmt: skip
        found = ELAPSED.search(said)
        assert found, said
        assert len(list(out.glob("hs_*.safetensors"))) == num_samples
        shutil.rmtree(out)
        return float(found[1])

    def _healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._options.port}/health")
        except OSError:
            return False
        return True

    def _speculators(self, command: str, *arguments: object) -> str:
        every = [self._options.speculators_python, "-m", "speculators", command, "--model", self._options.target]
        done = subprocess.run(
            list(map(str, [*every, *arguments])),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"speculators {command}: {done.stdout[-3000:]}")
        return done.stdout


class Alone:
    """vLLM in this process."""

    def __init__(self, options: argparse.Namespace, prepared: Path) -> None:
        from eyas.capture.engines.base import EngineSettings
        from eyas.capture.engines.vllm.load import engine_arguments, launch, read_outline, set_environment_of_a_capture
        from eyas.capture.prepared import PreparedSamples

        set_environment_of_a_capture()
        outline = read_outline(options.target)
        settings = EngineSettings(
            target=options.target, taps=(), last_hidden=None, dtype="bfloat16", target_statistics=False,
            batch_tokens=options.batch_tokens,
        )  # fmt: skip
        self._engine = launch(engine_arguments(settings, outline))
        source = PreparedSamples.open(prepared)
        self._samples = [source[row].input_ids.tolist() for row in range(len(source))]

    def seconds(self) -> float:
        """Of one pass over the samples."""
        from eyas.capture.engines.vllm.engine import add_request

        started = time.monotonic()
        for row, ids in enumerate(self._samples):
            add_request(self._engine, f"alone-{row}", ids, {})
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.monotonic() - started


def eyas(*arguments: object) -> str:
    command = [sys.executable, "-m", "eyas.cli.main", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ours(options: argparse.Namespace, prepared: Path, num_samples: int, *more: str) -> float:
    """Seconds of one capture."""
    out = options.work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    said = eyas("capture", prepared, out, "--target", options.target, "--engine", "vllm", "--taps", TAPS,
                "--batch-tokens", options.batch_tokens, "--json", *more)  # fmt: skip
    summary: dict[str, Any] = json.loads(said)
    assert summary["num_new_samples"] == num_samples, summary
    shutil.rmtree(out)
    return float(summary["capture_seconds"])


def write_samples(prepared: Path, out: Path) -> tuple[int, int]:
    """The prepared samples as speculators reads tokens; their number and that of their tokens."""
    from eyas.capture.prepared import PreparedSamples

    source = PreparedSamples.open(prepared)
    samples = [source[row] for row in range(len(source))]
    rows = [{"input_ids": s.input_ids.tolist(), "loss_mask": s.loss_mask.tolist()} for s in samples]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows), sum(len(row["input_ids"]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--conversations", required=True)
    parser.add_argument("--speculators", required=True, help="a folder with speculators 0.9.0 and what it needs")
    parser.add_argument("--speculators-python", default=sys.executable, help="the interpreter that runs it")
    parser.add_argument("--max-samples", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="speculators waits 10 s for a batch's files")
    parser.add_argument("--concurrency", type=int, default=32, help="speculators' default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--port", type=int, default=8232)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    # vLLM's server would leave a core to its front end, and an engine within a process would not.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")

    prepared, samples = options.work / "prepared", options.work / "samples.jsonl"
    if not prepared.exists():
        eyas("prepare", options.conversations, prepared, "--target", options.target, "--max-samples",
             options.max_samples, "--max-tokens", options.max_tokens)  # fmt: skip
    num_samples, num_tokens = write_samples(prepared, samples)
    print(f"{num_samples} samples, {num_tokens:,} tokens; load of the machine {os.getloadavg()[0]:.1f}", flush=True)
    print("| round | load | vLLM alone | speculators | eyas | eyas, target statistics |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    rates: list[list[float]] = []
    with Theirs(options, samples) as theirs:
        alone = Alone(options, prepared)  # after their server, which would inherit its environment
        theirs.seconds(num_samples)
        alone.seconds()
        for number in range(options.rounds):
            seconds = [
                alone.seconds(),
                theirs.seconds(num_samples),
                ours(options, prepared, num_samples, "--no-target-statistics"),
                ours(options, prepared, num_samples),
            ]
            rates.append([num_tokens / value for value in seconds])
            cells = " | ".join(f"{value:,.0f}" for value in rates[-1])
            print(f"| {number + 1} | {os.getloadavg()[0]:.1f} | {cells} |", flush=True)
    for name, place in (("vLLM alone", 0), ("eyas", 2), ("eyas, target statistics", 3)):
        ratio = statistics.median(rate[place] / rate[1] for rate in rates)
        print(f"{name}: {ratio:.2f}x theirs (median of {len(rates)} rounds, tokens/s)")


if __name__ == "__main__":
    main()
