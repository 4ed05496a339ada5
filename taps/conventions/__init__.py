"""How each system reads layer ids: a convention is ``SYSTEM`` or ``SYSTEM@VERSION``.

One module per system, same shape: ``CONVENTION`` holds its entries (ids to taps and back, by release and model) and its
readers (where in a draft's config the ids stand). A reading that depends on the release or the model, where that is not
given, is refused with every reading shown; what no source backs is unknown, and said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from packaging.version import InvalidVersion, Version

from eyas.taps.conventions import eagle, hf, modelopt, sglang, specforge, speculators, torchspec, trtllm, vllm
from eyas.taps.conventions.entry import Entry, System, Versions, label, look_up, of_target, of_version, overlap
from eyas.taps.conventions.numbering import ConventionError, format_ids
from eyas.taps.notation import Tap, TapError, format_taps
from eyas.taps.target import TargetFacts

SYSTEMS: dict[str, System] = {
    module.CONVENTION.name: module.CONVENTION
    for module in (hf, vllm, speculators, sglang, specforge, torchspec, modelopt, trtllm, eagle)
}

# Every place in which some system looks for ids: a key that stands in one of them was meant to be read.
PLACES = tuple(dict.fromkeys(place for s in SYSTEMS.values() for reader in s.readers for place in reader.places))

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """What one system makes of something in some releases: a value, or the problem with it."""

    label: str  # e.g. "sglang 0.5.13 to 0.5.23"
    value: tuple[T, ...] | None
    problem: str = ""
    rule: str = ""  # in words


def resolve(convention: str, ids: Sequence[int], target: TargetFacts) -> tuple[Tap, ...]:
    """The taps that ``ids`` name in ``convention`` for ``target``.

    Raises ConventionError where the convention does not read them, reads them in more than one way (and the release or
    the model, which decides, is not given), or is unknown.
    """
    system, entries = _entries(convention, target)
    found = [_try(_label(system, e, target), e.rule.says, e.rule.taps, ids, target.num_layers) for e in entries]
    return _agreed(found, f"{convention} ids {format_ids(ids)}, for {target}", format_taps)


def ids_for(convention: str, taps: Sequence[Tap], target: TargetFacts) -> tuple[int, ...]:
    """The ids that ``convention`` reads as ``taps``: the inverse of resolve. Raises ConventionError."""
    system, entries = _entries(convention, target)
    found = [_try(_label(system, e, target), e.rule.says, e.rule.ids, taps, target.num_layers) for e in entries]
    return _agreed(found, f"taps {format_taps(taps)} in {convention}, for {target}", format_ids)


def default_taps(convention: str, target: TargetFacts) -> tuple[Tap, ...]:
    """The taps that ``convention`` captures where no ids are configured. Raises ConventionError."""
    system, entries = _entries(convention, target)
    found = [_try(_label(system, e, target), "", e.default, target.num_layers) for e in entries]
    return _agreed(found, f"{convention}'s default, for {target}", format_taps)


def readings(ids: Sequence[int], target: TargetFacts) -> list[Reading[Tap]]:
    """What every system, in every release that was read, makes of ``ids`` for ``target``."""
    found: list[Reading[Tap]] = []
    for system in SYSTEMS.values():
        entries = of_target(system, target)
        if not entries:
            found.append(Reading(label=system.name, value=None, problem="unknown: no source was read for this model"))
        found += [_try(_label(system, e, target), e.rule.says, e.rule.taps, ids, target.num_layers) for e in entries]
    return found


def describe(found: Sequence[Reading[T]], write: Callable[[tuple[T, ...]], str]) -> str:
    """Readings as lines of text with their rules, equal ones of a system on one line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for reading in found:
        text, rule = (reading.problem, "") if reading.value is None else (write(reading.value), reading.rule)
        groups.setdefault((reading.label.split()[0], text, rule), []).append(reading.label)
    rows = [
        ("; ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else ""), text, rule)
        for (_, text, rule), labels in ((key, _merged(labels)) for key, labels in groups.items())
    ]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    text_width = max((len(text) for _, text, rule in rows if rule), default=0)
    return "\n".join(f"  {name:<{name_width}}  {text:<{text_width}}  {rule}".rstrip() for name, text, rule in rows)


def _merged(labels: Sequence[str]) -> list[str]:
    """Labels of one release's code paths as one label of what they have in common."""
    paths: dict[tuple[str, int], list[list[str]]] = {}
    for label_text in labels:
        parts = label_text.split(", ")
        paths.setdefault((parts[0], len(parts)), []).append(parts)
    return [
        ", ".join(same[0] for same in zip(*of_one, strict=True) if len(set(same)) == 1) for of_one in paths.values()
    ]


def read_draft_config(
    config: Mapping[str, Any], convention: str, target: TargetFacts, where: str = "config.json"
) -> tuple[Tap, ...]:
    """The taps that ``convention`` feeds a draft with this config: by its own key, or its default without one.

    Raises ConventionError, naming ``where``, if ids stand in a place that the system does not read, or as resolve does.
    """
    system, entries = _entries(convention, target)
    if not system.readers:
        raise ConventionError(f"{where}: {system.name} reads no draft config; give another --convention")
    version = parse_convention(convention)[1]
    readers = of_version(system.readers, version)
    standing = {place: value for place in PLACES if (value := look_up(config, place)) is not None}
    found: list[Reading[Tap]] = []
    ignored: set[str | None] = set()
    for reader in readers:
        own = reader.find(config)
        elsewhere = [place for place, value in standing.items() if value]  # where none of them counts
        ignored.add(elsewhere[0] if elsewhere and own is None else None)
        for entry in entries:
            versions = overlap(entry.versions, reader.versions)
            if versions == "none":
                continue
            name = label(system.name, versions, reader.variant, entry.variant)
            if own is not None:
                try:
                    ids = reader.ids(*own)
                except ConventionError as error:
                    raise ConventionError(f"{where}: {error}") from error
                found.append(_try(f"{name}, reads {own[0]}", entry.rule.says, entry.rule.taps, ids, target.num_layers))
            else:
                why = f"ignores {elsewhere[0]}" if elsewhere else "finds no ids"
                found.append(_try(f"{name}, {why} and takes its default", "", entry.default, target.num_layers))
    if None not in ignored:
        raise ConventionError(_misplaced(where, sorted(map(str, ignored)), system, found))
    return _agreed(found, f"{where} in {convention}, for {target}", format_taps)


def parse_convention(text: str) -> tuple[System, Version | None]:
    """Read ``SYSTEM`` or ``SYSTEM@VERSION``. Raises ConventionError."""
    name, at, version = text.strip().partition("@")
    if name not in SYSTEMS:
        raise ConventionError(f"--convention {text}: no system {name!r} is known; known are {', '.join(SYSTEMS)}")
    if not at:
        return SYSTEMS[name], None
    try:
        return SYSTEMS[name], Version(version)
    except InvalidVersion as error:
        raise ConventionError(f"--convention {text}: {version!r} is no release, such as 0.5.9") from error


def _try(name: str, rule: str, function: Callable[..., tuple[T, ...]], *arguments: Any) -> Reading[T]:
    try:
        return Reading(label=name, value=function(*arguments), rule=rule)
    except (ConventionError, TapError) as error:
        return Reading(label=name, value=None, problem=str(error))


def _agreed(found: Sequence[Reading[T]], what: str, write: Callable[[tuple[T, ...]], str]) -> tuple[T, ...]:
    """The one value of all readings. Raises ConventionError showing each where they differ or fail."""
    outcomes = {(reading.value, reading.problem) for reading in found}
    if len(outcomes) == 1:
        ((value, problem),) = outcomes
        if value is not None:
            return value
        raise ConventionError(f"{what}: {problem}")
    raise ConventionError(
        f"{what}: this is read in more than one way:\n{describe(found, write)}\n"
        "Say which release with --convention SYSTEM@VERSION, or name the taps with --taps."
    )


def _label(system: System, entry: Entry, target: TargetFacts) -> str:
    return label(system.name, entry.versions, entry.variant, "" if target.is_named else f"as in {entry.source}")


def _entries(convention: str, target: TargetFacts) -> tuple[System, list[Entry]]:
    system, version = parse_convention(convention)
    of_this_target = of_target(system, target)
    if not of_this_target:
        raise ConventionError(
            f"--convention {convention}: how {system.name} reads ids for {target} is unknown, since no source was read "
            "for this model: name the taps with --taps"
        )
    entries = of_version(of_this_target, version)
    if not entries:
        known: list[Versions] = [entry.versions for entry in of_this_target]
        last = max((v[1] for v in known if v is not None), key=Version, default=None)
        nearest = system.name if last is None else f"{system.name}@{last}"
        raise ConventionError(
            f"--convention {convention}: how that release reads ids for {target} is unknown; its source was read as "
            f"{', '.join(dict.fromkeys(label(system.name, v) for v in known))}. If yours reads them like one of "
            f"these, name that one (--convention {nearest}); else name the taps with --taps"
        )
    return system, entries


def _misplaced(where: str, places: Sequence[str], system: System, found: Sequence[Reading[Tap]]) -> str:
    own = list(dict.fromkeys(place for reader in system.readers for place in reader.places))
    reads = f"reads {' or '.join(own)}" if own else "reads no ids from a config"
    mend = f"Move the ids there, in {system.name}'s own numbering." if own else "Name the taps with --taps."
    return (
        f"{where}: layer ids stand in {' and '.join(places)}, but {system.name} {reads}. With this config:\n"
        f"{describe(found, format_taps)}\n{mend}"
    )
