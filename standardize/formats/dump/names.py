"""File names made patterns: which of their numbers is a rank, a layer or a step, and what names the sample."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Words before a number that say what it is, the clearest first: "tp4/rank1" is rank 1 of 4.
_WORDS = {
    "rank": (r"tp[_-]?rank|rank", r"tp|gpu|device|worker"),
    "layer": (r"layers?|block|blk|tap", r"l"),
    "step": (r"steps?|chunk", r"iter|forward|fwd|pass|call"),
}
_NUMBERS = {
    name: [re.compile(rf"(?<![a-z])(?:{words})[_\-.=]?([0-9]{{1,9}})(?![0-9a-z])", re.I) for words in rows]
    for name, rows in _WORDS.items()
}
# What names of files and keys say, first match first.
ROLES = {
    "mask": re.compile(r"mask", re.I),
    "cu_seqlens": re.compile(r"cu_?seq|cumul|query_start|offsets", re.I),
    "lengths": re.compile(r"(?<![a-z])(?:(?:seq|query|prompt|chunk)_?)?len(?:s|gths?)?(?![a-z])", re.I),
    "samples": re.compile(r"(?:sample|req|request|seq|conv|row)[_-]?(?:id|name)s?(?![a-z])|rids?(?![a-z])", re.I),
    "other": re.compile(r"position|slot|block_table|logit", re.I),
    "ids": re.compile(r"token|(?<![a-z])ids(?![a-z])|input_?id|prompt", re.I),
    "last": re.compile(r"last|final|(?<![a-z])norm", re.I),
    "states": re.compile(r"hidden|state|resid|feature|(?<![a-z])aux|(?<![a-z])hs(?![a-z])", re.I),
}
_SAMPLE_WORDS = re.compile(r"req|request|sample|seq|conv|conversation|row|id|data|file", re.I)


@dataclass(frozen=True)
class Group:
    """Files whose names differ in fields alone."""

    pattern: str
    paths: tuple[str, ...]
    layers: tuple[str, ...]  # that {layer} stands for, as numbers without zeros in front

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for name in ("rank", "layer", "step", "sample") if f"{{{name}}}" in self.pattern)


def find_number(name: str, text: str) -> re.Match[str] | None:
    """Where a rank's, layer's or step's number stands (the match's group 1), by the word before it."""
    return next((found for number in _NUMBERS[name] if (found := number.search(text))), None)


def group_paths(paths: Sequence[str]) -> Iterator[Group]:
    """Paths with fields in place of their numbers and samples."""
    similar: dict[tuple[object, ...], dict[str, tuple[list[str], set[str]]]] = defaultdict(dict)
    for path in paths:
        template, layer = path, ""
        for name in _NUMBERS:
            if found := find_number(name, template):
                template = f"{template[: found.start(1)]}{{{name}}}{template[found.end(1) :]}"
                layer = found[1].lstrip("0") or "0" if name == "layer" else layer
        kind = (
            template.count("/"),
            suffix(path),
            tuple(re.findall(r"\{\w+\}", template)),
            tuple(role for role, words in ROLES.items() if role != "samples" and words.search(template)),
        )
        files, layers = similar[kind].setdefault(template, ([], set()))
        files.append(path)
        layers.add(layer)
    for templates in similar.values():
        for pattern, members in _with_samples(list(templates)):
            files = [path for template in members for path in templates[template][0]]
            layers = set().union(*(templates[template][1] for template in members)) - {""}
            yield Group(pattern, tuple(files), tuple(sorted(layers, key=int)))


def _with_samples(templates: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(pattern with {sample}, its templates): the sample is what differs between templates."""
    rows = [template.split("/") for template in templates]
    distinct = [len(set(column)) for column in zip(*rows, strict=True)]
    place = max(range(len(distinct)), key=lambda n: (distinct[n], n))
    if distinct[place] == 1:
        yield _without_others(templates[0]), templates
        return
    front, back = _common([row[place] for row in rows])
    samples = [row[place][front : len(row[place]) - back] for row in rows]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for n, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        others = tuple(
            "" if i == place else re.sub(rf"(?<![A-Za-z0-9]){re.escape(sample)}(?![A-Za-z0-9])", "{sample}", part)
            for i, part in enumerate(row)
        )
        groups[others].append(n)
    for others, members in groups.items():
        text = rows[members[0]][place]
        parts = list(others)
        parts[place] = f"{text[:front]}{{sample}}{text[len(text) - back :]}"
        yield "/".join(parts), [templates[n] for n in members]


def _common(texts: Sequence[str]) -> tuple[int, int]:
    """How many characters all share in front and at the end, in whole words."""
    words = [re.findall(r"[A-Za-z0-9{}]+|[^A-Za-z0-9{}]+", text) for text in texts]
    shortest = min(map(len, words))
    front = next((n for n in range(shortest) if len({row[n] for row in words}) > 1), shortest - 1)
    back = next((n for n in range(shortest - front) if len({row[-1 - n] for row in words}) > 1), shortest - front - 1)
    return len("".join(words[0][:front])), len("".join(words[0][len(words[0]) - back :]))


def _without_others(template: str) -> str:
    """The pattern where there is one sample at most: what says nothing else in the file's name is it."""
    folder, slash, name = template.rpartition("/")
    stem = name[: len(name) - len(suffix(name))]
    words = re.findall(r"[A-Za-z0-9{}]+|[^A-Za-z0-9{}]+", stem)
    own = [
        n
        for n, word in enumerate(words)
        if word[0].isalnum()
        and "{" not in word
        and not _SAMPLE_WORDS.fullmatch(word)
        and not any(words.search(word) for words in ROLES.values())
        and not re.fullmatch(r"meta|batch|pack|packing|info|rank|layers?|steps?|inputs?|outputs?|loss|tensors?", word)
    ]
    if own and not any(role.fullmatch(stem) for role in ROLES.values()):
        stem = "".join([*words[: own[0]], "{sample}", *words[own[-1] + 1 :]])
    return f"{folder}{slash}{stem}{suffix(name)}"


def suffix(path: str) -> str:
    packed = ".gz" if path.endswith(".gz") else ""
    return Path(path.removesuffix(".gz")).suffix + packed
