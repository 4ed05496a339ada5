"""What an engine feeds a draft: the taps it makes of the draft's config, for each release and code path it may be.

taps/conventions answers with one list of taps or refuses; a verdict has to show each reading with its reason, so this
keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.align.engine import Engine
from eyas.taps.conventions import PLACES, parse_convention
from eyas.taps.conventions.entry import Entry, Reader, label, look_up, of_target, of_version, overlap
from eyas.taps.conventions.numbering import ConventionError
from eyas.taps.notation import Tap, TapError, format_taps
from eyas.taps.target import TargetFacts


@dataclass(frozen=True, kw_only=True)
class ConfigReading:
    """What one release, or one code path of it, makes of a draft's config."""

    label: str  # e.g. "vllm 0.32.0, model runner V1"
    source: str  # the files of that system
    place: str | None  # the key it takes the ids from; None: it takes its default
    stands: Any  # what stands there
    ignored: str | None  # a key with ids that it does not look at
    taps: tuple[Tap, ...] | None
    problem: str = ""  # why there are none
    note: str = ""  # when it does something else, in words

    @property
    def outcome(self) -> str:
        """What it does, without its name."""
        how = f"reads {self.place} {self.stands} as" if self.place else "takes its default:"
        if self.place is None and self.ignored:
            how = f"ignores {self.ignored} and takes its default:"
        taps = format_taps(self.taps) if self.taps is not None else f"nothing it can feed ({self.problem})"
        return f"{how} {taps}" + (f" ({self.note})" if self.note else "")

    @property
    def cite(self) -> str:
        return f"{self.label}, {self.source}"


SERVING_CONFIG = "speculative_config."  # places that start so are given to the engine, not kept with the draft


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Where an engine, in some releases, wants which ids."""

    label: str
    place: str  # dotted key
    ids: tuple[int, ...]

    def __str__(self) -> str:
        body = f"[{', '.join(map(str, self.ids))}]"
        for key in reversed(self.place.split(".")):
            body = f'"{key}": {body}' if body.startswith("[") else f'"{key}": {{{body}}}'
        return body


def read_config(config: Mapping[str, Any], engine: Engine, target: TargetFacts) -> list[ConfigReading]:
    """Every reading that may be ``engine``'s; empty where none is known for this release and target."""
    stand_in = {place: value for place in PLACES if (value := look_up(config, place)) not in (None, [])}
    found = []
    for reader, entry, name in _rows(engine, target):
        own = reader.find(config)
        place = own[0] if own is not None else None
        ignored = next(iter(stand_in), None) if own is None else None
        taps, problem = None, ""
        try:
            if own is not None:
                taps = entry.rule.taps(reader.ids(*own), target.num_layers)
            elif all(place.startswith(SERVING_CONFIG) for place in reader.places):
                problem = f"it takes {reader.places[0]} from its own configuration, which is not kept with the draft"
            else:
                taps = entry.default(target.num_layers)
        except (ConventionError, TapError) as error:
            problem = str(error)
        found.append(
            ConfigReading(
                label=name,
                source=" and ".join(dict.fromkeys([reader.source, entry.source])),
                place=place,
                stands=own[1] if own is not None else None,
                ignored=ignored,
                taps=taps,
                problem=problem,
                note=entry.note,
            )
        )
    return found


def grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """(name, text) as lines ``name and name: text``, one for each distinct text."""
    names: dict[str, list[str]] = {}
    for name, text in pairs:
        names.setdefault(text, []).append(name)
    return [f"{' and '.join(dict.fromkeys(same))}: {text}" for text, same in names.items()]


def fragments(engine: Engine, taps: Sequence[Tap], target: TargetFacts) -> list[Fragment]:
    """What to write into a draft's config so that ``engine`` feeds ``taps``; one where all its releases agree.

    Raises ConventionError where the engine cannot express the taps, in some release that may be meant, or is not known
    to read a draft's config for this target.
    """
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for reader, entry, name in _rows(engine, target):
        try:
            ids = entry.rule.ids(taps, target.num_layers)
        except ConventionError as error:
            raise ConventionError(f"{name} cannot be told to feed {format_taps(taps)}: {error}") from error
        found.setdefault((reader.places[0], ids), []).append(name)
    if not found:
        raise ConventionError(f"how {engine} reads a draft's config for {target} is unknown")
    return [
        Fragment(label=names[0] if len(found) > 1 else str(engine), place=place, ids=ids)
        for (place, ids), names in found.items()
    ]


def describe_fragments(engine: Engine, taps: Sequence[Tap], target: TargetFacts) -> str:
    """The same as lines of text; the reason where there is none."""
    try:
        found = fragments(engine, taps, target)
    except ConventionError as error:
        return str(error)
    return "\n".join(f"{fragment.label}: {fragment}" for fragment in found)


def _rows(engine: Engine, target: TargetFacts) -> Iterator[tuple[Reader, Entry, str]]:
    system, version = parse_convention(engine.convention)
    for reader in of_version(system.readers, version):
        for entry in of_version(of_target(system, target), version):
            versions = overlap(entry.versions, reader.versions)
            if versions != "none":
                yield reader, entry, label(system.name, versions, reader.variant, entry.variant)
