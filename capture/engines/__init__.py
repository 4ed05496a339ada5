"""The engines that can run a target, by name. Each folder has the same file names and is imported only when used.

``load.py`` has ``read_outline`` and ``hash_weights``; ``engine.py`` has ``check_settings`` and ``create_engine``;
``generate.py`` has ``check_generation`` and ``create_generator``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.capture.engines.base import (
        Engine,
        EngineSettings,
        Generator,
        Prober,
        Sampling,
        TargetOutline,
    )
    from eyas.capture.nodes import Workers

ENGINES = ("transformers", "vllm", "sglang")
# They start one worker a GPU themselves: eyas is one process then, and settings.engine_options are for them.
SERVING_ENGINES = ("vllm", "sglang")
MULTI_NODE_ENGINES = ("vllm",)  # one copy over several nodes, of which the first drives


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


def read_nodes(engine: str, settings: EngineSettings) -> tuple[int, int, str, int]:
    """How many nodes a launch has and which this is, and the address and port of node 0. Raises UsageError."""
    if engine not in MULTI_NODE_ENGINES:
        return 1, 0, "", 0
    load: Any = import_module(f"{__name__}.{engine}.load")
    nodes: tuple[int, int, str, int] = load.read_nodes(settings.engine_options)
    return nodes


def installed_version(engine: str) -> str:
    """The version of a serving engine here. Raises TargetError where there is none."""
    load: Any = import_module(f"{__name__}.{engine}.load")
    found: str = load.installed_version()
    return found


def run_workers(engine: str, settings: EngineSettings, outline: TargetOutline) -> AbstractContextManager[Workers]:
    """This node's workers of an engine that another node drives. Raises TargetError or UsageError."""
    load: Any = import_module(f"{__name__}.{engine}.load")
    workers: AbstractContextManager[Workers] = load.run_workers(settings, outline)
    return workers


def check_settings(engine: str, outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse settings that this target cannot be run with, before anything loads. Raises TargetError or TapError."""
    import_module(f"{__name__}.{engine}.engine").check_settings(outline, settings)


def create_engine(engine: str, settings: EngineSettings) -> Engine:
    """The engine, ready to be entered (which loads the target)."""
    created: Engine = import_module(f"{__name__}.{engine}.engine").create_engine(settings)
    return created


def create_prober(engine: str, settings: EngineSettings) -> Prober:
    """One of SERVING_ENGINES, ready to be entered, that can be told to capture any tap of any target it runs."""
    created: Prober = import_module(f"{__name__}.{engine}.engine").create_prober(settings)
    return created


def check_generation(engine: str, settings: EngineSettings) -> None:
    """Refuse settings that the target cannot answer with, before anything loads. Raises TargetError or UsageError."""
    import_module(f"{__name__}.{engine}.generate").check_generation(settings)


def create_generator(engine: str, settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> Generator:
    """What has the target answer, ready to be entered (which loads it). ``batch_size`` None: the engine's choice."""
    generate: Any = import_module(f"{__name__}.{engine}.generate")
    created: Generator = generate.create_generator(settings, sampling, batch_size)
    return created
