"""Drafts on disk: reads the folders that trainers and engines know, and writes ours.

Tensors are named here as the draft model names them (``layers.0.self_attn.q_proj.weight``); the tables of
align/loaders say how each system names the same.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.align.checks.subject import TargetFolder
from eyas.align.draft import CONFIG_FILE, Draft, DraftConfig, DraftError, read_draft
from eyas.align.engine import Engine
from eyas.align.loaders import sglang, speculators, vllm
from eyas.align.loaders.base import Loader, load
from eyas.align.readings import read_config
from eyas.shards.atomic import TEMPORARY_PREFIX, fsync_folder, readable_by_all
from eyas.taps.conventions import default_taps, resolve
from eyas.taps.notation import Tap, parse_taps
from eyas.train.shape import DraftShape
from eyas.train.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eyas.train.draft import DraftModel

WEIGHTS_FILE = "model.safetensors"
_SPECULATORS_IDS = "eagle_aux_hidden_state_layer_ids"
# In config.json, for no engine to interpret: {"taps": ["after:1", ...], "ttt_steps": K, "dataset": its dataset.json}.
OWN_KEY = "eyas"
_OPTIONAL = ("embed_tokens.weight", "lm_head.weight")  # the target's, where a checkpoint has none


@dataclass(frozen=True)
class LoadedDraft:
    """A draft ready to run, with what it must be fed."""

    path: Path
    model: DraftModel
    vocabulary: DraftVocabulary
    taps: tuple[Tap, ...]
    config: DraftConfig


def load_draft(
    folder: Path,
    *,
    target: Path,
    engine: Engine | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LoadedDraft:
    """Load a draft's folder: one of ours, an export for vLLM or SGLang, or one in speculators' format.

    What the checkpoint leaves to the target (embedding, lm_head) is read from ``target``. ``engine``: whose reading of
    the layer ids counts, needed where the config does not say its taps in our notation and is not speculators'.
    dtype: None keeps that of the checkpoint. Raises DraftError where tensors are missing, unknown or misshapen.
    """
    import torch

    from eyas.train.draft import DraftModel
    from eyas.train.target_parts import load_target_parts

    draft = read_draft(folder)
    if not draft.tensors:
        raise DraftError(f"{folder} holds a config and no weights")
    taps = _taps(draft, TargetFolder(target), engine)
    shape = DraftShape.from_draft_config(draft.config, len(taps))
    vocabulary = _vocabulary(draft, shape)
    loading = load(_loader(draft), draft)
    tensors = _read_tensors(draft, loading.taken)
    model = DraftModel(shape)
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in tensors and name not in _OPTIONAL]
    unknown = [*loading.unknown, *loading.dropped, *(set(tensors) - set(wanted))]
    if missing or unknown:
        raise DraftError(
            f"{folder}: "
            + "; ".join(
                f"{what} {', '.join(sorted(names)[:4])}{' ...' if len(names) > 4 else ''}"
                for what, names in (("lacks", missing), ("holds the unknown", unknown))
                if names
            )
        )
    kept = dtype or (tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.float32)
    if absent := [name for name in _OPTIONAL if name not in tensors]:
        if not shape.shares_target_width:
            raise DraftError(f"{folder} lacks {absent[0]}, which cannot be the target's: its width is another")
        parts = load_target_parts(target, rows=torch.from_numpy(vocabulary.ids), dtype=kept)
        tensors |= {name: part for name, part in zip(_OPTIONAL, (parts.embedding, parts.head), strict=True)
                    if name in absent}  # fmt: skip
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise DraftError(f"{folder}: {name} is {list(tensor.shape)}, expected {list(wanted[name].shape)}")
    model.load_state_dict(tensors)
    return LoadedDraft(
        path=folder, model=model.to(device=device, dtype=kept), vocabulary=vocabulary, taps=taps, config=draft.config
    )


def save_draft(
    folder: Path, tensors: Mapping[str, Tensor], vocabulary: DraftVocabulary, config: Mapping[str, Any]
) -> None:
    """Write a draft's folder, whole or not at all: config.json and model.safetensors with ``d2t`` and ``t2d``.

    tensors: by name, on any device, stored in their dtype. Raises DraftError where ``folder`` exists.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if folder.exists():
        raise DraftError(f"{folder} is there already: give another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        maps = {"d2t": torch.from_numpy(vocabulary.d2t), "t2d": torch.from_numpy(vocabulary.t2d)}
        # A draft with the target's whole vocabulary has no maps: vLLM 0.32 refuses a d2t there.
        stored = dict(tensors) if len(vocabulary) == vocabulary.vocab_size else {**tensors, **maps}
        stored = {name: tensor.detach().contiguous().cpu() for name, tensor in stored.items()}
        save_file(stored, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        readable_by_all(temporary / WEIGHTS_FILE)
        (temporary / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2) + "\n")
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            with open(temporary / name, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(temporary)
        os.rename(temporary, folder)
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DraftError(f"{folder}: not written ({error}): make room, then run the same command again") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def _taps(draft: Draft, target: TargetFolder, engine: Engine | None) -> tuple[Tap, ...]:
    own = draft.config.raw.get(OWN_KEY)
    if engine is None and isinstance(own, Mapping) and isinstance(own.get("taps"), list):
        return parse_taps(",".join(map(str, own["taps"])))
    if draft.config.is_speculators:
        convention = f"speculators@{draft.config.raw.get('speculators_version', '')}".removesuffix("@")
        ids = draft.config.raw.get(_SPECULATORS_IDS)
        return resolve(convention, ids, target.facts) if ids else default_taps(convention, target.facts)
    if engine is None:
        raise DraftError(
            f"{draft.path}: which taps this draft is fed depends on who serves it, and its {CONFIG_FILE} does not say: "
            f"give --engine, such as sglang@0.5.23"
        )
    readings = read_config(draft.config.raw, engine, target.facts)
    found = {reading.taps for reading in readings}
    if len(found) != 1 or None in found:
        shown = "; ".join(f"{reading.label}: {reading.outcome}" for reading in readings) or "no release is known"
        raise DraftError(f"{draft.path}: {engine} does not say one list of taps: {shown}")
    (taps,) = found
    assert taps is not None
    return taps


def _loader(draft: Draft) -> Loader:
    """A table that knows the checkpoint's names."""
    if draft.config.is_speculators:
        return speculators.LOADERS[0]
    single = next((name for name in draft.tensors if name.startswith("model.")), None)
    return sglang.LOADERS[-3] if single else next(table for table in vllm.LOADERS[::-1] if table.family == "llama")


def _vocabulary(draft: Draft, shape: DraftShape) -> DraftVocabulary:
    if draft.d2t is None:
        if shape.draft_vocab_size != shape.vocab_size:
            raise DraftError(
                f"{draft.path}: its vocabulary has {shape.draft_vocab_size} of the target's {shape.vocab_size} ids, "
                f"and there is no d2t to say which"
            )
        return DraftVocabulary.identity(shape.vocab_size)
    ids: npt.NDArray[np.int64] = draft.d2t.astype(np.int64) + np.arange(len(draft.d2t))
    t2d = draft.t2d
    if t2d is None:
        t2d = np.zeros(shape.vocab_size, dtype=np.bool_)
        t2d[ids.clip(0, shape.vocab_size - 1)] = True
    return DraftVocabulary.from_maps(draft.d2t, t2d, where=str(draft.path))


def _read_tensors(draft: Draft, taken: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters' tensors by our names. Raises DraftError."""
    import torch
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted({draft.tensors[name].file for name in taken.values()}):
        names = {parameter: name for parameter, name in taken.items() if draft.tensors[name].file == file}
        if file.endswith(".safetensors"):
            with safe_open(draft.path / file, framework="pt") as opened:
                found |= {parameter: opened.get_tensor(name) for parameter, name in names.items()}
        else:
            state = torch.load(draft.path / file, weights_only=True, map_location="cpu", mmap=True)
            found |= {parameter: state[name] for parameter, name in names.items()}
    return found
