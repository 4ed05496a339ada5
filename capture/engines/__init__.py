"""The engines that can run a target, by name. Each folder has the same files: ``engine.py`` and what it needs.

An engine's ``engine.py`` has ``outline(target, revision, trust_remote_code)``, ``check(outline, settings)`` and
``create(settings)``; it is imported only when that engine is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.capture.engines.base import Engine, EngineSettings, TargetOutline

ENGINES = {"transformers": "eyas.capture.engines.transformers.engine"}


def read_outline(engine: str, *, target: str, revision: str | None, trust_remote_code: bool) -> TargetOutline:
    """What the target's configuration says, without loading a weight. Raises TargetError."""
    outline: TargetOutline = _module(engine).outline(target, revision=revision, trust_remote_code=trust_remote_code)
    return outline


def check_settings(engine: str, outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse settings that this target cannot be run with, before anything loads. Raises TargetError."""
    _module(engine).check(outline, settings)


def create_engine(engine: str, settings: EngineSettings) -> Engine:
    """The engine, ready to be entered (which loads the target)."""
    created: Engine = _module(engine).create(settings)
    return created


def _module(engine: str) -> Any:
    return import_module(ENGINES[engine])
