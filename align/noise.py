"""How far two honest runs of one target are apart, per tap: the noise every verdict of the replay is measured in.

Stored states came from other kernels, batches and parallel sums than the replay's, and 16-bit activations were rounded
in other places: in bfloat16 each token differs by 1 to 5 %, growing with depth. That is measured, not assumed: the
target is replayed once more with every module's output rounded stochastically to the stored dtype (a random neighbour:
the variance of one rounding more), and a tap's noise is the median over tokens of the relative L2 distance to the plain
replay. On SmolLM2-135M this gives 0.7 % (after:2) to 1.9 % (after:29), and real bfloat16 against float32 kernels 0.5 to
1.5 %: the model is 1.2 to 1.5 times the real thing. Routers of mixtures flip in it as they do between real kernels.

Bands, in multiples of a tap's noise: up to EXPLAINED a deviation is rounding; beyond EXCLUDED it is not, and something
is wrong; between them the verdict is "unknown" unless the deviation itself has a shape that can be named. EXCLUDED
times the noise is the detection floor of a change of weights that is not one of the known quantizations
(align/weights.py).

float32 activations may still have gone through TF32 matrix products, of 10 mantissa bits where bfloat16 has 7: their
EXPLAINED band is an eighth. Their EXCLUDED band is the same as bfloat16's, since states computed in bfloat16 are often
stored as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.align.logits import agree

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.align.forward import Replayed, ReplayTarget

EXPLAINED = 1.75
EXCLUDED = 4.0
STRAY_ERROR = 0.5  # of a row that cannot be the row it should be
NOISE_SAMPLES = 2
ENGINES_APART = 0.05  # relative L2 of a token's state, between two engines that run one target in 16 bits
STRAYS_OF_ROUTERS = 0.02  # share of tokens that one engine's routers send elsewhere than another's
_TF32_SHARE = 1 / 8


def row_errors(candidate: Tensor, reference: Tensor) -> Tensor:
    """Relative L2 distance of each row, [T, H] against [T, H] (or [n, T, H]): float32 [T] ([n, T]) on the CPU.

    NaN where a row is not finite; inf against a row of zeros.
    """
    import torch

    r = reference.float()
    distance = (candidate.to(r.device).float() - r).norm(dim=-1)
    error = distance / r.norm(dim=-1)
    return torch.where(distance == 0, distance, error).cpu()


def median_error(errors: Tensor, rows: Tensor | None = None) -> float:
    """Median over rows but the first (the attention sink, taps/match.py) of row_errors [T]; NaN where none counts."""
    kept = errors[1:] if rows is None else errors[1:][rows[1:]]
    kept = kept[~kept.isnan()]
    return float(kept.median()) if len(kept) else float("nan")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Per index of Replayed.all_taps, relative."""

    level: tuple[float, ...]
    tail: tuple[float, ...]  # that 95 % of tokens stay within
    strays: tuple[float, ...]  # share of tokens that even rounding throws far off: routers that choose other experts
    top1: float  # share of tokens whose argmax survives rounding
    lse: float  # and whose logsumexp does (align/logits.py)
    share: float  # of the level, up to which float32 or 16-bit states are explained

    def explained(self, index: int) -> float:
        """Errors up to this are rounding."""
        return EXPLAINED * self.share * self.level[index]

    def excluded(self, index: int) -> float:
        """Errors beyond this are not rounding."""
        return EXCLUDED * self.level[index]


def rounding_errors(target: ReplayTarget, ids: Tensor, dtype: str, seed: int) -> tuple[Tensor, Tensor]:
    """All taps of a replay rounded as states computed in ``dtype`` are, [L+2, T, H], and the row_errors of it from the
    plain one, [L+2, T]."""
    noisy = target.run(ids, rounding="float16" if dtype == "float16" else "bfloat16", seed=seed)
    return noisy, row_errors(noisy, target.taps(ids))


def assumed_noise(target: Replayed, samples: Sequence[Tensor], dtype: str) -> Noise:
    """Noise where the target cannot be run with other roundings, in a serving engine: the same band for every tap.

    Engines in 16 bits are 1 to 5 % apart per token, so that much is explained; but nothing is that is half as far as
    the nearest other tap, which deep in a large target may be close. samples: ids, int [T] each.
    """
    import torch

    nearest = torch.full((target.num_layers + 2,), torch.inf)
    for ids in samples:
        stack = target.taps(ids)  # [L+2, T, H]
        for index in range(len(stack)):
            for other in {max(index - 1, 0), min(index + 1, len(stack) - 1)} - {index}:
                distance = median_error(row_errors(stack[other], stack[index]))
                nearest[index] = min(float(nearest[index]), distance)
    level = [min(ENGINES_APART, 0.5 * float(distance)) / EXPLAINED for distance in nearest]
    strays = STRAYS_OF_ROUTERS if target.has_routers else 0.0
    return Noise(
        level=tuple(level),
        tail=tuple(2 * x for x in level),
        strays=(strays,) * len(level),
        top1=1.0,
        lse=1.0,
        share=_TF32_SHARE if dtype == "float32" else 1.0,
    )


def measure_noise(target: ReplayTarget, samples: Sequence[Tensor], dtype: str) -> Noise:
    """Noise of ``target`` for states computed in ``dtype``: the noisiest of ``samples`` (ids, int [T] each), or
    the upper quartile where there are more than NOISE_SAMPLES."""
    import torch

    levels, tails, strays, agreeing = [], [], [], []
    for seed, ids in enumerate(samples):
        noisy, errors = rounding_errors(target, ids, dtype, seed)
        kept = agree(target.head, target.taps(ids)[-1], *target.head.top1_and_lse(noisy[-1]))
        agreeing.append(torch.stack(kept).float().mean(1))
        tails.append(errors[:, 1:].nan_to_num(0).quantile(0.95, dim=1))  # [L+2]
        strays.append((errors[:, 1:] > STRAY_ERROR).float().mean(1))  # [L+2]
        levels.append(torch.tensor([median_error(tap) for tap in errors]))
    level = torch.stack(levels).nan_to_num(0).quantile(1.0 if len(samples) <= NOISE_SAMPLES else 0.75, dim=0)
    # Residual streams do not forget: a tap is as noisy as those before it, which few tokens may show less of.
    return Noise(
        level=(*torch.cummax(level[:-1], 0).values.tolist(), float(level[-1])),
        tail=tuple(torch.stack(tails).amax(0).tolist()),
        strays=tuple(torch.stack(strays).amax(0).tolist()),
        top1=float(min(both[0] for both in agreeing)),
        lse=float(min(both[1] for both in agreeing)),
        share=_TF32_SHARE if dtype == "float32" else 1.0,
    )
