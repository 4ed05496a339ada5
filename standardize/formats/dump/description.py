"""The TOML that describes a dump, ``eyas-dump.toml`` in its folder: docs/formats.md has every key, and an example.

Shapes: T tokens, A layers, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.dump.pattern import Pattern, PatternError, parse_pattern
from eyas.taps.conventions import parse_convention
from eyas.taps.errors import EyasError
from eyas.taps.notation import Tap, parse_tap, validate_taps

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DESCRIPTION_FILE = "eyas-dump.toml"
VERSION = 1
FILL_IN = "?"  # what --describe leaves for the user to state
UNKNOWN = "unknown"  # a convention: the taps are given, or found, elsewhere

Placement = Literal["replicated", "token-sharded", "hidden-sharded", "partial-sums"]
Shape = Literal["T,H", "T,A,H", "A,T,H", "T,A*H"]
DTYPES = ("bfloat16", "float16", "float32")
NORMS = ("pre-norm", "post-norm")

_T = TypeVar("_T")


class DescriptionError(FormatError):
    """A description that is no TOML, lacks a key, has one too many, or says what cannot be."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Where token ids, or the loss mask, stand: integers [T] or [1, T]."""

    pattern: Pattern
    key: tuple[str, ...]  # of the dicts or lists inside a file, outermost first; () where the file is the tensor


@dataclass(frozen=True, kw_only=True)
class States:
    """Where hidden states stand, and how a tensor's parts lie on the ranks."""

    pattern: Pattern
    key: tuple[str, ...]  # "{layer}" in it stands for each layer
    residual: tuple[str, ...]  # key of what is still to be added to it; () for nothing
    shape: Shape  # of a file's tensor; a 1 in front ([1, T, H]) is dropped
    placement: Placement
    padded: bool  # token-sharded: padding behind the last token makes all parts one length
    tolerance: float  # replicated: by how much a row may differ from rank 0's, relative (L2); 0: not in a bit

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor holds all layers."""
        return self.shape != "T,H"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where it stands which samples' tokens a step's files hold, back to back."""

    pattern: Pattern
    samples: tuple[str, ...]  # key of the samples' names, N of them
    lengths: tuple[str, ...] | None  # key of their numbers of tokens in this step, [N] ...
    cu_seqlens: tuple[str, ...] | None  # ... or of these added up from 0, [N+1]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A parsed and checked eyas-dump.toml."""

    hidden_size: int
    dtype: str  # of what is read, once parts are merged
    tp: int
    first_step: int | None  # None: steps are the engine's own numbers, which may have gaps
    layers: tuple[int | str, ...]  # what {layer} says, in ascending depth
    convention: str | None  # whose numbers they are, ...
    taps: tuple[Tap, ...] | None  # ... or which taps, outright; both None where nobody knows
    states: States
    last_hidden: States | None
    norm: Literal["pre-norm", "post-norm"] | None  # of last_hidden
    input_ids: Tokens
    loss_mask: Tokens | None
    packing: Packing | None


def read_description(folder: Path) -> Description:
    """Read ``folder``'s description. Raises DescriptionError, naming the key, what was found and what is expected."""
    path = folder / DESCRIPTION_FILE
    try:
        return parse_description(path.read_bytes().decode(), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path}: cannot be read ({error})") from error


def parse_description(text: str, where: str = DESCRIPTION_FILE) -> Description:
    """Read a description's text. Raises DescriptionError."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DescriptionError(f"{where}: no TOML ({error})") from error
    return _description(_Table(where, "", content))


class _Table:
    """A TOML table that is taken apart key by key; what is left over at the end is refused."""

    def __init__(self, where: str, name: str, content: Mapping[str, Any]) -> None:
        self._where, self.name, self._content = where, name, dict(content)
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self._content

    def take(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The value of ``key``. Raises DescriptionError for one of another type, or none where there is no default."""
        self._known.append(key)
        if key not in self._content:
            if default is None:
                raise self.error(key, "is missing")
            return default
        value = self._content.pop(key)
        if value == FILL_IN:
            raise self.error(key, f"is still {FILL_IN!r}: state what holds for your patch")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(key, f"is {value!r}, expected {_KINDS[kind]}")
        return value

    def one_of(self, key: str, choices: tuple[str, ...], default: str | None = None) -> Any:
        value = self.take(key, str, default)
        if value not in choices:
            raise self.error(key, f"is {value!r}, expected one of {', '.join(choices)}")
        return value

    def number(self, key: str, lowest: int, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < lowest:
            raise self.error(key, f"is {value}, expected at least {lowest}")
        return value

    def keys(self, key: str) -> tuple[str, ...]:
        """A key inside files, or a list of them for nested ones; () where it is not given."""
        if not isinstance(self._content.get(key), list):
            name = self.take(key, str, "")
            return (name,) if name else ()
        names = self.take(key, list)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise self.error(key, f"is {names!r}, expected a string, or a list of strings for nested keys")
        return tuple(names)

    def table(self, key: str) -> _Table:
        return _Table(self._where, key, self.take(key, dict))

    def pattern(self, layers: tuple[int | str, ...]) -> Pattern:
        text = self.take("files", str)
        try:
            return parse_pattern(text, layers)
        except PatternError as error:
            raise self.error("files", str(error)) from error

    def error(self, key: str, what: str) -> DescriptionError:
        key = f"[{self.name}] {key}" if self.name else key
        return DescriptionError(f"{self._where}: {key} {what}")

    def finish(self) -> None:
        if self._content:
            raise self.error(
                next(iter(self._content)), f"is no key here: expected {', '.join(dict.fromkeys(self._known))}"
            )


_KINDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def _description(top: _Table) -> Description:
    if (version := top.take("version", int)) != VERSION:
        raise top.error("version", f"is {version}, and this eyas reads {VERSION}")
    layers, convention, taps = _layers(top.table("layers"))
    tp = top.number("tp", 1, 1)
    states = _states(top.table("states"), layers, tp)
    last_hidden, norm = None, None
    if top.has("last_hidden"):
        table = top.table("last_hidden")
        norm = table.one_of("norm", NORMS)
        last_hidden = _states(table, (), tp)
    packing = _packing(top.table("packing")) if top.has("packing") else None
    input_ids = _tokens(top.table("input_ids"), layers)
    loss_mask = _tokens(top.table("loss_mask"), layers) if top.has("loss_mask") else None
    description = Description(
        hidden_size=top.number("hidden_size", 1),
        dtype=top.one_of("dtype", DTYPES),
        tp=tp,
        first_step=top.number("first_step", 0) if top.has("first_step") else None,
        layers=layers,
        convention=convention,
        taps=taps,
        states=states,
        last_hidden=last_hidden,
        norm=norm,
        input_ids=input_ids,
        loss_mask=loss_mask,
        packing=packing,
    )
    _check_together(top, description)
    top.finish()
    return description


def _layers(table: _Table) -> tuple[tuple[int | str, ...], str | None, tuple[Tap, ...] | None]:
    ids = table.take("ids", list)
    if not ids or any(type(name) not in (int, str) or name in ("", FILL_IN) for name in ids):
        raise table.error("ids", f"is {ids!r}, expected what {{layer}} says in the files, e.g. [2, 16, 29]")
    if len({str(name) for name in ids}) < len(ids):
        raise table.error("ids", f"is {ids!r}, which repeats a layer")
    if table.has("taps") == table.has("convention"):
        raise table.error(
            "convention",
            'or taps: exactly one of them must say what the numbers mean (convention = "vllm@0.32" or '
            f'"{UNKNOWN}", or taps = ["after:1", "after:15", "after:28"])',
        )
    convention, taps = None, None
    if table.has("taps"):
        names = table.take("taps", list)
        if len(names) != len(ids):
            raise table.error("taps", f"lists {len(names)}, and ids {len(ids)}: expected one tap for each layer")
        try:
            taps = tuple(parse_tap(str(name)) for name in names)
            validate_taps(taps, num_layers=1 + max((tap.layer for tap in taps), default=0))
        except EyasError as error:
            raise table.error("taps", f"is {names!r}: {error}") from error
    else:
        convention = table.take("convention", str)
        if convention == UNKNOWN:
            table.finish()
            return tuple(ids), None, None
        if any(type(name) is not int for name in ids):
            raise table.error("ids", f"is {ids!r}: what is no number is in no convention, so give taps instead")
        try:
            parse_convention(convention)
        except EyasError as error:
            raise table.error("convention", f"is {convention!r}: {error}") from error
    table.finish()
    return tuple(ids), convention, taps


def _states(table: _Table, layers: tuple[int | str, ...], tp: int) -> States:
    """``layers`` is () for last_hidden, which is one layer and has no field for it."""
    pattern = table.pattern(layers)
    key, residual = table.keys("key"), table.keys("residual")
    shape: Shape = table.one_of("shape", get_args(Shape), "T,H") if layers else "T,H"
    placement: Placement = table.one_of("placement", get_args(Placement), "replicated")
    padded = table.take("padded", bool, False)
    tolerance = table.take("tolerance", float, 0.0)
    table.finish()
    places = ("layer" in pattern.fields) + any("{layer}" in name for name in key)
    if not layers and places:
        raise table.error("files", "or key has {layer}, and it is one layer: write its number or name out")
    if layers and shape == "T,H" and places == 0 and len(layers) > 1:
        raise table.error(
            "files", f"and key have no {{layer}}, and there are {len(layers)}: where a tensor holds all, give its shape"
        )
    if shape != "T,H" and places:
        raise table.error("shape", f"is {shape!r}, a tensor of all layers, but files or key have {{layer}}")
    if placement != "replicated" and "rank" not in pattern.fields:
        raise table.error("placement", f"is {placement!r}, but files has no {{rank}} to tell the parts apart")
    if residual and (placement == "partial-sums" or not key):
        raise table.error("residual", "is added to what key names, and parts of it are no partial sums as a rule")
    if padded and placement != "token-sharded":
        raise table.error("padded", f"is true, but placement is {placement!r}: only token-sharded parts are padded")
    if tolerance < 0 or (tolerance and placement != "replicated"):
        raise table.error("tolerance", f"is {tolerance}, expected at least 0, and placement 'replicated'")
    if tp == 1 and placement != "replicated":
        raise table.error("placement", f"is {placement!r}, but tp, the number of ranks, is 1 or not given")
    return States(
        pattern=pattern,
        key=key,
        residual=residual,
        shape=shape,
        placement=placement,
        padded=padded,
        tolerance=tolerance,
    )


def _tokens(table: _Table, layers: tuple[int | str, ...]) -> Tokens:
    tokens = Tokens(pattern=table.pattern(layers), key=table.keys("key"))
    table.finish()
    return tokens


def _packing(table: _Table) -> Packing:
    pattern = table.pattern(())
    samples, lengths, cu_seqlens = (table.keys(key) for key in ("samples", "lengths", "cu_seqlens"))
    table.finish()
    if pattern.fields != {"step"}:
        raise table.error("files", f"is {pattern.text!r}: expected {{step}} as its one field")
    if not samples or bool(lengths) == bool(cu_seqlens):
        raise table.error("samples", "and one of lengths and cu_seqlens are needed: the keys inside the files")
    return Packing(pattern=pattern, samples=samples, lengths=lengths or None, cu_seqlens=cu_seqlens or None)


def _check_together(top: _Table, found: Description) -> None:
    tables: dict[str, Tokens | States | None] = {
        "states": found.states,
        "last_hidden": found.last_hidden,
        "input_ids": found.input_ids,
        "loss_mask": found.loss_mask,
    }
    for name, table in tables.items():
        fields = table.pattern.fields if table else frozenset({"sample"})
        if "sample" not in fields and (found.packing is None or "step" not in fields):
            raise top.error(
                f"[{name}] files",
                "has no {sample}: files that hold several samples need {step}, and [packing] to say which",
            )
        if found.packing is not None and isinstance(table, States) and "sample" in fields:
            raise top.error(f"[{name}] files", "has {sample}, but [packing] says that a step's files hold several")
    if found.packing is not None and found.first_step is not None:
        raise top.error("first_step", "is for steps counted by sample, and with [packing] they are the engine's")
    stepwise = "step" in found.input_ids.pattern.fields or found.packing is not None
    for name in ("states", "last_hidden"):
        states = tables[name]
        if isinstance(states, States) and states.padded and "step" in states.pattern.fields and not stepwise:
            raise top.error(
                f"[{name}] padded",
                "is true for files of single steps, but [input_ids] files has no {step} to tell a step's tokens",
            )
