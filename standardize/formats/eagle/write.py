"""Writes a standard dataset as the trainer of EAGLE-1 and EAGLE-2 reads one.

Read in SafeAILab/EAGLE at cb7e0841, eagle/train/main.py (CustomDataset), which takes every file below its --tmpdir::

    OUT/data/0/data_0.ckpt ...   input_ids int64 [T], hidden_state [T, H], loss_mask int64 [T]

So --tmpdir is OUT/data: what else is in OUT would be read as samples. ``hidden_state`` is tap ``final``; a dataset that
keeps ``after:{L-1}`` is given the target's norm on the way. Other taps are not written: those drafts have none.

Mask: as it is, the way their own files have it. The trainer moves tokens and targets one to the left, but not the
mask: at position t the draft sees the state of t and the token t+1, learns the state of t+1, from which token t+2
follows, and the weight is mask[t], the last one set to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.torch_files import saved
from eyas.taps.notation import FINAL, format_taps

if TYPE_CHECKING:
    from torch import Tensor

DATA_FOLDER = "data"
ROWS_A_FOLDER = 2000


class Writer:
    """Writes EAGLE's layout (base.Writer). check() tells it what the dataset keeps, so it comes first.

    final_norm: the target's, [T, H] -> [T, H]. d2t and t2d: None, since these drafts have the target's vocabulary.
    """

    def __init__(
        self,
        *,
        final_norm: Callable[[Tensor], Tensor] | None = None,
        d2t: npt.NDArray[np.int64] | None = None,
        t2d: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._final_norm, self._has_vocabulary = final_norm, d2t is not None or t2d is not None
        self._final: Callable[[Sample], Tensor] | None = None  # a sample's tap final [T, H]; None before check()

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError where the trainer would misread the dataset, or it lacks what the format keeps."""
        if self._has_vocabulary:
            raise FormatError("EAGLE's drafts have the target's vocabulary: leave --draft-vocab-size out")
        final_norm = self._final_norm
        if FINAL in identity.taps:  # the last one, being the deepest
            self._final = lambda sample: sample.features[:, -identity.hidden_size :]
        elif identity.last_hidden == FINAL:
            self._final = lambda sample: _last_hidden(sample)
        elif identity.last_hidden is None:
            raise FormatError(
                f"the dataset keeps {format_taps(identity.taps)} and no last_hidden, and EAGLE trains on that alone: "
                f"capture with --last-hidden after:{identity.target.num_layers - 1}"
            )
        elif final_norm is None:
            raise FormatError(
                f"the dataset keeps {identity.last_hidden}, and EAGLE takes what it is given for final: give the "
                "target, whose norm is applied (--target DIR)"
            )
        else:
            self._final = lambda sample: final_norm(_last_hidden(sample)).to(sample.features.dtype)

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The file of one sample."""
        import torch

        assert self._final is not None, "check() comes first"
        contents = {
            "input_ids": sample.input_ids.to(torch.int64),
            "hidden_state": self._final(sample),  # [T, H]
            "loss_mask": sample.loss_mask.to(torch.int64),
        }
        return {f"{DATA_FOLDER}/{row // ROWS_A_FOLDER}/data_{row}.ckpt": [saved(contents)]}

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """Nothing: the samples are all that there is."""


def _last_hidden(sample: Sample) -> Tensor:
    assert sample.last_hidden is not None
    return sample.last_hidden
