"""A target that is replayed in a serving engine: where transformers cannot run it, or as the engine runs it.

The engine gives all taps of a sample and nothing else, so a replay in it finds what they show: which tap a slot is,
rows that are another token's or another sample's, what was scaled, permuted, cut or lost. Parts of layers,
quantizations and target statistics need the modules themselves, which transformers has. The noise is assumed
(align/noise.py), since an engine cannot be told to round otherwise.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from eyas.align.forward import Replayed
from eyas.align.verdict import Finding
from eyas.capture.engines import create_prober
from eyas.capture.engines.base import EngineSettings
from eyas.capture.engines.transformers.load import read_outline
from eyas.capture.errors import TargetError
from eyas.capture.self_test import check_workers_agree
from eyas.shards.sample import TokenSample
from eyas.shards.sample import sample_id as make_sample_id

if TYPE_CHECKING:
    from torch import Tensor


class ServedTarget(Replayed):
    """A target in vLLM or SGLang, all of whose taps are captured by eyas' own hooks. Used as a context manager."""

    def __init__(self, engine: str, settings: EngineSettings) -> None:
        """``settings.taps`` are all of the target's."""
        super().__init__()
        self.name = settings.target
        self.outline = read_outline(
            settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        self._settings = settings
        self._prober = create_prober(engine, settings)

    def __enter__(self) -> ServedTarget:
        """Start the engine. Raises TargetError, TapError or UsageError."""
        self._prober.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._prober.__exit__(kind, error, traceback)

    def run(self, ids: Tensor) -> Tensor:
        """One prefill: int [T] ids -> [L+2, T, H] in the engine's dtype, on the CPU."""
        import numpy as np
        import torch

        input_ids = ids.cpu().numpy().astype(np.int32)  # [T]
        longest = self._prober.max_positions
        if longest is not None and len(input_ids) > longest:
            raise TargetError(f"a sample of {len(input_ids)} tokens, and {self._prober.label} takes {longest} here")
        loss_mask = np.zeros(len(input_ids), dtype=np.uint8)
        sample = TokenSample(sample_id=make_sample_id(input_ids, loss_mask), input_ids=input_ids, loss_mask=loss_mask)
        workers = self._prober.probe([sample])
        check_workers_agree(self._prober.label, self._settings.dtype, workers)
        columns = workers[0][0].columns
        return torch.stack([columns[tap] for tap in self.all_taps])

    def finding(self, why: str) -> Finding:
        """Where the replay ran."""
        return Finding(
            check="replay",
            status="ok",
            found=f"ran in {self._prober.label}, {self._settings.dtype}, {why}. Looked at are the taps; parts of "
            f"layers, quantizations and target statistics only by a replay in transformers (--replay-in transformers)",
        )
