"""Writes a trained draft as an engine, or speculators, loads it: names, shapes, config keys and layer ids.

The layer's tensors are named ``midlayer.*`` where there is one layer, which every release of SGLang and vLLM and
TensorRT-LLM read (SGLang up to 0.5.11 knows no other name), and ``layers.{i}.*`` elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.align.draft_config import ExportError, tell_taps
from eyas.align.engine import Engine
from eyas.align.static import check_plan
from eyas.align.verdict import Report
from eyas.shards.identity import DatasetIdentity
from eyas.taps.conventions import ids_for
from eyas.taps.target import TargetFacts
from eyas.train.draft_files import OWN_KEY, LoadedDraft, save_draft

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SPECULATORS = "speculators"  # beside the engines: the format that vLLM reads as well
SPECULATORS_VERSION = "0.9.0"
_IDS = ("eagle_aux_hidden_state_layer_ids", "eagle_config")
_TOP_OF_SPECULATORS = (
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """A draft's folder for an engine."""

    path: Path
    serving: str  # what the engine is started with, where it takes the layer ids so; else empty
    report: Report | None  # `eyas check` of the draft against the data it was trained on, where that is known


def export_draft(
    draft: LoadedDraft, out: Path, *, engine: Engine | None, target: Path, facts: TargetFacts, dtype: torch.dtype
) -> Exported:
    """Write ``out``, whole or not at all. engine None: speculators' format.

    Raises ExportError where the engine cannot be told the taps or lacks a part of this draft, or where `eyas check`
    finds that it would not load what was trained.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in draft.model.state_dict().items()}
    config = _plain_config(draft)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if engine is None:
        save_draft(out, tensors, draft.vocabulary, _speculators_config(draft, config, target, facts))
        return Exported(out, "", None)
    made = tell_taps(config, draft.taps, facts, engine)
    save_draft(out, _named(tensors, draft), draft.vocabulary, {**made.config, OWN_KEY: _own(draft)})
    report = None
    if (identity := trained_on(draft)) is not None:
        report = check_plan(identity, draft=out, engine=engine)
        if report.count("mismatch"):
            shutil.rmtree(out)
            raise ExportError(f"--engine {engine} would not load this draft as it was trained:\n{report.text()}")
    return Exported(out, made.serving, report)


def trained_on(draft: LoadedDraft) -> DatasetIdentity | None:
    """The identity of the dataset a draft of ours was trained on; None for others' drafts."""
    own = draft.config.raw.get(OWN_KEY)
    body = own.get("dataset") if isinstance(own, Mapping) else None
    return DatasetIdentity.from_json(body, where=str(draft.path)) if isinstance(body, Mapping) else None


def _plain_config(draft: LoadedDraft) -> dict[str, Any]:
    """Flat, as engines want it, without layer ids."""
    raw: dict[str, Any] = json.loads(json.dumps(dict(draft.config.raw)))
    if draft.config.is_speculators:
        raw = {**raw.pop("transformer_layer_config"), **{key: raw[key] for key in _TOP_OF_SPECULATORS if key in raw}}
        raw["architectures"] = ["LlamaForCausalLMEagle3"]
        raw["target_hidden_size"] = raw.get("target_hidden_size") or raw["hidden_size"]
        raw["num_aux_hidden_states"] = len(draft.taps)
        if (rope := raw.pop("rope_parameters", None)) is not None:  # as every release of transformers reads it
            theta = rope.pop("rope_theta", None)
            raw |= {"rope_theta": theta} | ({"rope_scaling": rope} if rope.get("rope_type") != "default" else {})
    return {key: value for key, value in raw.items() if key not in (*_IDS, OWN_KEY)}


def _own(draft: LoadedDraft) -> dict[str, Any]:
    own = draft.config.raw.get(OWN_KEY)
    steps = {"ttt_steps": own["ttt_steps"]} if isinstance(own, Mapping) and "ttt_steps" in own else {}
    return {"taps": [str(tap) for tap in draft.taps], **steps}


def _named(tensors: Mapping[str, Tensor], draft: LoadedDraft) -> dict[str, Tensor]:
    if draft.model.shape.num_layers > 1:
        return dict(tensors)
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def _speculators_config(
    draft: LoadedDraft, config: Mapping[str, Any], target: Path, facts: TargetFacts
) -> dict[str, Any]:
    """As speculators 0.9.0 writes it (config.py of the package, and of models/eagle3)."""
    own = _own(draft)
    layer = {key: value for key, value in config.items() if key not in (*_TOP_OF_SPECULATORS, "architectures")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **{key: config[key] for key in _TOP_OF_SPECULATORS if key in config},
        "eagle_aux_hidden_state_layer_ids": list(ids_for(f"speculators@{SPECULATORS_VERSION}", draft.taps, facts)),
        "embed_requires_grad": False,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": own.get("ttt_steps", 3)}],
            "verifier": {"name_or_path": str(target), "architectures": [facts.model_class]},
        },
        OWN_KEY: own,
    }
