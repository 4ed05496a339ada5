"""Whether stored states come from a quantized copy of the target.

A quantized target deviates from the plain one in a direction that can be computed: replay with weights quantized the
same way. The stored deviation ``x - r`` is projected on the deviation ``q - r`` of each scheme (a matched filter, which
finds what is well below the size of rounding, since rounding does not point that way). Another revision's direction is
not known, so what no scheme explains can only be called other weights.

Schemes are those the engines serve: fp8 e4m3 with one scale per tensor, per output channel, or per block of 128 x 128
(DeepSeek-V3), int8 per output channel, and int4 in groups of 32 or 128 along the input (AWQ, GPTQ, compressed-tensors
round other values within the same grid, so they are found only as far as they agree with rounding to nearest).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.align.noise import median_error, row_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from eyas.align.forward import ReplayTarget

FP8_MAX = 448.0  # largest e4m3 number
# A scheme is named where the stored deviation goes along its own by about its own length, and is no accident of both
# following the residual stream's few large directions.
MIN_COSINE = 0.25
SCALE_BOUNDS = 0.6, 1.5
# And where nothing calls for an explanation, since all deviations are within rounding: half of it must be the scheme's.
QUIET_COSINE = 0.5
_PROBE = 1e-2  # of the spread of every weight: the change whose effect is measured


def _fp8(weight: Tensor, scale: Tensor) -> Tensor:
    import torch

    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _fp8_tensor(weight: Tensor) -> Tensor:
    return _fp8(weight, weight.abs().amax().clamp_min(1e-12) / FP8_MAX)


def _fp8_channel(weight: Tensor) -> Tensor:
    return _fp8(weight, weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX)


def _fp8_block(weight: Tensor) -> Tensor:
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)  # [R, 128, C, 128]
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / FP8_MAX
    return _fp8(blocks, scale).view_as(padded)[:rows, :columns]


def _integer(bits: int, group: int | None) -> Callable[[Tensor], Tensor]:
    def quantize(weight: Tensor) -> Tensor:
        columns = weight.shape[1]
        if group is not None and columns % group:
            return weight
        groups = weight.reshape(len(weight), -1, group or columns)  # [R, G, group]
        top = 2 ** (bits - 1) - 1
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / top
        quantized: Tensor = (groups / scale).round().clamp(-top - 1, top) * scale
        return quantized.flatten(1)

    return quantize


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8 weights, one scale per channel": _fp8_channel,
    "fp8 weights, one scale per tensor": _fp8_tensor,
    "fp8 weights, one scale per 128 x 128 block": _fp8_block,
    "int8 weights, one scale per channel": _integer(8, None),
    "int4 weights in groups of 128": _integer(4, 128),
    "int4 weights in groups of 32": _integer(4, 32),
}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The stored deviation along a scheme's own, medians over all compared rows of all slots."""

    scheme: str
    scale: float  # 1 where the stored deviation is the scheme's
    cosine: float
    size: float  # relative L2 of the scheme's own deviation, at the deepest slot that was compared

    def fits(self, least_cosine: float = MIN_COSINE) -> bool:
        return self.cosine >= least_cosine and SCALE_BOUNDS[0] <= self.scale <= SCALE_BOUNDS[1]


def quantize_layer(scheme: str) -> Callable[[Module], Callable[[], None]]:
    """A change for ReplayTarget.run: the layer's projections (nn.Linear, and experts kept as one [E, rows, columns]
    parameter) are replaced by their quantized values. Routers and norms stay, as engines leave them."""
    return _change_projections(SCHEMES[scheme])


def perturb_layer(relative: float) -> Callable[[Module], Callable[[], None]]:
    """A change for ReplayTarget.run: noise on the layer's projections, of ``relative`` times each weight's spread."""
    import torch

    def perturb(weight: Tensor) -> Tensor:
        generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        return weight + relative * weight.std() * noise

    return _change_projections(perturb)


def _change_projections(function: Callable[[Tensor], Tensor]) -> Callable[[Module], Callable[[], None]]:
    import torch

    def change(layer: Module) -> Callable[[], None]:
        kept: list[tuple[torch.nn.Parameter, Tensor]] = []
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_floating_point() or "bias" in name or name.endswith("scale"):
                    continue
                if parameter.dim() == 2 and isinstance(module, torch.nn.Linear):
                    replaced = function(parameter.data.float())
                elif parameter.dim() == 3:
                    replaced = torch.stack([function(expert.float()) for expert in parameter.data])
                else:
                    continue
                kept.append((parameter, parameter.data))
                parameter.data = replaced.to(parameter.dtype)

        def undo() -> None:
            for parameter, data in kept:
                parameter.data = data

        return undo

    return change


def project(
    target: ReplayTarget, stored: Sequence[tuple[Tensor, dict[int, Tensor]]], schemes: Sequence[str] = tuple(SCHEMES)
) -> list[Projection]:
    """Project stored deviations on every scheme's; best cosine first.

    stored: for each sample its ids [T] and, per index of ``target.all_taps``, the rows that should be that tap [T, H].
    Token 0 is left out.
    """
    import torch

    projections = []
    for scheme in schemes:
        scales, cosines, sizes = [], [], []
        for ids, slots in stored:
            plain = target.taps(ids)
            changed = target.run(ids, change=quantize_layer(scheme))
            for index, rows in slots.items():
                r = plain[index].float()[1:]  # [T-1, H]
                deviation = rows.to(r.device).float()[1:] - r
                own = changed[index].float()[1:] - r
                sizes.append((index, float((own.norm(dim=-1) / r.norm(dim=-1)).median())))
                finite = deviation.isfinite().all(-1)
                deviation, own = deviation[finite], own[finite]
                dot, length = (deviation * own).sum(-1), own.norm(dim=-1)  # [R]
                moved = (length > 0) & (deviation.norm(dim=-1) > 0)
                scales.append((dot / length**2)[moved])
                cosines.append((dot / length / deviation.norm(dim=-1))[moved])
        if cosines and len(torch.cat(cosines)):
            # Medians over rows: a token that a router sent elsewhere says nothing.
            scale, cosine = float(torch.cat(scales).median()), float(torch.cat(cosines).median())
            projections.append(Projection(scheme=scheme, scale=scale, cosine=cosine, size=max(sizes)[1]))
    return sorted(projections, key=lambda projection: -projection.cosine)


def smallest_change(target: ReplayTarget, ids: Tensor, index: int, error: float) -> float | None:
    """How far all weights must be from the target's, relative to each one's spread, to move tap ``index`` by the
    relative ``error``; None where the tap does not depend on them. Measured at one small change and scaled, since small
    changes act in proportion."""
    moved = target.run(ids, change=perturb_layer(_PROBE))[index]
    measured = median_error(row_errors(moved, target.taps(ids)[index]))
    return _PROBE * error / measured if measured > 0 else None
