"""What a draft's config.json says, wherever its trainer put it.

Two layouts exist. Most trainers write one flat Llama-like config, some keys nested in ``eagle_config``. speculators
(0.9.0, speculators/models/eagle3/config.py) keeps the decoder layer's own config in ``transformer_layer_config``, and
the rest beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.taps.errors import EyasError

CONFIG_FILE = "config.json"
LAYER_CONFIG = "transformer_layer_config"

_SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_OPTIONAL_SIZES = (
    "num_hidden_layers", "num_key_value_heads", "head_dim", "draft_vocab_size", "target_hidden_size",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class DraftError(EyasError):
    """A draft folder that cannot be read, or whose config lacks what every draft has."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base, and the scaling with its parameters (None: no scaling)."""

    theta: float | None  # None: not said
    scaling: Mapping[str, Any] | None

    def __str__(self) -> str:
        theta = "theta not set" if self.theta is None else f"theta {self.theta:g}"
        if self.scaling is None:
            return f"{theta}, no scaling"
        inside = ", ".join(f"{key} {value}" for key, value in self.scaling.items() if key != "rope_type")
        return f"{theta}, {self.scaling['rope_type']} scaling" + (f" ({inside})" if inside else "")


@dataclass(frozen=True)
class DraftConfig:
    """config.json of a draft, with the numbers that every system needs."""

    raw: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key in (*_SIZES, *_OPTIONAL_SIZES):
            for part in (self.layer, self.raw):
                value = part.get(key)
                if value is None and not (key in _SIZES and part is self.layer):
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise DraftError(f"{CONFIG_FILE}: {key} is {value!r}, expected a positive number")
        nested = self.raw.get("eagle_config")
        if not isinstance(nested, Mapping | None):
            raise DraftError(f"{CONFIG_FILE}: eagle_config is {nested!r}, expected an object")
        for key in _SWITCHES:
            for part in (self.raw, self.layer, nested or {}):
                if not isinstance(part.get(key), bool | None):
                    raise DraftError(f"{CONFIG_FILE}: {key} is {part[key]!r}, expected true or false")

    @property
    def is_speculators(self) -> bool:
        """Whether it is in the format of speculators."""
        return "speculators_model_type" in self.raw

    @property
    def layer(self) -> Mapping[str, Any]:
        """The part that holds the decoder layer's sizes."""
        inner = self.raw.get(LAYER_CONFIG)
        return inner if isinstance(inner, Mapping) else self.raw

    @property
    def architecture(self) -> str | None:
        architectures = self.raw.get("architectures")
        return str(architectures[0]) if isinstance(architectures, list) and architectures else None

    @property
    def hidden_size(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def target_hidden_size(self) -> int:
        """Width of a tap that the draft expects."""
        return int(self.raw.get("target_hidden_size") or self.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.layer.get("num_hidden_layers") or 1)

    @property
    def head_dim(self) -> int:
        return int(self.layer.get("head_dim") or self.hidden_size // int(self.layer["num_attention_heads"]))

    @property
    def num_heads(self) -> int:
        return int(self.layer["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.layer.get("num_key_value_heads") or self.num_heads)

    @property
    def intermediate_size(self) -> int:
        return int(self.layer["intermediate_size"])

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary, as the draft's config has it."""
        return int(self.layer["vocab_size"])

    @property
    def draft_vocab_size(self) -> int | None:
        """None where the key is missing or null: the draft then has the target's vocabulary."""
        value = self.raw.get("draft_vocab_size")
        return None if value is None else int(value)

    @property
    def max_positions(self) -> int | None:
        value = self.layer.get("max_position_embeddings")
        return value if isinstance(value, int) and value > 0 else None

    @property
    def dtype(self) -> str | None:
        """Of the weights, e.g. bfloat16; transformers renamed the key from ``torch_dtype`` in release 5."""
        for part in (self.raw, self.layer):
            for key in ("dtype", "torch_dtype"):
                if part.get(key) is not None:
                    return str(part[key]).removeprefix("torch.")
        return None

    @property
    def rope(self) -> Rope:
        """Raises DraftError where two places contradict each other."""
        return declared_rope(self.layer)

    def declared(self, key: str) -> tuple[str, Any] | None:
        """(place, value) of a key that stands at the top level or inside ``eagle_config``."""
        nested = self.raw.get("eagle_config")
        if isinstance(nested, Mapping) and nested.get(key) is not None:
            return f"eagle_config.{key}", nested[key]
        for part in (self.raw, self.layer):
            if part.get(key) is not None:
                return key, part[key]
        return None


def read_config(folder: Path) -> DraftConfig:
    """``folder``/config.json. Raises DraftError."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise DraftError(
            f"--draft {folder}: no {CONFIG_FILE} there ({error.strerror}): expected a draft's folder"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DraftError(f"{path}: unreadable ({error})") from error
    if not isinstance(raw, dict):
        raise DraftError(f"{path}: expected a JSON object")
    try:
        return DraftConfig(raw)
    except DraftError as error:
        raise DraftError(f"{folder}/{error}") from error


def declared_rope(config: Mapping[str, Any]) -> Rope:
    """Of a draft or a target: ``rope_parameters`` (transformers from 5 on), else ``rope_theta`` and ``rope_scaling``.

    Raises DraftError where both are there and differ: which one counts depends on the reader.
    """
    old = legacy_rope(config)
    if not isinstance(config.get("rope_parameters"), Mapping):
        return old
    new = _rope(config["rope_parameters"], config.get("rope_theta"))
    says_old = config.get("rope_theta") is not None or config.get("rope_scaling") is not None
    if says_old and not (old.theta in (None, new.theta) and old.scaling in (None, new.scaling)):
        raise DraftError(f"rope_parameters says {new}, and rope_theta and rope_scaling say {old}")
    return new


def legacy_rope(config: Mapping[str, Any]) -> Rope:
    """As the keys of transformers before 5 say it: ``rope_theta`` and ``rope_scaling``."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping | None):
        raise DraftError(f"rope_scaling is {scaling!r}, expected an object")
    return _rope(scaling if isinstance(scaling, Mapping) else {}, config.get("rope_theta"))


def _rope(parameters: Mapping[str, Any], theta: Any) -> Rope:
    theta = parameters.get("rope_theta", theta)
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float)):
        raise DraftError(f"rope_theta is {theta!r}, expected a number")
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    scaling = {"rope_type": kind} | {
        key: value
        for key, value in parameters.items()
        if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor") and value is not None
    }
    return Rope(theta=None if theta is None else float(theta), scaling=None if kind == "default" else scaling)
