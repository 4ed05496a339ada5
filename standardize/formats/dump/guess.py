"""A dump's description guessed from its files' names, shapes and contents, for the user to complete.

What a layer's number means is in no file: that is always left to state.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.shards.tensor_files import SUFFIXES, TensorFileError, read_tensor_file
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.dump.description import (
    DESCRIPTION_FILE,
    FILL_IN,
    VERSION,
    Description,
    Packing,
    Shape,
    States,
    Tokens,
)
from eyas.standardize.formats.dump.index import Index, walk
from eyas.standardize.formats.dump.merge import MergeError, as_states, as_tensor, take_key
from eyas.standardize.formats.dump.pattern import Pattern, PatternError, parse_pattern

if TYPE_CHECKING:
    from torch import Tensor

# So many are looked at.
_MAX_PATHS, _MAX_FILES, _MAX_SAMPLES = 500_000, 4, 8
# Replicas of nondeterministic kernels differ by less, partial sums by more.
_CLOSE = 0.05

_NUMBERS = {
    "rank": re.compile(r"(?<![a-z])((?:tp[_-]?rank|rank|tp|gpu|device|worker)[_\-.=]?)([0-9]{1,4})(?![0-9])", re.I),
    "layer": re.compile(r"(?<![a-z])((?:layers?|block|blk|tap|l)[_\-.=]?)([0-9]{1,4})(?![0-9])", re.I),
    "step": re.compile(r"(?<![a-z])((?:steps?|chunk|iter|forward|fwd|pass|call)[_\-.=]?)([0-9]{1,9})(?![0-9])", re.I),
}
# What names of files and keys say, first match first.
_ROLES = {
    "mask": re.compile(r"mask", re.I),
    "cu_seqlens": re.compile(r"cu_?seq|cumul|query_start|offsets", re.I),
    "lengths": re.compile(r"len", re.I),
    "samples": re.compile(r"(?:sample|req|request|seq|conv|row)[_-]?(?:id|name)s?(?![a-z])|rids?(?![a-z])", re.I),
    "other": re.compile(r"position|slot|block_table|logit", re.I),
    "ids": re.compile(r"token|(?<![a-z])ids(?![a-z])|input_?id|prompt", re.I),
    "last": re.compile(r"last|final|(?<![a-z])norm", re.I),
    "states": re.compile(r"hidden|state|resid|feature|(?<![a-z])aux|(?<![a-z])hs(?![a-z])", re.I),
}
_SAMPLE_WORDS = re.compile(r"req|request|sample|seq|conv|conversation|row|id|data|file", re.I)


def describe(folder: Path, *, hidden_size: int | None = None, vocab_size: int | None = None) -> str:
    """The text of a description as far as the folder tells, "?" where the user must say, comments on what was found.

    hidden_size and vocab_size are the target's; without the first, sharding on hidden and partial sums may be one to
    the eye. Raises FormatError where there is nothing that could be hidden states.
    """
    paths = [path for path in islice(walk(folder, []), _MAX_PATHS) if Path(path.removesuffix(".gz")).suffix in SUFFIXES]
    if not paths:
        raise FormatError(f"{folder}: no file ends in one of {', '.join(SUFFIXES)}")
    groups = list(_groups(sorted(paths)))
    entries = [entry for group in groups for entry in _entries(folder, group, vocab_size)]
    return _Guess(folder, paths, groups, entries, hidden_size).text()


@dataclass(frozen=True)
class _Group:
    """Files whose names differ in fields alone."""

    pattern: str
    paths: tuple[str, ...]
    layers: tuple[str, ...]  # that {layer} stands for, as numbers without zeros in front

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for name in ("rank", "layer", "step", "sample") if f"{{{name}}}" in self.pattern)


@dataclass(frozen=True)
class _Entry:
    """What stands under one key in a group's files, and what it seems to be."""

    group: _Group
    key: tuple[str, ...]
    layers: tuple[str, ...]  # of the key, where there is {layer} in it
    role: str
    shape: tuple[int, ...]
    dtype: str


def _groups(paths: Sequence[str]) -> Iterator[_Group]:
    """Paths with fields in place of their numbers and samples."""
    similar: dict[tuple[object, ...], dict[str, tuple[list[str], set[str]]]] = defaultdict(dict)
    for path in paths:
        template, layer = path, ""
        for name, number in _NUMBERS.items():
            if found := number.search(template):
                template = f"{template[: found.start(2)]}{{{name}}}{template[found.end(2) :]}"
                layer = found[2].lstrip("0") or "0" if name == "layer" else layer
        kind = (
            template.count("/"),
            _suffix(path),
            tuple(re.findall(r"\{\w+\}", template)),
            tuple(role for role, words in _ROLES.items() if role != "samples" and words.search(template)),
        )
        files, layers = similar[kind].setdefault(template, ([], set()))
        files.append(path)
        layers.add(layer)
    for templates in similar.values():
        for pattern, members in _with_samples(list(templates)):
            files = [path for template in members for path in templates[template][0]]
            layers = set().union(*(templates[template][1] for template in members)) - {""}
            yield _Group(pattern, tuple(files), tuple(sorted(layers, key=int)))


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
    stem = name[: len(name) - len(_suffix(name))]
    words = re.findall(r"[A-Za-z0-9{}]+|[^A-Za-z0-9{}]+", stem)
    own = [
        n
        for n, word in enumerate(words)
        if word[0].isalnum()
        and "{" not in word
        and not _SAMPLE_WORDS.fullmatch(word)
        and not any(words.search(word) for words in _ROLES.values())
        and not re.fullmatch(r"meta|batch|pack|info|packing|rank|layers?|steps?|[a-z]", word)
    ]
    if own and not any(role.fullmatch(stem) for role in _ROLES.values()):
        stem = "".join([*words[: own[0]], "{sample}", *words[own[-1] + 1 :]])
    return f"{folder}{slash}{stem}{_suffix(name)}"


def _suffix(path: str) -> str:
    packed = ".gz" if path.endswith(".gz") else ""
    return Path(path.removesuffix(".gz")).suffix + packed


def _entries(folder: Path, group: _Group, vocab_size: int | None) -> list[_Entry]:
    """What the files of a group hold, from a few of them."""
    found: dict[tuple[str, ...], _Entry] = {}
    for path in sorted(group.paths, key=lambda path: -os.path.getsize(folder / path))[:_MAX_FILES]:
        try:
            content = read_tensor_file(folder / path)
        except TensorFileError:
            continue
        for key, value in _leaves(content):
            role, shape, dtype = _role(group, key, value, vocab_size)
            name, layers = list(key), tuple[str, ...]()
            if role in ("states", "last") and not group.layers:
                for n, part in enumerate(key):
                    number = _NUMBERS["layer"].search(part) or re.fullmatch(r"()([0-9]+)", part)
                    if number:
                        name[n] = f"{part[: number.start(2)]}{{layer}}{part[number.end(2) :]}"
                        layers = (number[2],)
                        role = "states"
                        break
            known = found.get(tuple(name))
            if known is not None:
                layers = tuple(sorted({*known.layers, *layers}, key=int))
                # A vector of 0 and 1 is a mask, until another file of the same kind is not.
                role = known.role if known.role != "mask" else role
            found[tuple(name)] = _Entry(group, tuple(name), layers, role, shape, dtype)
    return list(found.values())


def _leaves(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and len(key) < 3:
        for name, inner in value.items():
            yield from _leaves(inner, (*key, str(name)))
    elif isinstance(value, list | tuple) and len(key) < 3 and any(hasattr(inner, "shape") for inner in value):
        for n, inner in enumerate(value):
            yield from _leaves(inner, (*key, str(n)))
    else:
        yield key, value


def _role(group: _Group, key: tuple[str, ...], value: Any, vocab_size: int | None) -> tuple[str, tuple[int, ...], str]:
    """(role, shape, dtype) of a tensor; role "other" for what a description has no use for."""
    import torch

    named = next(
        (role for text in ("/".join(key), group.pattern) for role, words in _ROLES.items() if words.search(text)), ""
    )
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return "samples", (len(value),), "str"
    if getattr(getattr(value, "dtype", None), "kind", "") == "U":
        return "samples", tuple(value.shape), "str"
    try:
        tensor = as_tensor(value)
    except MergeError:
        return "other", (), ""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)[6:]
    flat = [size for size in shape if size != 1]
    bits = tensor.dtype in (torch.int16, torch.uint16) and tensor.ndim >= 2 and shape[-1] > 1 and len(flat) > 1
    if tensor.is_floating_point() or bits:
        if tensor.ndim < 2 or named in ("other", "mask"):
            return ("mask" if named == "mask" else "other"), shape, dtype
        return ("last" if named == "last" and not group.layers else "states"), shape, dtype
    if len(flat) > 1 or tensor.numel() == 0 or tensor.ndim == 0:
        return "other", shape, dtype
    if named in ("mask", "cu_seqlens", "lengths", "samples", "ids"):
        return named, shape, dtype
    low, high = int(tensor.min()), int(tensor.max())
    if tensor.dtype == torch.bool or (low >= 0 and high <= 1):
        return "mask", shape, dtype
    if low < 0 or (vocab_size is not None and high >= vocab_size) or named == "other":
        return "other", shape, dtype
    return "ids", shape, dtype


@dataclass(frozen=True)
class _Placed:
    """How parts seem to lie, with what was seen."""

    placement: str
    padded: bool = False
    tolerance: float = 0.0
    hidden_size: int | None = None
    notes: tuple[str, ...] = ()


class _Guess:
    """Roles given to entries, and what follows from contents."""

    def __init__(
        self, folder: Path, paths: list[str], groups: list[_Group], entries: list[_Entry], hidden_size: int | None
    ) -> None:
        self._folder, self._paths, self._groups = folder, paths, groups
        by_role: dict[str, list[_Entry]] = defaultdict(list)
        for entry in entries:
            by_role[entry.role].append(entry)
        every_state = by_role["states"]
        if not every_state and not by_role["last"]:
            raise FormatError(f"{folder}: found no floating-point tensor [T, H] in any of {len(paths):,} files")
        # All layers' at best; then whatever there is most of.
        every_state.sort(key=lambda entry: (not (entry.group.layers or entry.layers), -len(entry.group.paths)))
        self._states = (every_state or by_role["last"])[0]
        spare = [*by_role["last"], *every_state[1:]]
        self._last = next((entry for entry in spare if entry is not self._states and not entry.group.layers), None)
        self._ids = self._best(by_role["ids"])
        self._mask = self._best(by_role["mask"])
        self._names = next(iter(by_role["samples"]), None)
        self._lengths = next(iter([*by_role["cu_seqlens"], *by_role["lengths"]]), None)
        self._used = [e for e in (self._states, self._last, self._ids, self._mask, self._names) if e]
        self._layers = self._states.group.layers or self._states.layers
        self._hidden_size = hidden_size
        self._packed = (
            "sample" not in self._states.group.fields
            and self._names is not None
            and self._lengths is not None
            and self._names.group == self._lengths.group
        )

    def _best(self, entries: list[_Entry]) -> _Entry | None:
        """Beside the states in their files, by itself, or in a file of other things, in this order."""
        return min(entries, key=lambda entry: (len(entry.key), entry.group != self._states.group), default=None)

    def text(self) -> str:
        """The description."""
        shape = self._shape()
        num_layers = len(self._layers) or self._num_stacked(shape)
        layers = tuple(map(int, self._layers)) or tuple(range(num_layers))
        dtype, dtype_note = self._dtype(self._states)
        found = Description(
            hidden_size=self._hidden_size or 0,
            dtype=dtype,
            tp=self._tp(),
            first_step=None,
            layers=layers,
            convention=None,
            taps=None,
            states=self._as_states(self._states, layers, shape),
            last_hidden=self._as_states(self._last, (), "T,H") if self._last else None,
            norm=None,
            input_ids=self._as_tokens(self._ids or self._states, layers),
            loss_mask=self._as_tokens(self._mask, layers) if self._mask else None,
            packing=self._packing(),
        )
        index = Index(self._folder, found, self._paths)
        last = self._placed(index, found.last_hidden) if found.last_hidden else None
        hidden_size = self._hidden_size or (last.hidden_size if last and last.placement == "replicated" else None)
        placed = self._placed(index, found.states, hidden_size)
        hidden_size = hidden_size or placed.hidden_size
        if last and found.last_hidden:
            last = self._placed(index, found.last_hidden, hidden_size)
        return self._written(index, found, dtype_note, hidden_size, placed, last)

    def _written(
        self,
        index: Index,
        found: Description,
        dtype_note: str,
        hidden_size: int | None,
        placed: _Placed,
        last: _Placed | None,
    ) -> str:
        samples = [name for name in index.samples() if name not in index.broken.values()]
        states = found.states.pattern.text
        lines = [
            f"# {DESCRIPTION_FILE}, guessed by eyas from {len(self._paths):,} files. Check it, state what is {FILL_IN!r}",
            f"# (docs/formats.md has every key), and save it as {self._folder / DESCRIPTION_FILE}",
            f"# Samples found: {len(samples):,}"
            + (f", e.g. {', '.join(map(repr, samples[:3]))}" if samples else "; no {sample} in names, and no packing"),
            "",
            f"version = {VERSION}",
            f"hidden_size = {hidden_size or _quoted(FILL_IN)}"
            + ("" if hidden_size else "  # the target's, which shapes alone do not tell"),
            f"dtype = {_quoted(found.dtype)}  # {dtype_note}",
        ]
        if "rank" in found.states.pattern.fields:
            lines.append(f"tp = {found.tp}  # ranks in the files' names")
        if found.packing is None and "step" in found.states.pattern.fields:
            lines += self._steps(index, found, samples)
        lines += ["", "[layers]", f"ids = {list(found.layers)}" + self._ids_note(found)]
        lines += [
            "# What these numbers mean is in no file. Patches count from where they stand in the engine's code: an id of",
            '# vLLM\'s is the input of that layer (convention = "vllm@0.32"), a hook on layer k sees its output. Say whose',
            '# numbers they are, or name a tap for each instead: taps = ["after:1", ...]. eyas check --identify finds out.',
            f"convention = {_quoted(FILL_IN)}",
            "",
            "[states]",
            *self._files(states, found.states.key),
        ]
        if found.states.is_stacked:
            lines.append(f"shape = {_quoted(found.states.shape)}")
        lines += self._placement(placed, "rank" in found.states.pattern.fields)
        if found.last_hidden is not None and last is not None:
            lines += ["", "[last_hidden]", *self._files(found.last_hidden.pattern.text, found.last_hidden.key)]
            lines.append(f"norm = {_quoted(FILL_IN)}  # pre-norm: before the target's last norm; post-norm: after it")
            lines += self._placement(last, "rank" in found.last_hidden.pattern.fields)
        lines += ["", "[input_ids]"]
        if self._ids is None:
            lines.append("# No whole numbers that could be token ids were found, and nothing can be read without.")
            lines.append(f"files = {_quoted(FILL_IN)}")
        else:
            lines += self._files(found.input_ids.pattern.text, found.input_ids.key)
        if found.loss_mask is not None:
            lines += ["", "[loss_mask]", *self._files(found.loss_mask.pattern.text, found.loss_mask.key)]
        else:
            lines += ["", "# No loss mask was found: it comes from the prepared folder, joined by token ids."]
        if found.packing is not None:
            lengths = "lengths" if found.packing.lengths else "cu_seqlens"
            key = found.packing.lengths or found.packing.cu_seqlens or ()
            lines += [
                "",
                "[packing]",
                f"files = {_quoted(found.packing.pattern.text)}",
                f"samples = {_key(found.packing.samples)}",
                f"{lengths} = {_key(key)}",
            ]
        elif "sample" not in found.states.pattern.fields:
            lines += [
                "",
                "# No {sample} in the names of states: if a file holds several samples back to back, say which and how long.",
                "[packing]",
                f"files = {_quoted(FILL_IN)}",
                f"samples = {_quoted(FILL_IN)}",
                f"lengths = {_quoted(FILL_IN)}",
            ]
        used = {entry.group.pattern for entry in self._used}
        rest = [group for group in self._groups if group.pattern not in used]
        if rest:
            lines += ["", "# Not used:"]
            lines += [f"#   {group.pattern}: {len(group.paths):,} files" for group in rest[:20]]
        return "\n".join(lines) + "\n"

    def _ids_note(self, found: Description) -> str:
        if not self._layers and found.states.is_stacked:
            return f"  # {len(found.layers)} layers in one tensor; these numbers are only counted, state the real ones"
        if not self._layers:
            return "  # no number was found in names or keys, state it"
        return "  # every number in names; keep those that the draft shall be fed"

    def _files(self, pattern: str, key: Sequence[str]) -> list[str]:
        lines = [f"files = {_quoted(pattern)}"]
        return [*lines, f"key = {_key(key)}"] if key else lines

    def _placement(self, placed: _Placed, has_ranks: bool) -> list[str]:
        if not has_ranks:
            return [*(f"# {note}" for note in placed.notes)]
        lines = [f"# {note}" for note in placed.notes]
        lines.append(f"placement = {_quoted(placed.placement)}")
        if placed.padded:
            lines.append("padded = true")
        if placed.tolerance:
            lines.append(f"tolerance = {placed.tolerance:g}")
        return lines

    def _steps(self, index: Index, found: Description, samples: list[str]) -> list[str]:
        runs = []
        for sample in samples[:1000]:
            steps = sorted({part.step for part in index.parts(found.states.pattern, sample) if part.step is not None})
            runs.append((steps[0], steps == list(range(steps[0], steps[0] + len(steps)))) if steps else (0, False))
        if runs and all(run == (runs[0][0], True) for run in runs):
            return [
                f"first_step = {runs[0][0]}  # every sample's steps count from it without a gap, so a gap is a loss"
            ]
        return [
            "# Steps are the engine's own numbers, it seems. Where they are counted for each sample, give first_step,",
            "# and a sample that lacks one is refused.",
        ]

    def _tp(self) -> int:
        number = _NUMBERS["rank"]
        ranks = {int(found[2]) for path in self._states.group.paths if (found := number.search(path))}
        return max(ranks, default=0) + 1

    def _shape(self) -> Shape:
        dims = [size for n, size in enumerate(self._states.shape) if n or size != 1]
        if self._layers or len(dims) < 3:
            return "T,H"
        return "A,T,H" if dims[0] < dims[1] else "T,A,H"

    def _num_stacked(self, shape: Shape) -> int:
        dims = [size for n, size in enumerate(self._states.shape) if n or size != 1]
        return dims[0] if shape == "A,T,H" else dims[1] if shape == "T,A,H" else 1

    def _dtype(self, entry: _Entry) -> tuple[str, str]:
        if entry.dtype in ("int16", "uint16"):
            return "bfloat16", f"a guess: files hold {entry.dtype}, the bits of bfloat16 or float16"
        if entry.dtype not in ("bfloat16", "float16", "float32"):
            return "float32", f"files hold {entry.dtype}, which eyas does not read"
        note = "as in the files"
        if entry.dtype == "float32":
            note += ", which may hold less: the target's own dtype can be given, and values are rounded to it"
        return entry.dtype, note

    def _as_states(self, entry: _Entry, layers: tuple[int, ...], shape: Shape) -> States:
        return States(
            pattern=self._pattern(entry, layers),
            key=entry.key,
            shape=shape,
            placement="replicated",
            padded=False,
            tolerance=0.0,
        )

    def _as_tokens(self, entry: _Entry, layers: tuple[int, ...]) -> Tokens:
        return Tokens(pattern=self._pattern(entry, layers), key=entry.key)

    def _packing(self) -> Packing | None:
        if not self._packed or self._names is None or self._lengths is None:
            return None
        cumulative = self._lengths.role == "cu_seqlens"
        text = self._names.group.pattern
        if "{rank}" in text:  # all ranks' say the same: rank 0's are read
            number = _NUMBERS["rank"].search(min(self._names.group.paths))
            text = text.replace("{rank}", number[2] if number else "0")
        return Packing(
            pattern=parse_pattern(text),
            samples=self._names.key,
            lengths=None if cumulative else self._lengths.key,
            cu_seqlens=self._lengths.key if cumulative else None,
        )

    def _pattern(self, entry: _Entry, layers: tuple[int, ...]) -> Pattern:
        try:
            return parse_pattern(entry.group.pattern, layers)
        except PatternError as error:
            raise FormatError(
                f"{self._folder}: files such as {entry.group.paths[0]} have names that no pattern can tell apart ({error})"
            ) from error

    def _placed(self, index: Index, states: States, hidden_size: int | None = None) -> _Placed:
        """How the parts of a few samples lie."""
        seen: list[_Placed] = []
        for parts, num_tokens in islice(self._observed(index, states), _MAX_SAMPLES):
            seen.append(_judge(parts, num_tokens, hidden_size or self._hidden_size))
        if not seen:
            return _Placed(
                FILL_IN if "rank" in states.pattern.fields else "replicated", notes=("nothing could be read",)
            )
        # One token is many things to the eye, and what tells most is what was seen least.
        told = [one for one in seen if one.placement != "replicated"] or seen
        clear = [one for one in told if one.placement != FILL_IN] or told
        counted = max(clear, key=lambda one: sum(other.placement == one.placement for other in clear))
        same = [one for one in clear if one.placement == counted.placement]
        notes = list(counted.notes)
        if others := {one.placement for one in seen} - {counted.placement}:
            notes.append(f"uncertain: some of {len(seen)} looked at seemed {' or '.join(sorted(others))}")
        return replace(
            counted,
            padded=any(one.padded for one in same),
            tolerance=max(one.tolerance for one in same),
            notes=tuple(notes),
        )

    def _observed(self, index: Index, states: States) -> Iterator[tuple[list[Tensor], int | None]]:
        """(parts in the order of ranks, tokens where they are known) of a first layer's steps, samples apart."""
        found = index.description
        layer = "" if "layer" not in states.pattern.fields else str(found.layers[0])
        key = [name.replace("{layer}", str(found.layers[0])) for name in states.key]
        keys: list[tuple[str, int | None]] = [(sample, None) for sample in index.samples()]
        if "sample" not in states.pattern.fields:
            keys = [("", step) for step in sorted(index.step_tokens)]
        for sample, only in keys:
            parts = index.parts(states.pattern, sample, only)
            for step in sorted({part.step for part in parts}, key=lambda step: step or 0):
                files = [part.path for part in parts if part.step == step and part.layer == layer]
                try:
                    tensors = [
                        as_states(
                            take_key(read_tensor_file(self._folder / path), key), states, found.dtype, len(found.layers)
                        )
                        for path in files
                    ]
                    num_tokens = (
                        index.step_tokens.get(only) if only is not None else self._num_tokens(index, sample, step)
                    )
                except (TensorFileError, MergeError):
                    continue
                if tensors and (len(tensors) == found.tp or "rank" not in states.pattern.fields):
                    yield tensors, num_tokens

    def _num_tokens(self, index: Index, sample: str, step: int | None) -> int | None:
        """Token ids of a sample's step; None where they are not told by steps and there are several."""
        if self._ids is None:
            return None
        table, states = index.description.input_ids, index.description.states
        parts = index.parts(table.pattern, sample)
        if "step" in table.pattern.fields:
            parts = [part for part in parts if part.step == step]
        elif len({part.step for part in index.parts(states.pattern, sample)}) > 1:
            return None
        if not parts:
            return None
        return as_tensor(take_key(read_tensor_file(self._folder / parts[0].path), table.key)).numel()


def _judge(parts: list[Tensor], num_tokens: int | None, hidden_size: int | None) -> _Placed:
    """How the parts [R, ..., W] of one tensor lie, in the order of ranks."""
    import torch

    tp, rows, widths = len(parts), [part.shape[0] for part in parts], [part.shape[-1] for part in parts]
    told = f"rows {rows}, widths {widths} on the ranks" + (f", {num_tokens} token ids" if num_tokens else "")
    if tp == 1:
        wrong = num_tokens is not None and rows[0] != num_tokens
        return _Placed("replicated", hidden_size=widths[0], notes=(told + ", which do not agree",) if wrong else ())
    one_width, one_height = len(set(widths)) == 1, len(set(rows)) == 1
    padded = num_tokens is not None and sum(rows) > num_tokens and set(rows) == {-(-num_tokens // tp)}
    if one_width and num_tokens is not None and rows[0] != num_tokens and (sum(rows) == num_tokens or padded):
        return _Placed(
            "token-sharded",
            padded,
            hidden_size=widths[0],
            notes=(f"{told}: the rows add up" + " with padding" * padded,),
        )
    if one_width and one_height and all(torch.equal(part, parts[0]) for part in parts[1:]):
        return _Placed("replicated", hidden_size=widths[0], notes=(f"{told}: the parts are equal",))
    if not one_height:
        return _Placed(
            "token-sharded" if one_width else FILL_IN,
            hidden_size=widths[0] if one_width else None,
            notes=(f"uncertain: {told}: the rows differ",),
        )
    if sum(widths) == hidden_size or not one_width:
        return _Placed(
            "hidden-sharded", hidden_size=sum(widths), notes=(f"{told}: the widths add up to {sum(widths)}",)
        )
    if widths[0] == hidden_size:
        first = parts[0].double()
        difference = max(float((part.double() - first).norm() / first.norm()) for part in parts[1:])
        if difference < _CLOSE:
            return _Placed(
                "replicated",
                tolerance=float(f"{2 * difference:.1g}"),
                hidden_size=hidden_size,
                notes=(f"uncertain: {told}: as wide as the target, and all but equal ({difference:.2g} relative)",),
            )
        return _Placed(
            "partial-sums",
            hidden_size=hidden_size,
            notes=(f"{told}: as wide as the target and not equal ({difference:.2g} relative)",),
        )
    return _Placed(
        FILL_IN,
        notes=(
            f"{told}, not equal: hidden-sharded if the target's hidden size is {sum(widths)}, partial-sums (a tap before",
            f"the all-reduce) if it is {widths[0]}" + (f"; it is said to be {hidden_size}" if hidden_size else ""),
        ),
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _key(key: Sequence[str]) -> str:
    return _quoted(key[0]) if len(key) == 1 else json.dumps(list(key), ensure_ascii=False)
