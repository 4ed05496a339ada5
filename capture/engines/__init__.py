"""The engines that can run a target, by name. Each folder has the same file names and is imported only when used.

``load.py`` has ``read_outline`` and ``hash_weights``; ``engine.py`` has ``check_settings`` and ``create_engine``;
``generate.py``, where there is one, has ``create_generator``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.capture.engines.base import Engine, EngineSettings, Generator, Sampling, TargetOutline

ENGINES = ("transformers", "vllm", "sglang")
GENERATORS = ("transformers",)  # those that can have the target answer
# They start one worker a GPU themselves: eyas is one process then, and settings.engine_options are for them.
SERVING_ENGINES = ("vllm", "sglang")
ONE_COPY_ENGINES = ("vllm",)  # no --dp


def num_processes(engine: str, *, tp: int, dp: int) -> int:
    """How many processes of eyas a capture is."""
    return dp if engine in SERVING_ENGINES else tp * dp


def read_outline(engine: str, *, target: str, revision: str | None, trust_remote_code: bool) -> TargetOutline:
    """What the target's configuration says, without loading a weight. Raises TargetError."""
    load: Any = import_module(f"{__name__}.{engine}.load")
    outline: TargetOutline = load.read_outline(target, revision=revision, trust_remote_code=trust_remote_code)
    return outline


def hash_weights(engine: str, *, target: str, revision: str | None) -> str | None:
    """What identifies the target's weights, without loading them (dataset.json's weights_hash)."""
    load: Any = import_module(f"{__name__}.{engine}.load")
    digest: str | None = load.hash_weights(target, revision)
    return digest


def check_settings(engine: str, outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse settings that this target cannot be run with, before anything loads. Raises TargetError or TapError."""
    import_module(f"{__name__}.{engine}.engine").check_settings(outline, settings)


def create_engine(engine: str, settings: EngineSettings) -> Engine:
    """The engine, ready to be entered (which loads the target)."""
    created: Engine = import_module(f"{__name__}.{engine}.engine").create_engine(settings)
    return created


def create_generator(engine: str, settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> Generator:
    """What has the target answer, with the target loaded. ``batch_size`` None: the engine's own choice."""
    generate: Any = import_module(f"{__name__}.{engine}.generate")
    created: Generator = generate.create_generator(settings, sampling, batch_size)
    return created
