"""Writes a dataset as vLLM's ExampleHiddenStatesConnector would have: ``OUT/{sample id}.safetensors``.

The slots are the taps in ascending depth; where the dataset keeps ``after:{L-1}``, it is the last slot (vLLM's id L).
There is no place for a loss mask: whoever reads this joins it by the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.hidden_states_file import states_tensors
from eyas.standardize.formats.safetensors_pieces import safetensors_pieces
from eyas.standardize.formats.slots import Slots
from eyas.taps.notation import FINAL

if TYPE_CHECKING:
    from torch import Tensor


class Writer:
    """Writes vLLM's layout (base.Writer), a file a sample. check() tells it the hidden size, so it comes first.

    final_norm, d2t, t2d: not needed. The memory of a thread's last sample is used again for its next one.
    """

    def __init__(
        self,
        *,
        final_norm: Callable[[Tensor], Tensor] | None = None,
        d2t: npt.NDArray[np.int64] | None = None,
        t2d: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._hidden_size = 0  # before check()
        self._threads = threading.local()

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError for taps that vLLM has no id for."""
        for what, tap in (*((f"tap {tap}", tap) for tap in identity.taps), ("last_hidden", identity.last_hidden)):
            if tap == FINAL:
                raise FormatError(
                    f"{what} is the output of the target's final norm, which vLLM never gives (its last id is the "
                    f"residual stream before it): leave it out first (eyas standardize --taps ... --last-hidden none)"
                )
        self._hidden_size = identity.hidden_size

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The file of one sample; its memory is this thread's until the next call."""
        assert self._hidden_size, "check() comes first"
        if not hasattr(self._threads, "slots"):
            self._threads.slots = Slots()
        states = self._threads.slots.stack(sample, self._hidden_size)
        return {f"{sample.sample_id}.safetensors": safetensors_pieces(states_tensors(states, sample.input_ids.numpy()))}

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """Nothing is of the whole set."""
