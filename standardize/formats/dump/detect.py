"""Whether a folder is a described dump, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eyas.standardize.formats.base import Layout
from eyas.standardize.formats.dump.description import DESCRIPTION_FILE, read_description
from eyas.standardize.formats.dump.index import Index


@dataclass(frozen=True, kw_only=True)
class DumpLayout(Layout):
    """A layout with the index it was made from, so that a folder of millions of files is walked through once."""

    index: Index = field(repr=False, compare=False)


def detect(folder: Path) -> DumpLayout | None:
    """The layout of a folder with a description in it, None without. Raises DescriptionError."""
    if not (folder / DESCRIPTION_FILE).is_file():
        return None
    found = read_description(folder)
    index = Index(folder, found)
    states = found.states
    return DumpLayout(
        format="dump",
        version=f"{DESCRIPTION_FILE}: {states.pattern.text}, "
        + (f"{states.placement} on {found.tp} ranks" if "rank" in states.pattern.fields else "not split"),
        num_files=index.num_state_files,
        num_taps=len(found.layers),
        hidden_size=found.hidden_size,
        dtype=found.dtype,
        last_hidden=found.norm,
        has_loss_mask=found.loss_mask is not None,
        layer_ids=None if found.taps or str in map(type, found.layers) else tuple(map(int, found.layers)),
        convention=found.convention,
        taps=found.taps,
        problems=tuple(_problems(index)),
        index=index,
    )


def _problems(index: Index) -> list[str]:
    problems = []
    if not index.num_state_files:
        problems.append(f"no file is of the pattern [states] files, {index.description.states.pattern.text}")
    if index.num_links:
        problems.append(f"{index.num_links:,} symbolic links are not followed: a dump's files must be in its folder")
    problems += [f"{index.packing_file(step)}: {why}" for step, why in index.broken.items()]
    return problems
