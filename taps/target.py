"""What the reading of a layer number depends on: facts about the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.taps.errors import EyasError

# Where multimodal configs keep their language model's, outermost first.
_TEXT_CONFIGS = ("thinker_config", "text_config", "language_config", "llm_config")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The number of decoder layers, and what names the model: systems read ids by the model's class."""

    num_layers: int
    model_class: str | None = None  # e.g. KimiK25ForConditionalGeneration
    model_types: tuple[str, ...] = ()  # of the config and of its text config, outermost first

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> TargetFacts:
        """From the target's config.json as a mapping, the language model of a multimodal one included.

        Raises EyasError, naming ``where``, if it holds no number of layers.
        """
        configs = language_configs(config)
        num_layers = next((configs[-1][key] for key in _NUM_LAYERS if isinstance(configs[-1].get(key), int)), None)
        if num_layers is None:
            raise EyasError(f"{where}: found no number of decoder layers (looked for {', '.join(_NUM_LAYERS)})")
        classes = [name for part in configs for name in part.get("architectures") or ()]
        return cls(
            num_layers=num_layers,
            model_class=classes[0] if classes else None,
            model_types=tuple(part["model_type"] for part in configs if part.get("model_type")),
        )

    @property
    def is_named(self) -> bool:
        return self.model_class is not None or bool(self.model_types)

    def __str__(self) -> str:
        name = self.model_class or "/".join(self.model_types) or "a model of unknown class"
        return f"{name}, {self.num_layers} layers"


def language_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``config`` and the language model's configs inside it, outermost first; alone where it is no multimodal one."""
    configs = [config]
    while inner := next((configs[-1][key] for key in _TEXT_CONFIGS if _is_object(configs[-1].get(key))), None):
        configs.append(inner)
    return configs


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)
