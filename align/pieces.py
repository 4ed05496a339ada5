"""Which part of a decoder layer a stored row is, where it is no whole tap.

A layer adds two pieces to the residual stream, ``after:j = into + u + v`` (attention, then MLP; post-normed where the
model norms them, scaled where it scales them). Engines carry the stream as a pair (hidden, residual) and sum pieces
over tensor-parallel ranks late, so what a hook catches may lack a summand: the residual, the MLP, or the other ranks'
part of the MLP where the all-reduce was fused into the next layer (sglang issue 28343). The stored rows are fitted as

    x = a * into + b * u + c * v + d * u_part + e * v_part

by least squares over all compared rows, each weighed by 1 / |x|, and the coefficients name the defect: b = 0, d = 1
where only that rank's part is there, b = 1, d = -1 where that part is what is missing. ``u_part`` is what rank r of n
would have given: the piece's module run again on its own input with the other ranks' share of its row-parallel weights
set to zero, columns of the last projection for tensor parallelism, experts for expert parallelism, or both. Routed and
shared experts are terms of their own, since engines split them in different ways.

Shapes: T tokens, H hidden_size, E experts, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from eyas.align.forward import LayerPieces, ReplayTarget, masked
from eyas.align.noise import Noise, median_error, row_errors

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# What the last, row-parallel projection of attention and MLP is called in transformers and the engines.
ROW_PARALLEL = (
    "o_proj", "down_proj", "out_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "w2", "wo", "linear_proj",
)  # fmt: skip
NUM_RANKS = (2, 4, 8, 16)
PIECE_ROWS = 96  # tokens of a sample that are compared with pieces, for memory
PIECE_SAMPLES = 3
_ROUTED, _SHARED = "'s routed experts", "'s shared experts"
_PARTIAL_LAYERS = 3  # layers whose parts are computed, the best by a fit without parts
_MUCH_BETTER = 0.5  # of the closest tap's error, at most, where pieces explain rows
_BETTER = 0.75  # and where every coefficient is a whole number, as ranks' shares are
_SUM_TOLERANCE = 2e-2  # of the layer's own addition, in 16-bit arithmetic


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The best explanation of stored rows by a layer's pieces."""

    layer: int
    what: Literal["combination", "intermediate", "partial", "some partial"]
    error: float  # median relative L2 of what stays unexplained
    text: str  # in words, e.g. "after:3 without its MLP's output"


@dataclass(frozen=True, kw_only=True)
class _Summands:
    """Names of the children whose outputs a layer adds to its residual stream, and the factor on them."""

    names: tuple[str, str]
    factor: float


def explain_by_pieces(
    target: ReplayTarget, stored: Sequence[tuple[Tensor, Tensor, Tensor]], noise: Noise, best_error: float
) -> Piece | None:
    """Explain ``stored``, per sample (ids [T], rows [T, H], alive bool [T]), by the pieces of one layer.

    best_error: of the closest tap; a piece must fit much better. None where none does.
    """
    import torch

    stored = [(ids[:PIECE_ROWS], rows[:PIECE_ROWS], alive[:PIECE_ROWS]) for ids, rows, alive in stored[:PIECE_SAMPLES]]
    layers = list(range(target.num_layers))
    pieces = [target.pieces(ids, layers) for ids, _, _ in stored]
    kept = [alive & (torch.arange(len(alive)) > 0) for _, _, alive in stored]
    x = torch.cat([rows.float()[keep] for (_, rows, _), keep in zip(stored, kept, strict=True)]).to(target.device)
    if len(x) < 2:
        return None

    def gather(tensors: list[Tensor]) -> Tensor:
        """Compared rows of one tensor per sample: [R, H]."""
        return torch.cat([tensor[keep.to(tensor.device)] for tensor, keep in zip(tensors, kept, strict=True)])

    def accepted(piece: Piece, share: float = _MUCH_BETTER) -> bool:
        return piece.error <= max(noise.excluded(piece.layer + 1), 1e-4) and piece.error <= best_error * share

    intermediate = _intermediates(target, pieces, gather, x)
    if accepted(intermediate):
        return intermediate
    fits: list[tuple[float, int, Tensor]] = []
    summands: dict[int, _Summands] = {}
    for j in layers:
        found = _summands(pieces[0][j])
        if found is None:
            continue
        summands[j] = found
        basis = torch.stack([gather(parts) for parts in _columns(pieces, j, found)])  # [3, R, H]
        coefficients, error = _fit(basis, x)
        fits.append((error, j, coefficients))
    fits.sort(key=lambda fit: fit[0])
    if not fits:
        return None
    error, j, coefficients = fits[0]
    combination = Piece(
        layer=j, what="combination", error=error, text=_combination_text(j, coefficients.tolist(), summands[j])
    )
    a, b, c = coefficients.tolist()
    is_tap = (_near(b, a) and _near(c, a)) or (_near(b, 0) and _near(c, 0))  # of whatever scale
    plain = all(abs(value - round(value)) < 0.03 for value in (a, b, c))
    if accepted(combination) and plain and not is_tap:
        return combination
    partials: list[Piece] = []
    for _, j, _ in fits[:_PARTIAL_LAYERS]:
        for layout in _partials(target, [ids for ids, _, _ in stored], pieces, j, summands[j], gather, x):
            if fitting := [piece for piece in layout if accepted(piece, _BETTER)]:
                partials.append(min(fitting, key=lambda piece: piece.error))
                break
        if partials and partials[-1].error <= noise.explained(j + 1):
            break  # down to rounding: other layers cannot do better
    if partials and (least := min(partials, key=lambda piece: piece.error)).error < combination.error:
        return least
    if accepted(combination) and not is_tap:
        return combination
    return _some_partial(fits, summands, best_error)


def _columns(pieces: list[dict[int, LayerPieces]], j: int, summands: _Summands) -> tuple[list[Tensor], ...]:
    into = [part[j].into for part in pieces]
    u, v = ([part[j].children[name] * summands.factor for part in pieces] for name in summands.names)
    return into, u, v


def _fit(basis: Tensor, x: Tensor) -> tuple[Tensor, float]:
    """Least squares of x [R, H] over basis [K, R, H], rows weighed by 1/|x|: coefficients [K] and the median relative
    error. Fitted twice, the second time without rows that are far off: tokens that a router sent elsewhere."""
    import torch

    weight = 1 / x.norm(dim=-1, keepdim=True).clamp_min(1e-20)  # [R, 1]
    columns, aim = (basis * weight).double(), (x * weight).double()
    # A part may be all zeros (experts that no token was sent to).
    ridge = torch.eye(len(basis), dtype=columns.dtype, device=x.device) * 1e-12
    kept = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for _ in range(2):
        flat = columns[:, kept].flatten(1)  # [K, R*H]
        gram = flat @ flat.T
        coefficients = torch.linalg.solve(gram + ridge * gram.diagonal().max(), flat @ aim[kept].flatten())
        rest = (aim - torch.einsum("k,krh->rh", coefficients, columns)).norm(dim=-1)  # [R]
        kept = rest <= 3 * rest.median()
    return coefficients.float().cpu(), float(rest.median())


def _summands(pieces: LayerPieces) -> _Summands | None:
    """The two children whose outputs make up what the layer adds, in order; None where no two do."""
    added = pieces.out - pieces.into
    best: tuple[float, _Summands] | None = None
    for first, second in combinations(pieces.children, 2):
        both = pieces.children[first] + pieces.children[second]
        factor = float((both * added).sum() / (both * both).sum().clamp_min(1e-30))
        error = float((added - factor * both).norm() / added.norm().clamp_min(1e-30))
        if best is None or error < best[0]:
            best = error, _Summands(names=(first, second), factor=factor)
    return best[1] if best is not None and best[0] <= _SUM_TOLERANCE else None


def _intermediates(
    target: ReplayTarget,
    pieces: list[dict[int, LayerPieces]],
    gather: Callable[[list[Tensor]], Tensor],
    x: Tensor,
) -> Piece:
    """The closest output of a layer's child, or final norm of a tap."""
    import torch

    tried: list[tuple[float, int, str]] = []
    for j in pieces[0]:
        for name in pieces[0][j].children:
            error = median_error(row_errors(x, gather([part[j].children[name] for part in pieces])), _every(x))
            what = f"the output of layer {j}'s {name}"
            if "norm" in name:
                what += ": the residual stream after a norm that belongs to the layer"
            tried.append((error, j, what))
        out = gather([part[j].out for part in pieces])
        with torch.inference_mode():
            normed = target.stack.final_norm(out.to(target.model.dtype)[None])[0]
            if j == target.num_layers - 1:
                twice = target.stack.final_norm(normed[None])[0]
                tried.append((median_error(row_errors(x, twice), _every(x)), j, "final with the final norm once more"))
            else:
                what = f"after:{j} with the target's final norm on it"
                tried.append((median_error(row_errors(x, normed), _every(x)), j, what))
    error, j, text = min(tried, key=lambda entry: entry[0] if entry[0] == entry[0] else float("inf"))
    return Piece(layer=j, what="intermediate", error=error, text=text)


def _every(x: Tensor) -> Tensor:
    import torch

    return torch.ones(len(x), dtype=torch.bool)


def _near(value: float, aim: float) -> bool:
    return abs(value - aim) <= 0.03 * max(1.0, abs(aim))


def _combination_text(j: int, coefficients: list[float], summands: _Summands) -> str:
    a, b, c = coefficients
    u, v = summands.names
    missing = [name for name, value in (("residual stream", a), (u, b), (v, c)) if _near(value, 0)]
    if missing and all(_near(value, 0) or _near(value, 1) for value in coefficients):
        return (
            f"after:{j} without layer {j}'s {' and '.join(missing)}"
            if a < 0.5 or len(missing) < 2
            else f"after:{j - 1}"
        )
    if _near(b, 1) and _near(c, 1) and a > 1.5 and abs(a - round(a)) < 0.05:
        return (
            f"after:{j} with the residual stream counted {round(a)} times, as when {round(a)} tensor-parallel ranks "
            f"each added it before the sum"
        )
    return f"{a:.3g} x residual + {b:.3g} x {u} + {c:.3g} x {v} of layer {j}"


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """One row-parallel weight of a piece's module."""

    weight: Tensor  # [H, I] of a Linear, [E, H, I] or [E, I, H] of fused experts
    dim: int  # that tensor-parallel ranks share
    expert: int | None  # which expert a Linear belongs to
    routed: bool  # of experts that a router chooses


def _row_parallel(module: Module, hidden_size: int) -> list[_Weight]:
    import torch

    found: list[_Weight] = []
    for name, inner in module.named_modules():
        if isinstance(inner, torch.nn.Linear) and name.rpartition(".")[2] in ROW_PARALLEL:
            place = re.search(r"(?:^|\.)experts\.(\d+)\.", name)
            expert = None if place is None else int(place[1])
            found.append(_Weight(weight=inner.weight, dim=1, expert=expert, routed=expert is not None))
        for own, parameter in inner.named_parameters(recurse=False):
            if parameter.dim() == 3 and own in ROW_PARALLEL:
                dim = 2 if parameter.shape[1] == hidden_size else 1
                found.append(_Weight(weight=parameter, dim=dim, expert=None, routed=True))
    return [entry for entry in found if entry.weight.is_floating_point()]


def _num_experts(weights: Sequence[_Weight]) -> int:
    return max((len(w.weight) if w.expert is None else w.expert + 1 for w in weights if w.routed), default=0)


def _layouts(experts: bool) -> Iterator[tuple[int, int]]:
    """(expert-parallel size, tensor-parallel size) of routed experts: each alone, then grids of both."""
    yield from ((1, n) for n in NUM_RANKS)
    if experts:
        yield from ((n, 1) for n in NUM_RANKS)
        yield from ((e, n // e) for n in NUM_RANKS for e in NUM_RANKS if e < n)


def _share(entry: _Weight, num_experts: int, rank: int, ep: int, tp: int) -> Tensor | None:
    """What rank keeps of a weight, broadcastable to it: dense weights are split over all ep * tp ranks, routed experts
    ep ways by expert, each of those tp ways by width. None where it cannot be split so."""
    import torch

    if not entry.routed:
        n = ep * tp
        return None if entry.weight.shape[entry.dim] % n else _slice_mask(entry.weight, entry.dim, rank, n)
    if num_experts % ep or entry.weight.shape[entry.dim] % tp:
        return None
    width = _slice_mask(entry.weight, entry.dim, rank % tp, tp)
    if entry.expert is None:
        return width & _slice_mask(entry.weight, 0, rank // tp, ep)
    return width & torch.tensor(entry.expert * ep // num_experts == rank // tp, device=width.device)


def _slice_mask(weight: Tensor, dim: int, rank: int, n: int) -> Tensor:
    """True on rank's share of dimension dim, broadcastable to weight."""
    import torch

    size = weight.shape[dim]
    place = torch.arange(size, device=weight.device)
    shape = [1] * weight.dim()
    shape[dim] = size
    return (place * n // size == rank).view(shape)


@dataclass(frozen=True, kw_only=True)
class _Term:
    """One term of what a layer adds, that ranks share: attention, a dense MLP, routed experts, shared experts."""

    name: str
    routed: bool
    whole: Tensor  # [R, H]
    part: Callable[[int, int, int], Tensor | None]  # (rank, ep, tp) -> [R, H]; None where it cannot be split so


def _terms(
    target: ReplayTarget,
    samples: list[Tensor],
    j: int,
    summands: _Summands,
    wholes: Sequence[Tensor],
    gather: Callable[[list[Tensor]], Tensor],
) -> list[_Term]:
    """The terms of layer j: ``wholes`` [R, H] of its two children, an MLP's taken apart where experts are shared."""
    found = []
    for name, whole in zip(summands.names, wholes, strict=True):
        weights = _row_parallel(target.stack.layers[j].get_submodule(name), target.hidden_size)
        again = [target.calls(ids, j, name) for ids in samples]
        routed, dense = [w for w in weights if w.routed], [w for w in weights if not w.routed]
        groups = {name: weights}
        if routed and dense:
            groups = {name + _ROUTED: routed, name + _SHARED: dense}
        terms = []
        for label, own in groups.items():
            share = partial(_part, own, weights, again, gather, summands.factor, {})
            separate = share(0, 1, 1) if len(groups) > 1 else whole
            assert separate is not None, "one rank holds everything"
            terms.append(_Term(name=label, routed=bool(own and own[0].routed), whole=separate, part=share))
        found += terms
    return found


def _part(
    own: Sequence[_Weight],
    weights: Sequence[_Weight],
    again: Sequence[Callable[[], Tensor]],
    gather: Callable[[list[Tensor]], Tensor],
    factor: float,
    kept: dict[tuple[int, ...], Tensor],
    rank: int,
    ep: int,
    tp: int,
) -> Tensor | None:
    """What a rank's share of weights ``own`` gives, the module's other weights at zero: [R, H]. ``kept`` holds what
    was computed before."""
    import torch

    routed = any(entry.routed for entry in own)
    place = (rank, ep, tp) if routed else (rank, ep * tp)
    masks = [_share(entry, _num_experts(own), rank, ep, tp) for entry in own]
    if not own or any(mask is None for mask in masks):
        return None
    if place not in kept:
        with ExitStack() as stack:
            for entry in weights:
                mask = next((mask for mine, mask in zip(own, masks, strict=True) if mine is entry), None)
                none = torch.zeros(1, dtype=torch.bool, device=entry.weight.device)
                stack.enter_context(masked(entry.weight, none if mask is None else mask))
            kept[place] = gather([call() for call in again]) * factor
    return kept[place]


def _partials(
    target: ReplayTarget,
    samples: list[Tensor],
    pieces: list[dict[int, LayerPieces]],
    j: int,
    summands: _Summands,
    gather: Callable[[list[Tensor]], Tensor],
    x: Tensor,
) -> Iterator[list[Piece]]:
    """Fits of x by layer j's terms and what one rank would have given of them: a list for each layout of ranks."""
    import torch

    into, *wholes = (gather(column) for column in _columns(pieces, j, summands))
    terms = _terms(target, samples, j, summands, wholes, gather)
    for ep, tp in _layouts(any(term.routed for term in terms)):
        fits: list[Piece] = []
        for rank in range(ep * tp):
            parts = [term.part(rank, ep, tp) for term in terms]
            columns = [into, *(term.whole for term in terms), *(part for part in parts if part is not None)]
            if len(columns) == len(terms) + 1:
                break
            coefficients, error = _fit(torch.stack(columns), x)
            residual, *values = coefficients.tolist()
            shares = iter(values[len(terms) :])
            read = [
                (term, values[n], 0.0 if part is None else next(shares))
                for n, (term, part) in enumerate(zip(terms, parts, strict=True))
            ]
            if (text := _partial_text(j, residual, read, rank, ep, tp)) is not None:
                fits.append(Piece(layer=j, what="partial", error=error, text=text))
        yield fits


def _partial_text(
    j: int, residual: float, terms: Sequence[tuple[_Term, float, float]], rank: int, ep: int, tp: int
) -> str | None:
    """In words, what the coefficients (of each term, and of a rank's part of it) say; None where it is no partial sum.

    Of two ranks, the part of one is all but the other's: that is said of the one that is there.
    """
    only, without, missing = [], [], []
    for term, full, part in terms:
        if _near(full, 0) and _near(part, 1):
            only.append(term)
        elif _near(full, 1) and _near(part, -1) and ep * tp > 2:
            without.append(term)
        elif _near(full, 0) and _near(part, 0):
            missing.append(term)
        elif not (_near(full, 1) and _near(part, 0)):
            return None
    split = [*only, *without]
    if not split or (ep > 1 and not any(term.routed for term in split)):
        return None
    how = "tensor parallel" if ep == 1 else "expert parallel"
    if min(ep, tp) > 1:
        how += f" {ep} x tensor parallel {tp}"
    if ep > 1 and not all(term.routed for term in split):
        how += ", shared experts tensor parallel"
    who = f"rank {rank} of {ep * tp} ({how})"
    said = [f"with only {who} of its {_names(only)}"] if only else []
    said += [f"without {who} of its {_names(without)}"] if without else []
    said += [f"without its {_names(missing)}"] if missing else []
    text = f"after:{j} {', '.join(said)}"
    return text if _near(residual, 1) else f"{text}, and with {residual:.3g} x the residual stream"


def _names(terms: Sequence[_Term]) -> str:
    names = [term.name for term in terms]
    for name in [name.removesuffix(_ROUTED) for name in names if name.endswith(_ROUTED)]:
        if name + _SHARED in names:
            names = [name if other == name + _ROUTED else other for other in names if other != name + _SHARED]
    return " and ".join(names)


def _some_partial(
    fits: list[tuple[float, int, Tensor]], summands: dict[int, _Summands], best_error: float
) -> Piece | None:
    """A missing summand whose share no known layout of ranks gives: whole residual, and a piece by a fraction that is
    clearly neither 0 nor 1, with the rest as large as orthogonal shares leave."""
    error, j, coefficients = fits[0]
    a, b, c = coefficients.tolist()
    if not (abs(a - 1) < 0.05 and error < 0.7 * best_error):
        return None
    fractional = [name for name, value in zip(summands[j].names, (b, c), strict=True) if 0.03 < value < 0.85]
    whole = [value for value in (b, c) if abs(value - 1) < 0.1]
    if not fractional or len(fractional) + len(whole) != 2:
        return None
    share = min(value for value in (b, c))
    return Piece(
        layer=j,
        what="some partial",
        error=error,
        text=f"after:{j} with about {share:.0%} of its {' and '.join(fractional)}, as one of {round(1 / share)} "
        f"tensor-parallel ranks would give",
    )
