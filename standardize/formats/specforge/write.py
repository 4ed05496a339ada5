"""Writes a standard dataset as SpecForge's offline trainer reads one.

Read in sgl-project/SpecForge at a6b6b023: scripts/prepare_hidden_states.py writes the files,
specforge/runtime/data_plane/offline_reader.py lists them in the order of their paths, and
specforge/algorithms/eagle3/data.py takes these keys::

    OUT/rows_0-2000/data_0.ckpt ...   input_ids int64 [T], loss_mask int64 [T],
                                      aux_hidden_state [1, T, A*H], hidden_state [1, T, H]
    OUT/vocab_mapping.pt              t2d bool [V], d2t int64 offsets [Vd]

``hidden_state`` is tap ``final``: their target head is lm_head alone. A dataset that keeps ``after:{L-1}`` is given the
target's norm on the way.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.dataset import Dataset
from eyas.standardize.formats.completed import is_complete, mark_complete
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL

if TYPE_CHECKING:
    from torch import Tensor

ROWS_A_FOLDER = 2000
VOCABULARY_FILE = "vocab_mapping.pt"


class SpecForgeFormatError(EyasError):
    """A dataset that SpecForge's layout cannot say, or a folder that holds something else."""


def write_dataset(
    dataset: Dataset,
    out: Path,
    sample_ids: Sequence[str],
    *,
    final_norm: Callable[[Tensor], Tensor],
    d2t: npt.NDArray[np.int64] | None = None,
    t2d: npt.NDArray[np.bool_] | None = None,
    written: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Write the samples named, a file each. Streams: one sample in memory at a time.

    final_norm: the target's, [T, H] -> [T, H], applied where the dataset keeps ``after:{L-1}``. d2t int64 [Vd] offsets
    and t2d bool [V]: the draft vocabulary, None where it is the target's. Called again with the same arguments, what
    is whole stays and the rest is written; a folder of other samples is refused. Raises SpecForgeFormatError.
    """
    import torch

    if dataset.identity.last_hidden is None:
        raise SpecForgeFormatError(f"{dataset.path} keeps no last_hidden, and SpecForge trains on it: capture it")
    if is_complete(out, dataset, sample_ids):
        return
    if out.is_dir() and any(not path.name.startswith(("rows_", ".")) for path in out.iterdir()):
        raise SpecForgeFormatError(f"{out} is not empty: give a new folder")
    for row, sample_id in enumerate(sample_ids):
        first = row // ROWS_A_FOLDER * ROWS_A_FOLDER
        path = out / f"rows_{first}-{first + ROWS_A_FOLDER}" / f"data_{row}.ckpt"
        sample = dataset.sample(sample_id)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            assert sample.last_hidden is not None
            final = sample.last_hidden if dataset.identity.last_hidden == FINAL else final_norm(sample.last_hidden)
            publish(
                path,
                _saved(
                    {
                        "input_ids": sample.input_ids.to(torch.int64),
                        "loss_mask": sample.loss_mask.to(torch.int64),
                        "aux_hidden_state": sample.features[None],  # [1, T, A*H]
                        "hidden_state": final[None],  # [1, T, H]
                    }
                ),
            )
        written(sample.num_tokens)
    if d2t is not None and t2d is not None:
        publish(out / VOCABULARY_FILE, _saved({"t2d": torch.from_numpy(t2d), "d2t": torch.from_numpy(d2t)}))
    mark_complete(out, dataset, sample_ids)


def _saved(tensors: dict[str, Tensor]) -> bytes:
    """As torch.save writes them; views of a shard are copied first, or the whole shard would be stored."""
    import torch

    buffer = io.BytesIO()
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, buffer)
    return buffer.getvalue()
