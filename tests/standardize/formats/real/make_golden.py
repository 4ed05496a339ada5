"""Remakes golden/: files by the other trainers' own code, and what a replay of the target says of them.

    EYAS_SPECFORGE=... EYAS_MODELOPT=... EYAS_EAGLE=... python make_golden.py GOLDEN

The target is a random Llama of 8 layers, so nothing of anyone's is in them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

LAYERS = (1, 3, 4)
CONVERSATIONS = [
    [("user", "w1 w2"), ("assistant", "w3 w4 w5")],
    [("user", "w6"), ("assistant", "w7"), ("user", "w8 w9 w10"), ("assistant", "w11 w12")],
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <|im_end|>{% endgeneration %} {% else %}{{ message['content'] }} "
    "<|im_end|> {% endif %}{% endfor %}"
)


def prepare(folder: Path) -> Path:
    """The target, conversations.jsonl and template.jinja; returns the target."""
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.tiny import make_target, write_jsonl

    rows = [
        {"conversation_id": f"c{n}", "messages": [{"role": role, "content": text} for role, text in turns]}
        for n, turns in enumerate(CONVERSATIONS)
    ]
    write_jsonl(folder / "conversations.jsonl", rows)
    (folder / "template.jinja").write_text(TEMPLATE)
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    return make_target(folder / "target", **small)


def replayed(target: Path, dtype: torch.dtype, ids: list[int]) -> dict[str, Any]:
    """The first channel of each tap, by transformers on the tokens alone: features [T][A], final [T]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    channel = [state[0, :, 0].tolist() for state in states]
    features = [[round(channel[layer + 1][t], 4) for layer in LAYERS] for t in range(len(ids))]
    return {"features": features, "final": [round(value, 4) for value in channel[-1]]}


def main(golden: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        target = prepare(work)
        _run("specforge", "make", target, work / "conversations.jsonl", work / "specforge")
        _run("modelopt", "make", target, work / "conversations.jsonl", work / "template.jinja", work / "modelopt")
        tokens = work / "specforge" / "tokens.json"
        _run("eagle", "make", target, tokens, work / "eagle")
        dtypes = {"specforge": torch.bfloat16, "modelopt": torch.float32, "eagle": torch.float16}
        for peer, dtype in dtypes.items():
            shutil.rmtree(golden / peer, ignore_errors=True)
            shutil.copytree(work / peer, golden / peer, ignore=shutil.ignore_patterns("*.json"))
            samples = json.loads(tokens.read_text())
            said = [sample | replayed(target, dtype, sample["input_ids"]) for sample in samples]
            (golden / f"{peer}.json").write_text(json.dumps(said) + "\n")


def _run(peer: str, verb: str, *arguments: object) -> None:
    where = os.environ[f"EYAS_{peer.upper()}"]
    checkout = [where.split(os.pathsep)[0]] if peer == "eagle" else []
    command = [sys.executable, str(Path(__file__).parent / f"run_{peer}.py"), verb, *checkout, *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": where})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
