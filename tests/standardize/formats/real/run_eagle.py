"""EAGLE's own functions on a CPU: those that make and write a sample, and the trainer's dataset and collator.

    python run_eagle.py make EAGLE TARGET TOKENS.json OUT
    python run_eagle.py load EAGLE FOLDER OUT.pt

EAGLE is a checkout from before EAGLE-3 (f2f2366^). Its files are scripts that fetch their models where they start, so
the functions are taken out of them as they stand. Calls for CUDA stay on the CPU.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def make(eagle: str, target: str, tokens: str, out: str) -> None:
    """A file for each of the samples, as ge_data_all_vicuna.py goes through them."""
    from transformers import AutoModelForCausalLM

    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float16)
    file = Path(eagle) / "eagle" / "ge_data" / "ge_data_all_vicuna.py"
    names = _taken(file, ["ge", "writedata"], torch=torch, os=os, bigmodel=model)
    for sample in json.loads(Path(tokens).read_text()):
        names["writedata"](f"{out}/0", names["ge"]({key: torch.tensor([value]) for key, value in sample.items()}))


def load(eagle: str, folder: str, out: str) -> None:
    """What the trainer gets, a sample a batch, by the file's path below FOLDER."""
    import typing

    file = Path(eagle) / "eagle" / "train" / "main.py"
    names = _taken(
        file,
        ["list_files", "CustomDataset", "DataCollatorWithPadding"],
        torch=torch,
        os=os,
        Dataset=torch.utils.data.Dataset,
        train_config={"max_len": 8192},
        **{name: getattr(typing, name) for name in ("Any", "Dict", "List")},
    )
    files = names["list_files"](folder)
    data = names["CustomDataset"](files)
    collate = names["DataCollatorWithPadding"]()
    loaded = {str(Path(path).relative_to(folder)): collate([data[number]]) for number, path in enumerate(files)}
    torch.save(loaded, out)


def _taken(file: Path, wanted: list[str], **around: Any) -> dict[str, Any]:
    """Functions and classes out of a script, with what stands ``around`` them in it."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    names = SimpleNamespace(**around).__dict__
    exec(compile(tree, str(file), "exec"), names)
    return names


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](*sys.argv[2:])
