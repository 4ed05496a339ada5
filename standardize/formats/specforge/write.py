"""Writes a standard dataset as SpecForge's offline trainer reads one.

Read in sgl-project/SpecForge at a6b6b023: scripts/prepare_hidden_states.py names the files,
specforge/runtime/data_plane/offline_reader.py lists them in the order of their paths, and
specforge/algorithms/eagle3/data.py takes these keys and no other::

    OUT/rows_0-2000/data_0.ckpt ...          input_ids int64 [T], loss_mask int64 [T],
                                             aux_hidden_state [1, T, 3H], hidden_state [1, T, H];
                                             num_tokens int64 [], which only eyas reads (read.py, Length)
    OUT/vocab_mapping/vocab_mapping.pt       t2d bool [V], d2t int64 offsets [Vd]

``hidden_state`` is tap ``final``: their target head (specforge/modeling/target/target_head.py) is lm_head alone. A
dataset that keeps ``after:{L-1}`` is given the target's norm on the way. Their draft (modeling/draft/llama3_eagle.py)
takes three taps, and names them by layer numbers, which do not reach ``embed`` and ``final``.

Mask: as it is, the way their own files have it. The trainer (algorithms/eagle3/model.py with TargetHead.preprocess)
moves tokens and teacher rows one to the left, but not the mask: at position t the draft sees the state of t and the
token t+1, learns the teacher's row t+1, which is the token t+2, and the weight is mask[t], the last one set to 0. So of
each assistant turn it leaves out the first two tokens and takes in the two that follow, on their files and ours alike.
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
from eyas.standardize.formats.specforge.read import NUM_TOKENS
from eyas.standardize.formats.torch_files import saved
from eyas.taps.notation import FINAL, format_taps

if TYPE_CHECKING:
    from torch import Tensor

ROWS_A_FOLDER = 2000
NUM_TAPS = 3
VOCABULARY_FILE = "vocab_mapping/vocab_mapping.pt"


class Writer:
    """Writes SpecForge's layout (base.Writer). check() tells it what the dataset keeps, so it comes first.

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
        self._final_norm, self._d2t, self._t2d = final_norm, d2t, t2d
        self._is_final: bool | None = None  # whether last_hidden is tap final; None before check()

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError where the trainer would misread the dataset, or it lacks what the format keeps."""
        if identity.last_hidden is None:
            raise FormatError(
                "the dataset keeps no last_hidden, and SpecForge trains on it: capture with --last-hidden "
                f"after:{identity.target.num_layers - 1}"
            )
        if identity.last_hidden != FINAL and self._final_norm is None:
            raise FormatError(
                f"the dataset keeps {identity.last_hidden}, and SpecForge takes what it is given for final: give the "
                "target, whose norm is applied (--target DIR)"
            )
        if len(identity.taps) != NUM_TAPS or any(tap.kind != "after" for tap in identity.taps):
            raise FormatError(
                f"the dataset's taps are {format_taps(identity.taps)}, and SpecForge's drafts have {NUM_TAPS}, each "
                "after some layer: pick them with eyas standardize DATASET OUT --taps ..."
            )
        self._is_final = identity.last_hidden == FINAL

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The file of one sample."""
        import torch

        assert self._is_final is not None, "check() comes first"
        assert sample.last_hidden is not None
        final = sample.last_hidden
        if not self._is_final:
            assert self._final_norm is not None
            final = self._final_norm(final).to(final.dtype)
        contents = {
            "input_ids": sample.input_ids.to(torch.int64),
            "loss_mask": sample.loss_mask.to(torch.int64),
            "aux_hidden_state": sample.features[None],  # [1, T, A*H]
            "hidden_state": final[None],  # [1, T, H]
            NUM_TOKENS: torch.tensor(sample.num_tokens),
        }
        first = row // ROWS_A_FOLDER * ROWS_A_FOLDER
        return {f"rows_{first}-{first + ROWS_A_FOLDER}/data_{row}.ckpt": [saved(contents)]}

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """The draft vocabulary."""
        import torch

        if self._d2t is not None and self._t2d is not None:
            path = out / VOCABULARY_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            maps = {"t2d": torch.from_numpy(self._t2d), "d2t": torch.from_numpy(self._d2t)}
            publish(path, bytes(saved(maps)))
