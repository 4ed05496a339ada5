"""Which files of a dump there are, from one walk through its folder that opens none but the packing files.

A dump may hold tens of millions of files, so a file is 8 bytes here: its fields, from which its path is made again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import ForeignFileError, FormatError
from eyas.standardize.formats.dump.description import Description, Packing
from eyas.standardize.formats.dump.merge import MergeError, as_tensor, take_key
from eyas.standardize.formats.dump.pattern import Fields, Pattern

# A code, from its lowest bits: pattern 3, layer 8, rank's digits 3 and value 14, step's digits 4 and value 30.
_MAX_LAYERS = 256


class Part(NamedTuple):
    """One file: where it belongs, and its path below the folder."""

    step: int | None
    layer: str  # as the description lists it; "" where the pattern has no {layer}
    rank: int | None
    path: str


class Span(NamedTuple):
    """The rows of one sample in the files of one step."""

    step: int
    start: int
    stop: int


class Index:
    """The files of a dump by sample, or by step where the files of a step hold several samples."""

    def __init__(self, folder: Path, description: Description, paths: Iterable[str] | None = None) -> None:
        """``paths``: the files below the folder, where they are known already."""
        self.folder, self.description = folder, description
        tables = (description.states, description.last_hidden, description.input_ids, description.loss_mask)
        self._patterns = list(dict.fromkeys(table.pattern for table in tables if table))
        self._layers = {str(name): n for n, name in enumerate(description.layers)}
        self._layer_texts: dict[str, int] = {"": 0}  # as files write them: 3 and 003
        self._by_sample: dict[str, array[int]] = {}
        self._by_step: dict[int, array[int]] = {}
        self._spans: dict[str, list[Span]] = {}
        self.step_tokens: dict[int, int] = {}  # of steps with a packing file
        self.broken: dict[int, str] = {}  # steps whose packing file cannot be used -> why
        self.num_state_files = 0
        links: list[str] = []
        self._packing_files: dict[int, str] = {}
        for path in walk(folder, links) if paths is None else paths:
            self._add(path)
        self.num_links = len(links)
        if description.packing is not None:
            for step in sorted(self._packing_files.keys() - self.broken.keys()):
                self._unpack(description.packing, step)

    def samples(self) -> list[str]:
        """Every sample of which there is a file, in the order of their names; then broken packing files."""
        found = self._spans.keys() | self._by_sample.keys()
        return sorted(found) + [self._packing_files[step] for step in sorted(self.broken)]

    def packing_file(self, step: int) -> str:
        """Its path below the folder."""
        return self._packing_files[step]

    def broken_packing(self, item: str) -> str | None:
        """Why ``item``, if it is a packing file's path, cannot be used."""
        return next((why for step, why in self.broken.items() if self._packing_files[step] == item), None)

    def spans(self, sample: str) -> list[Span]:
        """Where a sample's rows are, in the order of steps. Raises ForeignFileError where some may be unknown."""
        spans = sorted(self._spans.get(sample, ()))
        if not spans:
            raise ForeignFileError(sample, "is in no step's packing file")
        first, last = spans[0].step - 1, spans[-1].step + 1
        for step in self.broken:
            if first <= step <= last:
                raise ForeignFileError(
                    sample, f"may have tokens in step {step} too, whose {self._packing_files[step]} cannot be used"
                )
        return spans

    def parts(self, pattern: Pattern, sample: str, step: int | None = None) -> list[Part]:
        """The files of a pattern for one sample (or, where the pattern has no {sample}, of one step).

        In the order of steps, layers and ranks.
        """
        n = self._patterns.index(pattern)
        per_sample = "sample" in pattern.fields
        codes = self._by_sample.get(sample, ()) if per_sample else self._by_step.get(-1 if step is None else step, ())
        layer_texts = list(self._layer_texts)
        found = [
            self._part(pattern, code, layer_texts, sample if per_sample else "") for code in codes if code & 7 == n
        ]
        order = {**self._layers, "": -1}
        return sorted(found, key=lambda part: (part.step or 0, order[part.layer], part.rank or 0, part.path))

    def _add(self, path: str) -> None:
        packing = self.description.packing
        if packing is not None and (fields := packing.pattern.match(path)):
            step = int(fields.step)
            if self._packing_files.setdefault(step, path) != path:
                self.broken[step] = f"is there twice, as {path} too"
        matches = [(n, fields) for n, pattern in enumerate(self._patterns) if (fields := pattern.match(path))]
        # "{sample}.pt" also matches what "{sample}_ids.pt" is for, with a longer sample.
        shortest = min((len(fields.sample) for _, fields in matches), default=0)
        for n, fields in matches:
            if len(fields.sample) > shortest:
                continue
            self.num_state_files += self._patterns[n] == self.description.states.pattern
            layer = self._layer_texts.setdefault(fields.layer, len(self._layer_texts))
            if layer >= _MAX_LAYERS:
                raise FormatError(f"{self.folder / path}: layer numbers are written in more than {_MAX_LAYERS} ways")
            code = int(fields.step or 0) << 4 | len(fields.step)
            code = (code << 14 | int(fields.rank or 0)) << 3 | len(fields.rank)
            code = (code << 8 | layer) << 3 | n
            if "sample" in self._patterns[n].fields:
                self._by_sample.setdefault(fields.sample, array("Q")).append(code)
            else:
                self._by_step.setdefault(int(fields.step), array("Q")).append(code)

    def _part(self, pattern: Pattern, code: int, layer_texts: list[str], sample: str) -> Part:
        layer = layer_texts[code >> 3 & 255]
        rank, step = _written(code >> 14 & 16383, code >> 11 & 7), _written(code >> 32, code >> 28 & 15)
        return Part(
            int(step) if step else None,
            layer if layer in self._layers or not layer else layer.lstrip("0") or "0",
            int(rank) if rank else None,
            pattern.path(Fields(rank, layer, step, sample)),
        )

    def _unpack(self, packing: Packing, step: int) -> None:
        """Note which samples' rows a step's files hold."""
        path = self.folder / self._packing_files[step]
        try:
            content = read_tensor_file(path)
            names = _names(take_key(content, packing.samples))
            lengths_key = packing.lengths or packing.cu_seqlens
            assert lengths_key is not None
            numbers = as_tensor(take_key(content, lengths_key)).reshape(-1).tolist()
            if any(type(number) is not int for number in numbers):
                raise MergeError(f"{'.'.join(lengths_key)} is {numbers[:5]}, expected whole numbers")
        except (TensorFileError, MergeError) as error:
            self.broken[step] = error.what
            return
        starts = numbers if packing.cu_seqlens else [0, *accumulate(numbers)]
        if len(set(names)) < len(names):
            self.broken[step] = f"names a sample twice: {', '.join(names[:20])}"
        elif len(starts) != len(names) + 1 or starts[0] != 0 or starts != sorted(starts):
            self.broken[step] = (
                f"{len(names)} samples with {'cu_seqlens' if packing.cu_seqlens else 'lengths'} {numbers}: expected "
                f"one length each, added up from 0 where they are cu_seqlens"
            )
        if step in self.broken:
            return
        self.step_tokens[step] = starts[-1]
        for name, start, stop in zip(names, starts, starts[1:], strict=False):
            if stop > start:
                self._spans.setdefault(name, []).append(Span(step, start, stop))


def walk(folder: Path, links: list[str]) -> Iterator[str]:
    """Paths of files below the folder. Symbolic links, which may lead out of it, go into ``links`` and no further."""
    folders = [""]
    while folders:
        below = folders.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.is_symlink():
                    links.append(below + entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(f"{below}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield below + entry.name


def _written(value: int, digits: int) -> str:
    """A number as a file name writes it, with so many digits; "" for none."""
    return f"{value:0{digits}d}" if digits else ""


def _names(value: Any) -> list[str]:
    """Samples' names: a list of strings or numbers, or a tensor of whole numbers."""
    if isinstance(value, list | tuple) and all(isinstance(name, str | int) for name in value):
        return [str(name) for name in value]
    if getattr(value, "dtype", None) is not None and getattr(value.dtype, "kind", "") == "U":  # NumPy's strings
        return [str(name) for name in value.reshape(-1).tolist()]
    tensor = as_tensor(value)
    if tensor.is_floating_point():
        raise MergeError(f"samples' names are {tensor.dtype}: expected strings or whole numbers")
    return [str(name) for name in tensor.reshape(-1).tolist()]
