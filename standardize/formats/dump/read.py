"""Reads a described dump, one sample at a time: its steps joined, its layers stacked, its parts merged.

Shapes: T tokens of a sample, A layers, H hidden size; R rows and W width of a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eyas.shards.tensor_files import TensorFileError, read_tensor_file
from eyas.standardize.formats.base import ForeignFileError, ForeignSample, FormatError, Layout
from eyas.standardize.formats.dump.description import Description, States, Tokens
from eyas.standardize.formats.dump.detect import DumpLayout, detect
from eyas.standardize.formats.dump.index import Index, Part
from eyas.standardize.formats.dump.merge import MergeError, as_states, as_tensor, merge_into, merged_rows, take_key
from eyas.standardize.formats.dump.pattern import Pattern

if TYPE_CHECKING:
    from torch import Tensor


# Files that one sample holds mapped. NumPy's keep a descriptor each, of which a process often has 1024.
_MAX_OPEN = 64


def open_reader(folder: Path, layout: Layout) -> DumpReader:
    """The reader of a folder that detect() looked at. Raises FormatError."""
    if not isinstance(layout, DumpLayout):
        found = detect(folder)
        if found is None:
            raise FormatError(f"{folder} holds no description of a dump")
        layout = found
    return DumpReader(layout)


class DumpReader:
    """base.Reader of a described dump."""

    def __init__(self, layout: DumpLayout) -> None:
        self._layout = layout
        self._index = layout.index
        self._items = self._index.samples()

    @property
    def layout(self) -> Layout:
        return self._layout

    def items(self) -> Sequence[str]:
        """The samples, as {sample} or the packing files name them; no file of states is opened."""
        return self._items

    def read(self, item: str) -> ForeignSample:
        """One sample; every file of it is opened, and merged only where features and last_hidden are asked for.

        Raises ForeignFileError, and so does asking for those where parts disagree.
        """
        if (why := self._index.broken_packing(item)) is not None:
            raise ForeignFileError(item, why)
        try:
            return _Assembly(self._index, item).sample()
        except MergeError as error:
            raise ForeignFileError(item, error.what) from error


class DumpSample(ForeignSample):
    """A sample whose parts are merged when they are asked for: a look at its ids reads none of them."""

    states_are_costly: ClassVar[bool] = True

    def __init__(
        self,
        *,
        where: str,
        input_ids: Tensor,
        loss_mask: Tensor | None,
        features: Callable[[], Tensor],
        last_hidden: Callable[[], Tensor] | None,
    ) -> None:
        self.__dict__.update(
            where=where, input_ids=input_ids, loss_mask=loss_mask, _features=features, _last_hidden=last_hidden
        )

    @cached_property
    def features(self) -> Tensor:
        return self._merged(self.__dict__["_features"])

    @cached_property
    def last_hidden(self) -> Tensor | None:
        merge = self.__dict__["_last_hidden"]
        return None if merge is None else self._merged(merge)

    def _merged(self, merge: Callable[[], Tensor]) -> Tensor:
        try:
            return merge()
        except MergeError as error:
            raise ForeignFileError(self.where, error.what) from error


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The rows of a sample that one step holds; all of them where files are not split by steps."""

    step: int | None
    start: int = 0  # in the step's tensors
    stop: int | None = None
    step_tokens: int | None = None  # of all samples packed in the step


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Parts of one layer (or of all, stacked) that make the sample's rows from ``at`` on."""

    what: str  # for messages
    layer: int | None  # its place in the features; None where the tensor has all layers, or is no feature
    at: int
    num_rows: int
    start: int  # in the merged parts
    files: tuple[Part, ...]  # of the parts, in the order of ranks
    name: str | None  # of the layer, for keys


class _Assembly:
    """One sample's files, opened and put in their places. Every method raises MergeError."""

    def __init__(self, index: Index, name: str) -> None:
        self._index, self._name = index, name
        self._description: Description = index.description
        self._files: dict[Pattern, defaultdict[int | None, list[Part]]] = {}
        self._opened: dict[str, Any] = {}
        self._pieces = self._find_pieces()

    def sample(self) -> DumpSample:
        import torch

        found = self._description
        ids = self._tokens(found.input_ids, "token ids")  # [T] each
        input_ids = torch.cat(ids)
        num_tokens = len(input_ids)
        if not num_tokens or int(input_ids.min()) < 0:
            raise MergeError(f"{num_tokens} token ids" + (", some below 0" if num_tokens else ""))
        loss_mask = None
        if found.loss_mask is not None:
            loss_mask = torch.cat(self._tokens(found.loss_mask, "loss mask"))
            if len(loss_mask) != num_tokens:
                raise MergeError(f"a loss mask of {len(loss_mask)} for {num_tokens} token ids")
            if not bool(((loss_mask == 0) | (loss_mask == 1)).all()):
                raise MergeError("a loss mask with other values than 0 and 1")
            loss_mask = loss_mask.to(torch.uint8)
        by_piece = [len(part) for part in ids] if len(ids) == len(self._pieces) else None
        features = self._rows(found.states, list(map(str, found.layers)), num_tokens, by_piece)
        last_states = found.last_hidden
        last = self._rows(last_states, None, num_tokens, by_piece) if last_states else None
        return DumpSample(
            where=self._name,
            input_ids=input_ids,
            loss_mask=loss_mask,
            features=lambda: self._merge(found.states, features, (num_tokens, len(found.layers), found.hidden_size)),
            last_hidden=None
            if last is None or last_states is None
            else lambda: self._merge(last_states, last, (num_tokens, found.hidden_size)),
        )

    def _merge(self, states: States, rows: list[_Rows], shape: tuple[int, ...]) -> Tensor:
        import torch

        out = torch.empty(shape, dtype=getattr(torch, self._description.dtype))
        for part in rows:
            place = out[part.at : part.at + part.num_rows]
            place = place if part.layer is None else place[:, part.layer]
            try:
                tensors, first_rank = self._states(states, states.key, part.files, part.name), part.files[0].rank or 0
                merge_into(place, tensors, states, start=part.start, first_rank=first_rank)
                if states.residual:
                    residual = torch.empty_like(place)
                    tensors = self._states(states, states.residual, part.files, part.name)
                    merge_into(residual, tensors, states, start=part.start, first_rank=first_rank)
                    place.add_(residual)
            except MergeError as error:
                raise MergeError(f"{part.what}: {error.what}") from error
        return out

    def _find_pieces(self) -> list[_Piece]:
        """The sample's steps in their order, or one piece where nothing is split by steps."""
        found = self._description
        if found.packing is not None:
            return [
                _Piece(step=step, start=start, stop=stop, step_tokens=self._index.step_tokens[step])
                for step, start, stop in self._index.spans(self._name)
            ]
        tables = (found.states, found.last_hidden, found.input_ids, found.loss_mask)
        patterns = {table.pattern for table in tables if table and "step" in table.pattern.fields}
        parts = [part for pattern in patterns for part in self._index.parts(pattern, self._name)]
        steps = sorted({part.step for part in parts if part.step is not None})
        if not patterns:
            return [_Piece(step=None)]
        if found.first_step is not None:
            if missing := sorted(set(range(found.first_step, max(steps, default=0) + 1)) - set(steps)):
                raise MergeError(
                    f"no files of step {_list(missing)}: found {_list(steps)}, first_step {found.first_step}"
                )
            if steps and steps[0] < found.first_step:
                raise MergeError(f"step {steps[0]} is below first_step, which is {found.first_step}")
        return [_Piece(step=step) for step in steps]

    def _parts(self, pattern: Pattern, piece: _Piece) -> list[Part]:
        """The files of a pattern that hold a piece."""
        if "sample" not in pattern.fields:
            return self._index.parts(pattern, "", piece.step)
        if pattern not in self._files:
            self._files[pattern] = by_step = defaultdict[int | None, list[Part]](list)
            for part in self._index.parts(pattern, self._name):
                by_step[part.step].append(part)
        return self._files[pattern][piece.step if "step" in pattern.fields else None]

    def _tokens(self, table: Tokens, what: str) -> list[Tensor]:
        """Whole numbers [T], one tensor a piece, or one in all where files are not split by steps.

        Where several ranks or layers have files of them, all must be the same.
        """
        import torch

        pieces = self._pieces if "step" in table.pattern.fields else [_Piece(step=None)]
        found: list[Tensor] = []
        for piece in pieces:
            parts = self._parts(table.pattern, piece)
            if not parts:
                raise MergeError(f"{what}{_of_step(piece)}: no file of the pattern {table.pattern.text}")
            copies = []
            for part in parts:
                tensor = self._load(part, table.key, as_tensor)
                if tensor.ndim == 2 and tensor.shape[0] == 1:
                    tensor = tensor[0]
                no_ids = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
                if tensor.ndim != 1 or (no_ids and what == "token ids"):
                    raise MergeError(
                        f"{part.path}: {what} are {str(tensor.dtype)[6:]} {list(tensor.shape)}, expected whole "
                        "numbers [T]"
                    )
                if piece.step_tokens is not None and len(tensor) != piece.step_tokens:
                    raise MergeError(f"{part.path}: {len(tensor)} {what}, and {piece.step_tokens} by the packing file")
                copies.append(tensor.to(torch.int64) if what == "token ids" else tensor)
            for part, copy in zip(parts, copies, strict=True):
                if not torch.equal(copy, copies[0]):
                    raise MergeError(f"{what} of {part.path} are not those of {parts[0].path}")
            found.append(copies[0][piece.start : piece.stop])
        return found

    def _rows(
        self, states: States, layers: list[str] | None, num_tokens: int, by_piece: list[int] | None
    ) -> list[_Rows]:
        """Where every row of every layer is, with all shapes checked. ``layers`` is None for last_hidden."""
        rows: list[_Rows] = []
        at_of = dict.fromkeys(range(len(layers or [""])), 0)
        pieces = self._pieces if "step" in states.pattern.fields else [_Piece(step=None)]
        for n, piece in enumerate(pieces):
            piece_tokens = by_piece[n] if by_piece and len(pieces) == len(by_piece) else None
            if len(pieces) == 1 and piece_tokens is None:
                piece_tokens = num_tokens
            files = self._parts(states.pattern, piece)
            for place, layer in enumerate(layers if layers is not None and not states.is_stacked else [None]):
                what = "last hidden" if layers is None else "all layers" if layer is None else f"layer {layer}"
                what += _of_step(piece)
                try:
                    parts = self._of_ranks(states, [part for part in files if part.layer in ("", layer or "")])
                    tensors = self._states(states, states.key, parts, layer)
                    residual = self._states(states, states.residual, parts, layer) if states.residual else ()
                    whole = piece.step_tokens if piece.step_tokens is not None else piece_tokens
                    num_rows = merged_rows(tensors, states, self._description.hidden_size, whole)
                    if [part.shape for part in residual] != [part.shape for part in tensors][: len(residual)]:
                        raise MergeError("the residual is of another shape")
                except MergeError as error:
                    raise MergeError(f"{what}: {error.what}") from error
                if piece.stop is not None:
                    num_rows = piece.stop - piece.start
                rows.append(
                    _Rows(
                        what=what,
                        layer=None if layer is None else place,
                        at=at_of[place],
                        num_rows=num_rows,
                        start=piece.start,
                        files=tuple(parts),
                        name=layer,
                    )
                )
                at_of[place] += num_rows
        for place in at_of:
            if layers is not None and states.is_stacked and place:
                continue
            if at_of[place] != num_tokens:
                what = "last hidden" if layers is None else f"layer {layers[place]}"
                raise MergeError(
                    f"{what}: {at_of[place]} rows in steps {_list([p.step for p in pieces])} for {num_tokens} token ids"
                )
        return rows

    def _states(
        self, states: States, key: Sequence[str], parts: Sequence[Part], layer: str | None
    ) -> tuple[Tensor, ...]:
        """The tensor of each part, [R, W] or [R, A, W]."""
        found = self._description
        names = [name.replace("{layer}", layer or "") for name in key]
        return tuple(
            self._load(part, names, lambda value: as_states(value, states, found.dtype, len(found.layers)))
            for part in parts
        )

    def _of_ranks(self, states: States, parts: list[Part]) -> list[Part]:
        """The parts of one tensor in the order of ranks, none missing.

        Ranks may be counted over several groups (pipeline stages, data-parallel replicas) of tp that follow each other.
        """
        if not parts:
            raise MergeError(f"no file of the pattern {states.pattern.text}")
        ranks = [part.rank for part in parts]
        if repeated := [part for before, part in pairwise(parts) if before.rank == part.rank]:
            raise MergeError(f"{repeated[0].path} is there twice, with zeros in front and without")
        if "rank" not in states.pattern.fields:
            return parts
        tp = self._description.tp
        known = [rank for rank in ranks if rank is not None]
        first = known[0] // tp * tp
        if missing := sorted(set(range(first, first + tp)) - set(known)):
            raise MergeError(f"no file of rank {_list(missing)}, expected ranks {first} to {first + tp - 1}")
        if known[-1] >= first + tp:
            raise MergeError(f"files of ranks {_list(known)}, expected tp = {tp} of them: is tp another?")
        return parts

    def _load(self, part: Part, key: Sequence[str], convert: Callable[[Any], Tensor]) -> Tensor:
        """The tensor of one file, which is opened once for all that is in it where there are few files."""
        try:
            if part.path not in self._opened:
                if len(self._opened) >= _MAX_OPEN:
                    self._opened.clear()
                self._opened[part.path] = read_tensor_file(self._index.folder / part.path)
            return convert(take_key(self._opened[part.path], key))
        except TensorFileError as error:
            raise MergeError(f"{part.path} {error.what}") from error
        except MergeError as error:
            raise MergeError(f"{part.path} {error.what}") from error


def _of_step(piece: _Piece) -> str:
    return "" if piece.step is None else f", step {piece.step}"


def _list(numbers: Sequence[int | None]) -> str:
    """``0, 1, 2`` of a few numbers, the ends of many."""
    texts = list(map(str, numbers))
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-2:]])
