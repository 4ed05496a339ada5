"""Writes a standard dataset as speculators' trainer reads one (speculators 0.9.0, speculators/train/data.py).

::

    OUT/                                what --data-path names
      data-*.arrow, state.json, ...     a `datasets` folder: input_ids, loss_mask, seq_len; row n is sample n
      hidden_states/hs_{n}.safetensors  hidden_states [T, A+1, H], token_ids int64 [T]
      d2t-{Vd}.npy, t2d-{Vd}.npy        the draft vocabulary: int64 offsets, bool

The last slot of ``hidden_states`` is the residual stream after the last layer: their trainer applies the target's
final norm itself, so a dataset that keeps ``final`` cannot be given to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import TEMPORARY_PREFIX, publish
from eyas.shards.dataset import Dataset
from eyas.shards.identity import DatasetIdentity
from eyas.shards.sample import Sample
from eyas.standardize.formats.base import FormatError
from eyas.standardize.formats.hidden_states_file import states_tensors
from eyas.standardize.formats.safetensors_pieces import safetensors_pieces
from eyas.standardize.formats.slots import Slots
from eyas.standardize.formats.speculators.detect import STATES_FOLDER
from eyas.taps.notation import after

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_A_BATCH = 1000  # of Arrow, as `datasets` has it


class Writer:
    """Writes speculators' layout (base.Writer): a file of hidden states a sample, then the Arrow dataset.

    final_norm: not needed. d2t int64 [Vd] offsets and t2d bool [V]: the draft vocabulary, None where it is the
    target's. The memory of a thread's last sample is used again for its next one.
    """

    def __init__(
        self,
        *,
        final_norm: Callable[[Tensor], Tensor] | None = None,
        d2t: npt.NDArray[np.int64] | None = None,
        t2d: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._d2t, self._t2d = d2t, t2d
        self._threads = threading.local()

    def check(self, identity: DatasetIdentity) -> None:
        """Raises FormatError where their trainer would misread the data."""
        last = after(identity.target.num_layers - 1)
        if identity.last_hidden != last:
            raise FormatError(
                f"the dataset keeps {identity.last_hidden or 'no last_hidden'}, and speculators wants {last} (it "
                f"applies the target's final norm itself; what is post-norm cannot be made pre-norm): capture with "
                f"--last-hidden {last}"
            )
        if identity.dtype == "float16":
            raise FormatError(
                "the dataset is float16, which speculators does not train on: standardize it with --dtype bfloat16"
            )

    def files(self, row: int, sample: Sample) -> Mapping[str, Sequence[bytes | memoryview]]:
        """The file of one row; its memory is this thread's until the next call."""
        assert sample.last_hidden is not None  # check()
        if not hasattr(self._threads, "slots"):
            self._threads.slots = Slots()
        states = self._threads.slots.stack(sample, sample.last_hidden.shape[1])
        tensors = states_tensors(states, sample.input_ids.numpy())
        return {f"{STATES_FOLDER}/hs_{row}.safetensors": safetensors_pieces(tensors)}

    def finish(self, out: Path, dataset: Dataset, sample_ids: Sequence[str]) -> None:
        """The Arrow dataset, streamed, and the vocabulary."""
        _write_tokens(dataset, out, sample_ids)
        if self._d2t is not None and self._t2d is not None:
            np.save(out / f"d2t-{len(self._d2t)}.npy", self._d2t)
            np.save(out / f"t2d-{len(self._d2t)}.npy", self._t2d)


def _write_tokens(dataset: Dataset, out: Path, sample_ids: Sequence[str]) -> None:
    """As Dataset.save_to_disk of `datasets` writes it, with torch as its format, which their reader counts on."""
    import pyarrow as pa
    from datasets import DatasetInfo, Features

    vector = pa.list_(pa.int64())
    schema = pa.schema({"input_ids": vector, "loss_mask": vector, "seq_len": pa.int64()})
    name = "data-00000-of-00001.arrow"
    temporary = out / f"{TEMPORARY_PREFIX}{name}"
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(sample_ids), _ROWS_A_BATCH):
            samples = [dataset.sample(sample_id) for sample_id in sample_ids[start : start + _ROWS_A_BATCH]]
            lengths = np.array([sample.num_tokens for sample in samples], dtype=np.int64)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            columns = [
                pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), pa.int64()))
                for values in (
                    [sample.input_ids.numpy().astype(np.int64) for sample in samples],
                    [sample.loss_mask.numpy().astype(np.int64) for sample in samples],
                )
            ]
            stream.write_batch(pa.record_batch([*columns, pa.array(lengths)], schema=schema))
    _fsync(temporary)
    temporary.replace(out / name)
    DatasetInfo(features=Features.from_arrow_schema(schema)).write_to_directory(str(out))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name}],
        "_fingerprint": hashlib.blake2b("".join(sample_ids).encode(), digest_size=8).hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    publish(out / "state.json", json.dumps(state, indent=2).encode())


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
