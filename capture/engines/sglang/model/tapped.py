"""SGLang's class for the target, with hooks that capture.

Imported by SGLang in each of its processes; what to capture stands in the environment (capture/engines/sglang/link.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from eyas.capture.engines.sglang.link import Place

MODELS = "sglang.srt.models"


def find_class(architecture: str) -> Any | None:
    """SGLang's own class named ``architecture``; None where it has none. Imports that class's module alone."""
    package = importlib.import_module(MODELS)
    for folder in package.__path__:
        for info in pkgutil.iter_modules([folder]):
            source = Path(folder) / f"{info.name}.py"
            if info.ispkg or f"class {architecture}(" not in source.read_text(encoding="utf-8"):
                continue
            entries = getattr(importlib.import_module(f"{MODELS}.{info.name}"), "EntryClass", [])
            for entry in entries if isinstance(entries, list) else [entries]:
                if entry.__name__ == architecture:
                    return entry
    return None


def tapped(base: Any, place: Place) -> Any:
    """``base`` under its own name, made to capture what ``place`` says."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        from eyas.capture.engines.sglang.hooks import attach

        attach(self, place)

    members = {"__init__": __init__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), members)


def _entries() -> list[Any]:
    place = Place.from_environment()
    base = None if place is None else find_class(place.architecture)
    return [] if place is None or base is None else [tapped(base, place)]


EntryClass = _entries()
