"""How each engine reads a draft checkpoint: one module per system, each a table of the same shape (``LOADERS``)."""

from __future__ import annotations

from eyas.align.draft import Draft
from eyas.align.engine import Engine
from eyas.align.loaders import sglang, speculators, transformers, trtllm, vllm
from eyas.align.loaders.base import Loader
from eyas.taps.conventions.entry import of_version

TABLES: dict[str, tuple[Loader, ...]] = {
    "sglang": sglang.LOADERS,
    "vllm": vllm.LOADERS,
    "trtllm": trtllm.LOADERS,
    "transformers": transformers.LOADERS,
}


def known_architectures(engine: Engine) -> list[str]:
    """The draft architectures that ``engine`` loads, in the releases that were read."""
    return sorted(
        {name for loader in of_version(TABLES[engine.system], engine.version) for name in loader.architectures}
    )


def loaders_for(engine: Engine, draft: Draft) -> list[Loader]:
    """The loaders that may be ``engine``'s for this draft: several where the release is not given or lies in a gap.

    Empty where the engine, as far as it was read, does not load the draft.
    """
    return [
        loader
        for loader in of_version(TABLES[engine.system], engine.version)
        if loader.architecture(draft.config) in loader.architectures
    ]


def trainer_of(draft: Draft) -> Loader | None:
    """The trainer whose format the checkpoint is in, where that says how it was trained."""
    if not draft.config.is_speculators:
        return None
    tables = speculators.LOADERS
    return next((table for table in tables if table.architecture(draft.config) in table.architectures), None)
