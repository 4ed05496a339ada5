"""Which part of a decoder layer a stored row is, where it is no whole tap.

A layer adds two pieces to the residual stream, ``after:j = into + u + v`` (attention, then MLP; post-normed where the
model norms them, scaled where it scales them). Engines carry the stream as a pair (hidden, residual) and sum pieces
over tensor-parallel ranks late, so what a hook catches may lack a summand: the residual, the MLP, or the other ranks'
part of the MLP where the all-reduce was fused into the next layer (sglang issue 28343). The stored rows are fitted as

    x = a * into + b * u + c * v + d * u_part + e * v_part

by least squares over all compared rows, each weighed by 1 / |x|, and the coefficients name the defect. ``u_part`` is
what rank r of n would have given: the piece's module run again on its own input with the other ranks' share of its
row-parallel weights set to zero, columns of the last projection for tensor parallelism, experts for expert parallelism.

Shapes: T tokens, H hidden_size, E experts, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

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
_PARTIAL_LAYERS = 3  # layers whose parts are computed, the best by a fit without parts
_MUCH_BETTER = 0.5  # of the closest tap's error, at most, where pieces explain rows
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

    def accepted(piece: Piece) -> bool:
        return piece.error <= max(noise.excluded(piece.layer + 1), 1e-4) and piece.error <= best_error * _MUCH_BETTER

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
    partials = [
        partial
        for _, j, _ in fits[:_PARTIAL_LAYERS]
        for partial in _partials(target, [ids for ids, _, _ in stored], pieces, j, summands[j], gather, x)
        if accepted(partial)
    ]
    if partials and (partial := min(partials, key=lambda partial: partial.error)).error < combination.error:
        return partial
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


def _row_parallel(module: Module, hidden_size: int) -> list[tuple[Tensor, int]]:
    """Row-parallel weights inside a piece's module, each with the dimension that ranks share: [H, I] Linears, and
    [E, H, I] or [E, I, H] experts."""
    import torch

    found: list[tuple[Tensor, int]] = []
    for name, inner in module.named_modules():
        if isinstance(inner, torch.nn.Linear) and name.rpartition(".")[2] in ROW_PARALLEL:
            found.append((inner.weight, 1))
        for own, parameter in inner.named_parameters(recurse=False):
            if parameter.dim() == 3 and own in ROW_PARALLEL:
                found.append((parameter, 2 if parameter.shape[1] == hidden_size else 1))
    return [(weight, dim) for weight, dim in found if weight.is_floating_point()]


def _parts(module: Module, hidden_size: int) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """(name, masks of weights) of each rank of each parallel size: what to keep of a piece's row-parallel weights."""
    import torch

    weights = _row_parallel(module, hidden_size)
    if not weights:
        return
    for n in NUM_RANKS:
        if any(weight.shape[dim] % n for weight, dim in weights):
            continue
        for rank in range(n):
            yield f"rank {rank} of {n} (tensor parallel)", [(w, _slice_mask(w, dim, rank, n)) for w, dim in weights]
    experts = [weight for weight, _ in weights if weight.dim() == 3]
    dense = [weight for weight, _ in weights if weight.dim() != 3]
    for n in NUM_RANKS:
        if not experts or experts[0].shape[0] % n:
            continue
        for rank in range(n):
            masks = [(weight, _slice_mask(weight, 0, rank, n)) for weight in experts]
            yield f"rank {rank} of {n} (expert parallel)", masks
            if dense:
                none = [(weight, torch.zeros(1, dtype=torch.bool, device=weight.device)) for weight in dense]
                yield f"rank {rank} of {n} (expert parallel, without shared experts)", [*masks, *none]


def _slice_mask(weight: Tensor, dim: int, rank: int, n: int) -> Tensor:
    """True on rank's share of dimension dim, broadcastable to weight."""
    import torch

    size = weight.shape[dim]
    place = torch.arange(size, device=weight.device)
    shape = [1] * weight.dim()
    shape[dim] = size
    return (place * n // size == rank).view(shape)


def _partials(
    target: ReplayTarget,
    samples: list[Tensor],
    pieces: list[dict[int, LayerPieces]],
    j: int,
    summands: _Summands,
    gather: Callable[[list[Tensor]], Tensor],
    x: Tensor,
) -> list[Piece]:
    """Fits of x by layer j's pieces and what one rank would have given of them."""
    import torch

    into, u, v = (gather(column) for column in _columns(pieces, j, summands))
    parts: list[dict[str, Tensor]] = []  # per piece: rank -> [R, H]
    for name in summands.names:
        module: Any = target.stack.layers[j].get_submodule(name)
        again = [target.calls(ids, j, name) for ids in samples]
        made: dict[str, Tensor] = {}
        for rank, masks in _parts(module, target.hidden_size):
            with ExitStack() as stack:
                for weight, mask in masks:
                    stack.enter_context(masked(weight, mask))
                made[rank] = gather([call() for call in again]) * summands.factor
        parts.append(made)
    found = []
    for rank in dict.fromkeys([*parts[0], *parts[1]]):
        u_part, v_part = parts[0].get(rank), parts[1].get(rank)
        columns = [into, u, v, *(part for part in (u_part, v_part) if part is not None)]
        coefficients, error = _fit(torch.stack(columns), x)
        values = coefficients.tolist()
        a, b, c = values[:3]
        rest = values[3:]
        d = rest.pop(0) if u_part is not None else 0.0
        e = rest.pop(0) if v_part is not None else 0.0
        partial = [name for name, full, part in zip(summands.names, (b, c), (d, e), strict=True)
                   if _near(full, 0) and _near(part, 1)]  # fmt: skip
        if not partial:
            continue
        kept = [name for name, full in zip(summands.names, (b, c), strict=True) if _near(full, 1)]
        base = "the residual stream" if _near(a, 1) else f"{a:.3g} x the residual stream"
        text = f"after:{j} with only {rank} of its {' and '.join(partial)}"
        if not _near(a, 1) or len(kept) + len(partial) < 2:
            text = f"{' + '.join([base, *kept])} + {rank}'s part of {' and '.join(partial)} of layer {j}"
        found.append(Piece(layer=j, what="partial", error=error, text=text))
    return found


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
