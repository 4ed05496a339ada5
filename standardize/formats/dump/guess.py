"""A dump's description guessed from its files' names, shapes and contents, for the user to complete.

What a layer's number means is in no file: that is always left to state.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from eyas.standardize.formats.dump.index import Index
from eyas.standardize.formats.dump.merge import MergeError, as_states, as_tensor, take_key
from eyas.standardize.formats.dump.names import ROLES, Group, find_number, group_paths, suffix
from eyas.standardize.formats.dump.pattern import Pattern, PatternError, parse_pattern
from eyas.standardize.formats.dump.placement import Observed, Placed, judge

if TYPE_CHECKING:
    from torch import Tensor

# So many are looked at.
_MAX_PATHS, _MAX_FOLDERS, _MAX_FILES, _MAX_SAMPLES = 200_000, 20_000, 4, 8
_SUFFIXES = {f"{name}{packed}" for name in SUFFIXES for packed in ("", ".gz")}
# What layer numbers are, wherever they were found.
_CONVENTION = (
    "What these numbers mean is in no file. Patches count from where they stand in the engine's code: one of vLLM's "
    "ids is the input of that layer, what a hook on layer k sees is its output. State whose numbers they are "
    '(convention = "vllm@0.32", "specforge", "hf", ...), or name a tap for each in place of it (taps = ["after:1", '
    '...]). With convention = "unknown", eyas standardize --taps identify finds them.'
)


def describe(folder: Path, *, hidden_size: int | None = None, vocab_size: int | None = None) -> str:
    """The text of a description as far as the folder tells, "?" where the user must say, comments on what was found.

    hidden_size and vocab_size are the target's; without the first, sharding on hidden and partial sums may be one to
    the eye. Raises FormatError where there is nothing that could be hidden states.
    """
    paths = _some_paths(folder)
    if not paths:
        raise FormatError(f"{folder}: no file ends in one of {', '.join(SUFFIXES)}")
    groups = list(group_paths(paths))
    entries = [entry for group in groups for entry in _entries(folder, group, vocab_size)]
    return _Guess(folder, paths, groups, entries, hidden_size).text()


def _some_paths(folder: Path) -> list[str]:
    """Files below the folder that may hold tensors, not more than _MAX_PATHS about.

    Of each folder the first by name, so that the same samples are seen for every rank and layer.
    """
    by_folder: dict[str, list[str]] = {}
    folders = [""]
    while folders and len(by_folder) < _MAX_FOLDERS:
        below = folders.pop()
        with os.scandir(folder / below) as entries:
            first = heapq.nsmallest(
                _MAX_PATHS,
                ((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if not entry.is_symlink()),
            )
        by_folder[below] = [below + name for name, is_folder in first if not is_folder and suffix(name) in _SUFFIXES]
        folders += [f"{below}{name}/" for name, is_folder in reversed(first) if is_folder]
    share = _MAX_PATHS // len(by_folder)
    return sorted(path for paths in by_folder.values() for path in paths[:share])


@dataclass(frozen=True)
class _Entry:
    """What stands under one key in a group's files, and what it seems to be."""

    group: Group
    key: tuple[str, ...]
    layers: tuple[str, ...]  # of the key, where there is {layer} in it
    role: str
    shape: tuple[int, ...]
    dtype: str


def _entries(folder: Path, group: Group, vocab_size: int | None) -> list[_Entry]:
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
                    number = find_number("layer", part) or re.fullmatch(r"([0-9]+)", part)
                    if number:
                        name[n] = f"{part[: number.start(1)]}{{layer}}{part[number.end(1) :]}"
                        layers = (number[1],)
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


def _role(group: Group, key: tuple[str, ...], value: Any, vocab_size: int | None) -> tuple[str, tuple[int, ...], str]:
    """(role, shape, dtype) of a tensor; role "other" for what a description has no use for."""
    import torch

    named = next(
        (role for text in ("/".join(key), group.pattern) for role, words in ROLES.items() if words.search(text)), ""
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


class _Guess:
    """Roles given to entries, and what follows from contents."""

    def __init__(
        self, folder: Path, paths: list[str], groups: list[Group], entries: list[_Entry], hidden_size: int | None
    ) -> None:
        self._folder, self._paths, self._groups, self._entries = folder, paths, groups, entries
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
        shape, num_layers = self._shape()
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
        # Each may tell the hidden size that the other needs.
        hidden_size = self._hidden_size
        if found.last_hidden is not None:
            hidden_size = hidden_size or self._placed(index, found.last_hidden, None).hidden_size
        placed = self._placed(index, found.states, hidden_size)
        hidden_size = hidden_size or placed.hidden_size
        last = self._placed(index, found.last_hidden, hidden_size) if found.last_hidden else None
        return self._written(index, found, dtype_note, hidden_size, placed, last)

    def _written(
        self,
        index: Index,
        found: Description,
        dtype_note: str,
        hidden_size: int | None,
        placed: Placed,
        last: Placed | None,
    ) -> str:
        samples = [name for name in index.samples() if name not in index.broken.values()]
        states = found.states.pattern.text
        lines = [
            *_comment(
                f"Guessed by eyas from {len(self._paths):,} files. Check it, state what is {FILL_IN!r} "
                f"(docs/formats.md has every key), and save it as {self._folder / DESCRIPTION_FILE}"
            ),
            *_comment(
                f"{len(samples):,} samples" + (f", e.g. {', '.join(map(repr, samples[:3]))}" if samples else " found")
            ),
            "",
            f"version = {VERSION}",
            f"hidden_size = {hidden_size or _quoted(FILL_IN)}"
            + ("" if hidden_size else "  # the target's, which shapes alone do not tell"),
            *_comment(dtype_note),
            f"dtype = {_quoted(found.dtype)}",
        ]
        if "rank" in found.states.pattern.fields:
            lines.append(f"tp = {found.tp}  # ranks in the files' names")
        if found.packing is None and "step" in found.states.pattern.fields:
            lines += self._steps(index, found, samples)
        lines += ["", "[layers]", f"ids = {list(found.layers)}" + self._ids_note(found)]
        lines += [*_comment(_CONVENTION), f"convention = {_quoted(FILL_IN)}", ""]
        lines += ["[states]", *self._files(states, found.states.key)]
        if found.states.residual:
            lines += _comment("uncertain: two tensors as vLLM's layers return them, of which the tap is the sum")
            lines.append(f"residual = {_key(found.states.residual)}")
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
                *_comment(
                    "Names of states do not tell samples apart. If a file holds several, back to back, there must be "
                    "files that say which and how long."
                ),
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

    def _placement(self, placed: Placed, has_ranks: bool) -> list[str]:
        if not has_ranks:
            return []
        lines = [line for note in placed.notes for line in _comment(note)]
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
        ranks = {int(found[1]) for path in self._states.group.paths if (found := find_number("rank", path))}
        return max(ranks, default=0) + 1

    def _shape(self) -> tuple[Shape, int]:
        """How layers lie in a tensor, and how many there are: fewer than tokens, or side by side in one width."""
        dims = [size for n, size in enumerate(self._states.shape) if n or size != 1]
        width = self._hidden_size or (self._last.shape[-1] if self._last else 0)
        if self._layers or len(dims) < 2:
            return "T,H", len(self._layers) or 1
        if len(dims) == 3:
            return ("A,T,H", dims[0]) if dims[0] < dims[1] else ("T,A,H", dims[1])
        if width and dims[-1] > width and dims[-1] % width == 0:
            return "T,A*H", dims[-1] // width
        return "T,H", 1

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
            residual=self._residual(entry),
            shape=shape,
            placement="replicated",
            padded=False,
            tolerance=0.0,
        )

    def _residual(self, entry: _Entry) -> tuple[str, ...]:
        """The key of the second of two, as vLLM's layers return them: hidden states, and a residual not yet added."""
        if len(entry.key) != 1:
            return ()
        for other in self._entries:
            if other.group == entry.group and len(other.key) == 1 and other.shape == entry.shape:
                first, second = entry.key[0], other.key[0]
                if (first, second) == ("0", "1") or ("resid" in second and "resid" not in first):
                    return other.key
        return ()

    def _as_tokens(self, entry: _Entry, layers: tuple[int, ...]) -> Tokens:
        return Tokens(pattern=self._pattern(entry, layers), key=entry.key)

    def _packing(self) -> Packing | None:
        if not self._packed or self._names is None or self._lengths is None:
            return None
        cumulative = self._lengths.role == "cu_seqlens"
        text = self._names.group.pattern
        if "{rank}" in text:  # all ranks' say the same: rank 0's are read
            number = find_number("rank", min(self._names.group.paths))
            text = text.replace("{rank}", number[1] if number else "0")
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
                f"{self._folder}: no pattern can tell apart files named as {entry.group.paths[0]} is ({error})"
            ) from error

    def _placed(self, index: Index, states: States, hidden_size: int | None) -> Placed:
        """How the parts of a few samples lie."""
        samples = islice(self._observed(index, states), _MAX_SAMPLES)
        if "rank" in states.pattern.fields and index.description.tp > 1:
            return judge(samples, hidden_size)
        width = next((sample.steps[0][0].shape[-1] for sample in samples), None)
        return Placed(placement="replicated", hidden_size=width)

    def _observed(self, index: Index, states: States) -> Iterator[Observed]:
        """The first layer's parts of each sample (or, where steps hold several samples, of each step)."""
        found = index.description
        layer = str(found.layers[0]) if "layer" in states.pattern.fields else ""
        key = [name.replace("{layer}", str(found.layers[0])) for name in states.key]
        keys: list[tuple[str, int | None]] = [(sample, None) for sample in index.samples()]
        if "sample" not in states.pattern.fields:
            keys = [("", step) for step in sorted(index.step_tokens)]
        for sample, step in keys:
            files: dict[int, list[str]] = defaultdict(list)
            for part in index.parts(states.pattern, sample, step):
                if part.layer == layer:
                    files[part.step or 0].append(part.path)
            try:
                steps = [[self._load(path, key, states, found) for path in files[number]] for number in sorted(files)]
                num_tokens = self._num_tokens(index, sample) if step is None else index.step_tokens[step]
            except (TensorFileError, MergeError):
                continue
            if steps and all(len(parts) == found.tp or "rank" not in states.pattern.fields for parts in steps):
                yield Observed(steps=steps, num_tokens=num_tokens)

    def _load(self, path: str, key: Sequence[str], states: States, found: Description) -> Tensor:
        return as_states(take_key(read_tensor_file(self._folder / path), key), states, found.dtype, len(found.layers))

    def _num_tokens(self, index: Index, sample: str) -> int | None:
        """Token ids of a sample; None where there are none."""
        if self._ids is None:
            return None
        table = index.description.input_ids
        by_step = {part.step: part.path for part in index.parts(table.pattern, sample)}
        lengths = [
            as_tensor(take_key(read_tensor_file(self._folder / path), table.key)).numel() for path in by_step.values()
        ]
        return sum(lengths) if lengths else None


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _key(key: Sequence[str]) -> str:
    return _quoted(key[0]) if len(key) == 1 else json.dumps(list(key), ensure_ascii=False)
