"""A folder that speculators' data generation wrote.

0.9 (speculators/train/data.py, cli/generate_offline_data.py): a `datasets` folder of tokens and masks, and
``hidden_states/hs_{row}.safetensors`` as vLLM's connector wrote them, whose last slot is the residual stream after the
last layer. The hidden states alone are read too (``generate-offline-data --output`` puts them elsewhere).

Up to 0.4 (data_generation/config_generator.py, train/data.py of 0.3.0): a ``.pt`` file a sample, anywhere below the
folder. v1: ``input_ids``, ``loss_mask``, ``hidden_states``, a list of [T, H] whose last is the residual stream after
the last layer; data_config.json says the layers. v0: ``hidden_state`` [T, 3H] and ``target`` [T, H], which its trainer
gives to lm_head as it is: post-norm.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.hidden_states_file import read_shape
from eyas.standardize.formats.speculators.rows import TokenRows, has_rows

NAME = "speculators"
STATES_FOLDER = "hidden_states"
OLD_CONFIG = "data_config.json"
OLD_RELEASE = "0.4.0"  # the last that wrote .pt files

_STATES_FILE = re.compile(r"hs_([0-9]+)\.safetensors")
_TRIED_FILES = 16
_NO_SAMPLES = ("token_freq.pt",)  # 0.3 writes it beside the samples


def detect(folder: Path) -> Layout | None:
    """The layout of ``folder``; None where it is another's."""
    return _arrow_layout(folder) or _old_layout(folder)


def states_folder(folder: Path) -> Path:
    """Where hs_N.safetensors stand: below the Arrow dataset, or ``folder`` itself."""
    return folder / STATES_FOLDER if (folder / STATES_FOLDER).is_dir() else folder


def state_rows(folder: Path) -> list[int]:
    """The N of each hs_N.safetensors, ascending."""
    matches = (_STATES_FILE.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match)


def old_files(folder: Path) -> list[str]:
    """Every .pt file below ``folder`` that may hold a sample, by its path there, sorted by the numbers in it."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(parent, folder)
        names += [
            name if inside == "." else os.path.join(inside, name)
            for name in files
            if name.endswith(".pt") and not name.startswith(".") and name not in _NO_SAMPLES
        ]
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _arrow_layout(folder: Path) -> Layout | None:
    states = states_folder(folder)
    rows = state_rows(states)
    shape = next(
        (shape for row in rows[:_TRIED_FILES] if (shape := read_shape(states / f"hs_{row}.safetensors"))), None
    )
    if shape is None:
        return None
    problems = []
    tokens = TokenRows.open(folder) if has_rows(folder) else None
    if tokens is not None:
        without = len(tokens) - sum(row < len(tokens) for row in rows)
        beyond = len(rows) - (len(tokens) - without)
        if without:
            problems.append(f"{without:,} of its {len(tokens):,} rows have no hidden states")
        if beyond:
            problems.append(f"{beyond:,} files of hidden states belong to no row")
    if shape.num_slots < 2:
        problems.append("a single slot, which is the last hidden state: there are no features")
    backend = ", fp8 backend" if shape.is_fp8 else ""
    return Layout(
        format=NAME,
        version=f"0.9{backend}: "
        + ("Arrow dataset and hs_N.safetensors" if tokens else "hs_N.safetensors without their Arrow dataset"),
        num_files=len(rows),
        num_taps=shape.num_slots - 1,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        last_hidden="pre-norm",
        has_loss_mask=tokens is not None,
        problems=tuple(problems),
    )


def _old_layout(folder: Path) -> Layout | None:
    names = old_files(folder)
    for name in names[:_TRIED_FILES]:
        try:
            content = read_tensor_file(folder / name)
        except TensorFileError:
            continue
        if not isinstance(content, dict) or "input_ids" not in content:
            return None
        if isinstance(states := content.get("hidden_states"), list) and len(states) > 1:
            return _v1(folder, names, content)
        if {"hidden_state", "target"} <= content.keys():
            return _v0(names, content)
        return None
    return None


def _v1(folder: Path, names: list[str], content: dict[str, Any]) -> Layout:
    states = content["hidden_states"]
    ids = _stated_ids(folder)
    problems = []
    if ids is not None and len(ids) != len(states):
        problems.append(f"{OLD_CONFIG} names {len(ids)} layers, and the files hold {len(states)} states")
        ids = None
    return Layout(
        format=NAME,
        version="0.3 to 0.4 (v1): data_N.pt with a list of states",
        num_files=len(names),
        num_taps=len(states) - 1,
        hidden_size=int(states[0].shape[-1]),
        dtype=str(states[0].dtype).removeprefix("torch."),
        last_hidden="pre-norm",
        has_loss_mask=content.get("loss_mask") is not None,
        layer_ids=None if ids is None else ids[:-1],
        convention=None if ids is None else f"{NAME}@{OLD_RELEASE}",
        problems=tuple(problems),
    )


def _v0(names: list[str], content: dict[str, Any]) -> Layout:
    features, target = content["hidden_state"], content["target"]
    H = int(target.shape[-1])
    return Layout(
        format=NAME,
        version="before 0.3 (v0): .pt with hidden_state and target",
        num_files=len(names),
        num_taps=int(features.shape[-1]) // H,
        hidden_size=H,
        dtype=str(features.dtype).removeprefix("torch."),
        last_hidden="post-norm",
        has_loss_mask=content.get("loss_mask") is not None,
    )


def _stated_ids(folder: Path) -> tuple[int, ...] | None:
    """The layers of data_config.json, the last hidden state's among them; None where it does not say."""
    try:
        ids = json.loads((folder / OLD_CONFIG).read_bytes())["hidden_states"]["layer_ids"]
        return tuple(int(layer) for layer in ids)
    except (OSError, ValueError, KeyError, TypeError):
        return None
