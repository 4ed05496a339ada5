"""What turns a captured sample into one of a standard dataset: which tensors, in which order, in which dtype.

Shapes: T tokens, A taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eyas.shards.identity import DatasetIdentity
from eyas.shards.ledger import SealedShard
from eyas.shards.sample import Sample
from eyas.taps.errors import EyasError
from eyas.taps.notation import Tap, format_taps

if TYPE_CHECKING:
    from torch import Tensor


# Halfway between float16's largest value, 65504, and the next step of its grid: from here on values round to infinity.
_FLOAT16_INFINITE_FROM = 65520.0


class NotCapturedError(EyasError):
    """A tap was asked for that the captured dataset does not hold."""


class OverflowRefusedError(EyasError):
    """A finite captured value is infinite in the dtype asked for."""


def standard_identity(
    source: DatasetIdentity,
    *,
    taps: Sequence[Tap],
    last_hidden: Tap | None,
    dtype: str,
    codec: str,
    where: str,
) -> DatasetIdentity:
    """The dataset.json of the standard dataset with these ``taps``, made from ``source``.

    Every tensor that was captured may be asked for as either: a tap that is there only as ``last_hidden`` can become
    one of the features' taps, and the other way round. ``where`` names the source in messages.
    Raises NotCapturedError, TapError (order, repeats, range) and IdentityError (dtype with codec).
    """
    identity = replace(
        source, stage="standard", taps=tuple(taps), last_hidden=last_hidden, dtype=dtype, codec=codec
    )  # validates the taps against the target first: a tap that does not exist cannot be captured either
    captured = {*source.taps, source.last_hidden} - {None}
    missing = [tap for tap in (*taps, last_hidden) if tap is not None and tap not in captured]
    if missing:
        also = f", and {source.last_hidden} as last_hidden" if source.last_hidden is not None else ""
        # An engine captures what it is asked for in one pass, so the union costs one more capture, not two.
        needed = format_taps(sorted({*source.taps, *taps}))
        keep = f" --last-hidden {last_hidden}" if last_hidden in missing else ""
        raise NotCapturedError(
            f"{where}: {format_taps(missing)} {'was' if len(missing) == 1 else 'were'} not captured; captured were "
            f"{format_taps(source.taps)}{also}. Capture what is missing into a new folder: "
            f"eyas capture PREPARED OUT --target {source.target.name} --taps {needed}{keep}"
        )
    return identity


def same_bytes(source: DatasetIdentity, identity: DatasetIdentity) -> bool:
    """Whether a shard of ``source`` is, byte for byte, a shard of ``identity``."""
    return replace(source, stage=identity.stage) == identity


def refuse_overflow(source: DatasetIdentity, identity: DatasetIdentity, entry: SealedShard, where: str) -> None:
    """Refuse from ``entry``'s statistics, before anything is read, what would be infinite in float16.

    Raises OverflowRefusedError, naming the shard (``where``) and the tap.
    """
    if identity.dtype != "float16" or source.dtype == "float16":
        return
    for tap in (*identity.taps, *([identity.last_hidden] if identity.last_hidden is not None else [])):
        max_abs = entry.statistics[str(tap) if tap in source.taps else "last_hidden"]["max_abs"]
        if max_abs >= _FLOAT16_INFINITE_FROM:
            raise OverflowRefusedError(_overflow_message(f"{where}: tap {tap}", max_abs, source.dtype, "float16"))


@dataclass(frozen=True)
class Converter:
    """Picks, orders and casts. Built once a run; convert() is called for each sample from several threads."""

    source: DatasetIdentity
    identity: DatasetIdentity

    def convert(self, sample: Sample, where: str) -> Sample:
        """One sample in the standard dataset's taps and dtype. The tensors of ``sample`` are only read.

        Raises OverflowRefusedError, naming ``where``, the sample and the tap, where a finite value would become
        infinite.
        """
        import torch

        T, H = sample.num_tokens, self.source.hidden_size
        dtype: torch.dtype = getattr(torch, self.identity.dtype)
        features_TAH = sample.features.view(T, len(self.source.taps), H)
        captured = {tap: features_TAH[:, slot] for slot, tap in enumerate(self.source.taps)}  # each [T, H]
        if self.source.last_hidden is not None and sample.last_hidden is not None:
            captured.setdefault(self.source.last_hidden, sample.last_hidden)
        chosen_TAH = torch.empty(T, len(self.identity.taps), H, dtype=dtype)
        for slot, tap in enumerate(self.identity.taps):
            self._cast(captured[tap], chosen_TAH[:, slot], f"{where}: sample {sample.sample_id}, tap {tap}")
        last_hidden = None
        if self.identity.last_hidden is not None:
            last_hidden = torch.empty(T, H, dtype=dtype)
            label = f"{where}: sample {sample.sample_id}, last_hidden {self.identity.last_hidden}"
            self._cast(captured[self.identity.last_hidden], last_hidden, label)
        return replace(sample, features=chosen_TAH.view(T, -1), last_hidden=last_hidden)

    def _cast(self, values_TH: Tensor, out_TH: Tensor, label: str) -> None:
        import torch

        out_TH.copy_(values_TH)  # rounds to nearest even
        if self.identity.dtype == self.source.dtype or self.identity.dtype == "float32":
            return
        overflowed = torch.isinf(out_TH) & torch.isfinite(values_TH)
        if overflowed.any():
            max_abs = float(values_TH[overflowed].abs().max())
            raise OverflowRefusedError(_overflow_message(label, max_abs, self.source.dtype, self.identity.dtype))


def _overflow_message(label: str, max_abs: float, source_dtype: str, dtype: str) -> str:
    keep = f"keep {source_dtype} (leave --dtype out)"
    instead = keep if source_dtype == "float32" else f"{keep}, or use --dtype float32"
    return f"{label} reaches {max_abs:g}, which is infinite in {dtype}: {instead}"
