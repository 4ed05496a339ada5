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

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.dataset import Dataset
from eyas.standardize.formats.completed import is_complete, mark_complete
from eyas.taps.errors import EyasError
from eyas.taps.notation import after


class SpeculatorsFormatError(EyasError):
    """A dataset that speculators' layout cannot say, or a folder that holds something else."""


def check_writable(dataset: Dataset) -> None:
    """Raises SpeculatorsFormatError where their trainer would misread the data."""
    identity = dataset.identity
    last = after(identity.target.num_layers - 1)
    if identity.last_hidden != last:
        raise SpeculatorsFormatError(
            f"{dataset.path} keeps {identity.last_hidden or 'no last_hidden'}, and speculators wants {last} (it "
            f"applies the target's final norm itself; what is post-norm cannot be made pre-norm): capture with "
            f"--last-hidden {last}"
        )
    if identity.dtype == "float16":
        raise SpeculatorsFormatError(
            f"{dataset.path} is float16, which speculators does not train on: standardize it with --dtype bfloat16"
        )


def write_dataset(
    dataset: Dataset,
    out: Path,
    sample_ids: Sequence[str],
    *,
    d2t: npt.NDArray[np.int64] | None = None,
    t2d: npt.NDArray[np.bool_] | None = None,
    written: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Write the samples named, as rows in this order. Streams: one sample in memory at a time.

    Called again with the same arguments, what is whole stays and the rest is written; a folder of other samples is
    refused. d2t int64 [Vd] offsets and t2d bool [V]: the draft vocabulary, None where it is the target's. ``written``
    is told the tokens of each sample. Raises SpeculatorsFormatError and ShardError.
    """
    check_writable(dataset)
    if is_complete(out, dataset, sample_ids):
        return
    if out.is_dir() and not (out / "hidden_states").is_dir() and any(out.iterdir()):
        raise SpeculatorsFormatError(f"{out} is not empty: give a new folder")
    states = out / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    for row, sample_id in enumerate(sample_ids):
        written(_write_states(dataset, sample_id, states / f"hs_{row}.safetensors"))
    _write_tokens(dataset, out, sample_ids)
    if d2t is not None and t2d is not None:
        np.save(out / f"d2t-{len(d2t)}.npy", d2t)
        np.save(out / f"t2d-{len(d2t)}.npy", t2d)
    mark_complete(out, dataset, sample_ids)


def _write_states(dataset: Dataset, sample_id: str, path: Path) -> int:
    """One sample's file; returns its tokens. A whole file appears in one step, so one that is there is whole."""
    import torch
    from safetensors.torch import save

    sample = dataset.sample(sample_id)
    T, A, H = sample.num_tokens, len(dataset.identity.taps), dataset.identity.hidden_size
    if path.exists():
        return T
    assert sample.last_hidden is not None  # check_writable
    states_TSH = torch.empty(T, A + 1, H, dtype=sample.features.dtype)
    states_TSH[:, :A] = sample.features.view(T, A, H)
    states_TSH[:, A] = sample.last_hidden
    publish(path, save({"hidden_states": states_TSH, "token_ids": sample.input_ids.to(torch.int64)}))
    return T


def _write_tokens(dataset: Dataset, out: Path, sample_ids: Sequence[str]) -> None:
    """The Arrow dataset, streamed, with torch as its format, which their reader counts on."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    vector = datasets.Sequence(datasets.Value("int64"))
    columns = datasets.Features({"input_ids": vector, "loss_mask": vector, "seq_len": datasets.Value("int64")})
    temporary = out / ".tmp-tokens"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with ArrowWriter(path=str(temporary / "rows.arrow"), features=columns) as writer:
        for sample_id in sample_ids:
            sample = dataset.sample(sample_id)
            ids, mask = sample.input_ids.numpy(), sample.loss_mask.numpy()
            writer.write({"input_ids": ids, "loss_mask": mask, "seq_len": sample.num_tokens})
        writer.finalize()
    rows = datasets.Dataset.from_file(str(temporary / "rows.arrow")).with_format("torch")
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    rows.save_to_disk(str(temporary / "saved"))
    if shown:
        datasets.enable_progress_bars()
    for path in (temporary / "saved").iterdir():
        path.replace(out / path.name)
    shutil.rmtree(temporary)
