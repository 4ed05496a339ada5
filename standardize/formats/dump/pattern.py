"""File patterns such as ``rank{rank}/layer_{layer}/{sample}_step{step}.pt``: paths below the dump's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eyas.shards.tensor_files import SUFFIXES
from eyas.taps.errors import EyasError

FIELDS = ("rank", "layer", "step", "sample")
_FIELD = re.compile(r"\{([^{}]*)\}")
# So many digits fit the index's codes.
RANK_DIGITS, STEP_DIGITS = 4, 9


class PatternError(EyasError):
    """A pattern that could lead outside of the folder, or be read in two ways."""


class Fields(NamedTuple):
    """What a path says, as it is written there (zeros in front included); "" where the pattern has no such field."""

    rank: str
    layer: str
    step: str
    sample: str


_NO_FIELDS = dict.fromkeys(FIELDS, "")


@dataclass(frozen=True)
class Pattern:
    """A path below the dump's folder with fields in it. Built by parse_pattern()."""

    text: str
    regex: re.Pattern[str]

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(self.regex.groupindex)

    def match(self, path: str) -> Fields | None:
        """The fields of a path below the folder, None where it is none of this pattern."""
        found = self.regex.fullmatch(path)
        return None if found is None else Fields(**{**_NO_FIELDS, **found.groupdict()})

    def path(self, fields: Fields) -> str:
        """The inverse of match()."""
        return _FIELD.sub(lambda field: str(getattr(fields, field[1])), self.text)


def parse_pattern(text: str, layers: Sequence[int | str] = ()) -> Pattern:
    """Read a pattern; ``{layer}`` matches what ``layers`` lists and nothing else, numbers with zeros in front too.

    A field that stands twice must say the same twice. Raises PatternError.
    """
    if text.startswith(("/", "~")) or "\\" in text or "\0" in text or re.match(r"[A-Za-z]:", text):
        raise PatternError(f"{text!r} must be a path below the folder, with / between its parts")
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise PatternError(f"{text!r} has an empty part, . or ..: expected a plain path below the folder")
    name = Path(text.removesuffix(".gz"))
    if name.suffix not in SUFFIXES:
        raise PatternError(f"{text!r} must end in one of {', '.join(SUFFIXES)} (or with .gz behind it)")
    pieces = _FIELD.split(text)  # literal, field, literal, field, ... literal
    literals, names = pieces[::2], pieces[1::2]
    if unknown := [name for name in names if name not in FIELDS]:
        raise PatternError(
            f"{text!r} has {{{unknown[0]}}}: the fields are {', '.join(f'{{{name}}}' for name in FIELDS)}"
        )
    if any("{" in literal or "}" in literal for literal in literals):
        raise PatternError(f"{text!r} has a brace that belongs to no field")
    for field, behind, following in zip(names, literals[1:], names[1:], strict=False):
        if not behind:
            raise PatternError(
                f"{text!r}: {{{field}}}{{{following}}} stand side by side, and where one ends is unclear"
            )
    for n, field in enumerate(names):
        if field != "sample" and (literals[n][-1:].isdigit() or literals[n + 1][:1].isdigit()):
            raise PatternError(f"{text!r}: a digit beside {{{field}}} could belong to it")
    numbered = sorted(map(str, layers), key=len, reverse=True)
    parts = {
        "rank": f"[0-9]{{1,{RANK_DIGITS}}}",
        "step": f"[0-9]{{1,{STEP_DIGITS}}}",
        "layer": "|".join(f"0*{name}" if name.isdigit() else re.escape(name) for name in numbered) or "(?!)",
        "sample": "[^/]+?",
    }
    regex, seen = re.escape(literals[0]), set[str]()
    for field, literal in zip(names, literals[1:], strict=True):
        regex += f"(?P={field})" if field in seen else f"(?P<{field}>{parts[field]})"
        regex += re.escape(literal)
        seen.add(field)
    return Pattern(text, re.compile(regex))
