"""Writes the config of a draft that one engine reads as a dataset's taps, and shows what the others make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.align.draft import CONFIG_FILE, Draft, DraftConfig, Rope, declared_rope
from eyas.align.engine import ENGINES, Engine
from eyas.align.loaders import loaders_for
from eyas.align.loaders.base import FLAGS, load
from eyas.align.readings import SERVING_CONFIG, ConfigReading, Fragment, fragments, read_config
from eyas.shards.atomic import publish_new
from eyas.shards.identity import DatasetIdentity
from eyas.taps.conventions.numbering import ConventionError
from eyas.taps.errors import EyasError, UsageError
from eyas.taps.notation import Tap, format_taps
from eyas.taps.target import TargetFacts

ARCHITECTURE = "LlamaForCausalLMEagle3"  # the one name that vLLM and SGLang share

_COPIED = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


class ExportError(EyasError):
    """A draft config that the engine cannot read as the taps, or that cannot be written."""


@dataclass(frozen=True, kw_only=True)
class DraftConfigFile:
    """A draft's config, and what goes into the engine's own configuration instead of it."""

    config: dict[str, Any]
    serving: str  # for engines that take the ids when they start; else empty


def make_draft_config(
    identity: DatasetIdentity,
    target: Mapping[str, Any],
    facts: TargetFacts,
    engine: Engine,
    *,
    draft_vocab_size: int | None = None,
    num_layers: int = 1,
    hidden_size: int | None = None,
    switches: Mapping[str, bool] | None = None,
) -> DraftConfigFile:
    """A Llama-like EAGLE-3 draft, sized like the target, that ``engine`` feeds ``identity``'s taps.

    target: the language model's part of its config.json. hidden_size: the draft's, None for the target's. switches: of
    the forward (loaders.base.FLAGS); an engine may lack one, so those not named are off. Raises ExportError where the
    engine cannot be told the taps, does not load the draft or has no such switch, and UsageError where its releases
    would be told in different ways and none is given.
    """
    config = _config(identity, target, draft_vocab_size) | {"num_hidden_layers": num_layers} | dict(switches or {})
    if hidden_size is not None:
        config |= _heads(config, hidden_size)
    return tell_taps(config, identity.taps, facts, engine)


def tell_taps(config: Mapping[str, Any], taps: Sequence[Tap], facts: TargetFacts, engine: Engine) -> DraftConfigFile:
    """``config``, a draft's without layer ids, with those that make ``engine`` feed ``taps``. Raises as above."""
    try:
        found = fragments(engine, taps, facts)
    except ConventionError as error:
        raise ExportError(f"--engine {engine}: {error}") from error
    if len(found) > 1:
        shown = "\n".join(f"  {fragment.label}: {fragment}" for fragment in found)
        raise UsageError(f"--engine {engine}: its releases read ids in different ways; say which (@VERSION):\n{shown}")
    (fragment,) = found
    told: dict[str, Any] = json.loads(json.dumps(dict(config)))
    in_config = not fragment.place.startswith(SERVING_CONFIG)
    if in_config:
        _write(told, fragment)
    _prove(told, tuple(taps), facts, engine, in_config=in_config)
    return DraftConfigFile(config=told, serving="" if in_config else str(fragment))


def write_draft_config(out: Path, config: Mapping[str, Any]) -> Path:
    """Write ``out``/config.json, whole or not at all. Raises ExportError where there is one already."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / CONFIG_FILE
    if not publish_new(path, (json.dumps(config, indent=2) + "\n").encode()):
        raise ExportError(f"{path} is there already: give another folder, or remove it")
    return path


def all_readings(config: Mapping[str, Any], facts: TargetFacts) -> list[ConfigReading]:
    """What every engine, in every release that was read, makes of a draft's config."""
    return [
        reading
        for system in ENGINES
        if system != "transformers"
        for reading in read_config(config, Engine(system, None), facts)
    ]


def _config(identity: DatasetIdentity, target: Mapping[str, Any], draft_vocab_size: int | None) -> dict[str, Any]:
    heads = _positive(target, "num_attention_heads")
    hidden_size = identity.hidden_size
    rope = _rope(declared_rope(target))
    # Mixtures of experts may have no dense width; 3 H is Qwen3's ratio, which speculators takes too.
    intermediate_size = target.get("intermediate_size") or 3 * hidden_size
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **{key: target[key] for key in _COPIED if target.get(key) is not None},
        **rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": identity.target.vocab_size,
        "draft_vocab_size": draft_vocab_size or identity.target.vocab_size,
        "target_hidden_size": hidden_size,
        "num_aux_hidden_states": len(identity.taps),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "torch_dtype": identity.dtype,
    }


def _heads(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Sizes of a draft of another width than the target: heads as wide as the target's, in the same proportion."""
    if hidden_size % config["head_dim"]:
        raise UsageError(
            f"draft hidden size {hidden_size}: expected a multiple of {config['head_dim']}, the heads' size"
        )
    heads = hidden_size // config["head_dim"]
    shared = config["num_attention_heads"] // config["num_key_value_heads"]
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // shared if heads % shared == 0 else heads,
        "intermediate_size": round(config["intermediate_size"] * hidden_size / config["hidden_size"]),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    """In the keys that every release of transformers reads."""
    keys: dict[str, Any] = {} if rope.theta is None else {"rope_theta": rope.theta}
    return keys if rope.scaling is None else {**keys, "rope_scaling": dict(rope.scaling)}


def _write(config: dict[str, Any], fragment: Fragment) -> None:
    *outer, last = fragment.place.split(".")
    inner = config
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[last] = list(fragment.ids)


def _prove(
    config: dict[str, Any], taps: tuple[Tap, ...], facts: TargetFacts, engine: Engine, *, in_config: bool
) -> None:
    """Read the config back as the engine does."""
    wrong = [r for r in read_config(config, engine, facts) if r.taps != taps] if in_config else []
    if wrong:
        raise ExportError(f"{engine} cannot be told to feed {format_taps(taps)}: {wrong[0]}")
    draft = Draft(path=Path(), config=DraftConfig(config), tensors={}, d2t=None, t2d=None)
    for loader in loaders_for(engine, draft):
        loading = load(loader, draft)
        num_taps = loading.num_taps
        if lost := [name for name in FLAGS if bool(config[name]) != loading.flags[name]]:
            raise ExportError(
                f"{loader.label} has no {' and no '.join(lost)} in its draft, and this one has ({loader.source}): "
                f"serve it with another engine or release, or train it without"
            )
        if config["num_hidden_layers"] > (loader.max_layers or config["num_hidden_layers"]):
            raise ExportError(f"{loader.label} builds drafts of {loader.max_layers} layer, and this one has more")
        if in_config and num_taps != len(taps):
            raise ExportError(
                f"{loader.label} builds its draft for {num_taps} taps, and there are {len(taps)}: "
                f"capture {num_taps} taps, or serve with a release that takes any number"
            )


def _positive(target: Mapping[str, Any], key: str) -> int:
    value = target.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ExportError(f"the target's config.json: {key} is {value!r}, expected a positive number")
    return value
