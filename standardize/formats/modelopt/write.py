"""Writes a standard dataset as ModelOpt's offline training reads one.

Read in NVIDIA/Model-Optimizer at a2fbac7b: examples/speculative_decoding/eagle_utils.py takes every .pt below the
folder, modelopt/torch/speculative/eagle/utils.py (OfflineSupervisedDataset) their keys,
modelopt/torch/speculative/plugins/hf_eagle.py trains on them and loads the draft vocabulary::

    OUT/{sample_id}.pt           input_ids int64 [T], loss_mask int64 [T], aux_hidden_states [T, A*H],
                                 hidden_states [T, H], conversation_id, hidden_states_prenorm bool
    OUT/draft_vocab_cache.bin    d2t int64 offsets [Vd], for data.draft_vocab_cache; not .pt, or it were a sample

``hidden_states``: with the target's norm given, ``final``, which every release reads. Without it a dataset that keeps
``after:{L-1}`` is written as it is, with ``hidden_states_prenorm`` set: releases from 0.46 on then apply the norm
themselves, and earlier ones ignore the flag.

Mask: as it is, the way their own files have it; the trainer reads it with data.answer_only_loss alone, and else trains
on every token. At position t the draft sees the state of t and the token t+1, learns the teacher's row t+1, which is
the token t+2, and the weight is mask[t+1]: of each assistant turn the first token is left out, and the token that
follows is taken in, on their files and ours alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.modelopt.read import PRE_NORM
from eyas.standardize.formats.torch_files import saved
from eyas.taps.notation import FINAL, format_taps

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY_FILE = "draft_vocab_cache.bin"


class Writer:
    """Writes ModelOpt's layout (base.Writer). check() tells it what the dataset keeps, so it comes first.

    final_norm: the target's, [T, H] -> [T, H]. d2t int64 [Vd] offsets and t2d bool [V]: the draft vocabulary, None
    where it is the target's.
    """

    def __init__(
        self,
        *,
        final_norm: Callable[[Tensor], Tensor] | None = None,
        d2t: npt.NDArray[np.int64] | None = None,
        t2d: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._final_norm, self._d2t = final_norm, d2t  # t2d follows from d2t, and the trainer reads none
        self._is_final: bool | None = None  # whether last_hidden is tap final; None before check()

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError where the trainer would misread the dataset, or it lacks what the format keeps."""
        if identity.last_hidden is None:
            raise FormatError(
                "the dataset keeps no last_hidden, and ModelOpt trains on it: capture with --last-hidden "
                f"after:{identity.target.num_layers - 1}"
            )
        if any(tap.kind != "after" for tap in identity.taps):
            raise FormatError(
                f"the dataset's taps are {format_taps(identity.taps)}, and ModelOpt's drafts name theirs by layer "
                "numbers, which do not reach embed and final: pick others with eyas standardize DATASET OUT --taps ..."
            )
        self._is_final = identity.last_hidden == FINAL

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The file of one sample."""
        import torch

        assert self._is_final is not None, "check() comes first"
        assert sample.last_hidden is not None
        last_hidden = sample.last_hidden
        if not self._is_final and self._final_norm is not None:
            last_hidden = self._final_norm(last_hidden).to(last_hidden.dtype)
        contents = {
            "input_ids": sample.input_ids.to(torch.int64),
            "loss_mask": sample.loss_mask.to(torch.int64),
            "aux_hidden_states": sample.features,  # [T, A*H]
            "hidden_states": last_hidden,  # [T, H]
            "conversation_id": sample.sample_id,
            PRE_NORM: not self._is_final and self._final_norm is None,
        }
        return {f"{sample.sample_id}.pt": [saved(contents)]}

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """The draft vocabulary."""
        import torch

        if self._d2t is not None:
            publish(out / VOCABULARY_FILE, bytes(saved(torch.from_numpy(self._d2t))))
