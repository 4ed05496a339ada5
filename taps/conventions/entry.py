"""What a convention module holds: entries (how ids are read) and readers (where in a config they stand).

Each names the releases and files it was read from. A release that lies between two that were read takes both their
readings; one before the first or after the last is unknown, since no source backs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from packaging.version import Version

from eyas.taps.conventions.numbering import ConventionError, Rule
from eyas.taps.notation import Tap
from eyas.taps.target import TargetFacts

Versions = tuple[str, str] | None  # first and last release read with this reading; None: the release is not known


class Versioned(Protocol):
    @property
    def versions(self) -> Versions: ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one system, in some releases and for some models, reads ids."""

    versions: Versions
    models: frozenset[str] | None = None  # model classes and model types; None: any that no other entry names
    rule: Rule
    default_taps: Callable[[int], tuple[Tap, ...]] | None  # of L, where no ids are configured
    source: str  # file
    variant: str = ""  # which of the system's code paths, where they differ
    note: str = ""  # when it does something else with these ids, in words

    def default(self, num_layers: int) -> tuple[Tap, ...]:
        """The taps captured where no ids are configured. Raises ConventionError, or TapError for too few layers."""
        if self.default_taps is None:
            raise ConventionError("it has no default")
        return self.default_taps(num_layers)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Where one system, in some releases, looks for ids in a draft's config."""

    versions: Versions
    variant: str = ""  # which of the system's code paths, where they differ
    places: tuple[str, ...]  # dotted keys; the first that is set counts, and is the one that is written
    added: Mapping[str, int] = field(default_factory=dict)  # place -> what is added to its ids before they are read
    only_with: Mapping[str, str] = field(default_factory=dict)  # place -> the key without which it is not looked at
    empty_is_default: bool = False  # whether [] means the default taps
    source: str

    def find(self, config: Mapping[str, Any]) -> tuple[str, Any] | None:
        """The place in ``config`` that counts, and what stands there; None: the default taps are kept."""
        for place in self.places:
            value = look_up(config, place)
            if place in self.only_with and look_up(config, self.only_with[place]) is None:
                continue
            if value is not None and (value != [] or not self.empty_is_default):
                return place, value
        return None

    def ids(self, place: str, value: Any) -> tuple[int, ...]:
        """The ids that ``value``, which stands at ``place``, is read as. Raises ConventionError for no list of ids."""
        if not isinstance(value, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise ConventionError(f"{place} is {value!r}, expected a list of integers")
        return tuple(i + self.added.get(place, 0) for i in value)


@dataclass(frozen=True, kw_only=True)
class System:
    """One convention module's content."""

    name: str
    entries: tuple[Entry, ...]
    readers: tuple[Reader, ...]  # empty: it reads no ids from a draft's config
    unread: frozenset[str] = frozenset()  # model classes that it reads in ways of their own, which were not read


T = TypeVar("T", bound=Versioned)


def of_version(rows: Sequence[T], version: Version | None) -> list[T]:
    """The rows that may hold for ``version``: all without one, both neighbours in a gap, none where it is unknown."""
    if version is None:
        return list(rows)
    public = Version(version.public)
    spans = [(Version(row.versions[0]), Version(row.versions[1]), row) for row in rows if row.versions is not None]
    exact = [row for first, last, row in spans if first <= public <= last]
    if exact:
        return exact
    below = max((last for _, last, _ in spans if last < public), default=None)
    above = min((first for first, _, _ in spans if first > public), default=None)
    if below is None or above is None:
        return []
    return [row for first, last, row in spans if last == below or first == above]


def of_target(system: System, target: TargetFacts) -> list[Entry]:
    """The entries for ``target``: by its class, else its model types, else the general ones; all if it is unnamed."""
    if not target.is_named:
        return list(system.entries)
    for names in ({target.model_class}, set(target.model_types)):
        named = [entry for entry in system.entries if entry.models is not None and entry.models & names]
        if named:
            return named
        if system.unread & names:
            return []
    return [entry for entry in system.entries if entry.models is None]


def overlap(a: Versions, b: Versions) -> Versions | Literal["none"]:
    """The releases that two rows have in common."""
    if a is None or b is None:
        return None
    first, last = max(a[0], b[0], key=Version), min(a[1], b[1], key=Version)
    return (first, last) if Version(first) <= Version(last) else "none"


def label(system: str, versions: Versions, *variants: str) -> str:
    """``sglang 0.5.1 to 0.5.12.post1``, ``vllm 0.32.0, model runner V1``, ``trtllm (release unknown)``."""
    if versions is None:
        text = f"{system} (release unknown)"
    else:
        text = f"{system} {versions[0]}" if versions[0] == versions[1] else f"{system} {versions[0]} to {versions[1]}"
    return ", ".join([text, *filter(None, variants)])


def look_up(config: Mapping[str, Any], place: str) -> Any:
    """The value at a dotted key; None where it is missing."""
    value: Any = config
    for key in place.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
