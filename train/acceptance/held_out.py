"""Acceptance on captured conversations: the training-time test on samples that were held out, without a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from eyas.shards.dataset import Dataset
from eyas.taps.errors import EyasError
from eyas.taps.notation import FINAL, format_taps
from eyas.train.acceptance.decoding import expected_length
from eyas.train.batches import pack
from eyas.train.draft_files import LoadedDraft
from eyas.train.loss import TargetHead
from eyas.train.metrics import STATISTICS, Acceptance
from eyas.train.reader import BatchReader, Job, default_threads
from eyas.train.rope import rotary_table
from eyas.train.samples import read_samples
from eyas.train.split import validation_mask
from eyas.train.target_parts import load_target_parts
from eyas.train.ttt import ttt_forward

BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What a draft would have accepted of a dataset's answers; lists have an entry per step."""

    num_samples: int
    num_rows: int  # positions judged at the first step
    acceptance: list[float]  # greedy, conditional: argmax equal, given that it was at all former steps
    accepted_length: float  # greedy, expected: tokens per target forward, the bonus token included
    overlap: list[float]  # sum min(p, q), the acceptance of speculative sampling at temperature 1, over all positions
    sampled_length: float  # expected from the overlaps, as if steps were independent
    out_of_vocabulary: float  # the target's mass outside the draft's vocabulary


def held_out_ids(dataset: Dataset, share: float) -> npt.NDArray[np.uint64]:
    """Ids of the samples that a run with --validation ``share`` never trains on; all where share is 0: ascending."""
    ids = np.unique(dataset.ledgers.stored_ids)
    return ids if share == 0 else ids[validation_mask(ids, share)]


def evaluate_held_out(
    draft: LoadedDraft,
    dataset: Dataset,
    ids: npt.NDArray[np.uint64],
    *,
    target: Path,
    num_steps: int,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, str], None] = lambda amount, note: None,
) -> HeldOut:
    """Unroll ``draft`` on samples ``ids`` (uint64 [n]) of ``dataset``. ``on_progress`` is told each batch's samples.

    Raises EyasError where the dataset's taps are not the draft's, or it holds no last hidden states.
    """
    identity = dataset.identity
    if identity.taps != draft.taps:
        raise EyasError(
            f"{dataset.path} holds {format_taps(identity.taps)}, and {draft.path} is fed {format_taps(draft.taps)}: "
            f"eyas standardize {dataset.path} STANDARD --taps {format_taps(draft.taps)}"
        )
    if identity.last_hidden is None:
        raise EyasError(f"{dataset.path} holds no last hidden states, from which the target's distribution follows")
    if not len(ids):
        raise EyasError(f"{dataset.path} holds no samples to evaluate on")
    table = read_samples(dataset)
    samples = np.flatnonzero(np.isin(table.ids, ids))
    batch_tokens = BATCH_TOKENS[device.type]
    plan = pack(samples, np.minimum(table.lengths[samples], batch_tokens), batch_tokens)
    kept = torch.from_numpy(draft.vocabulary.ids)
    parts = load_target_parts(target, dtype=dtype, device=device).as_captured(identity.target)
    head = TargetHead(
        parts=parts.rows(kept),
        ids=kept.to(device),
        last_hidden_is_final=identity.last_hidden == FINAL,
        full=None if identity.target_statistics else parts,
    )
    rotary = rotary_table(draft.model.shape, batch_tokens + num_steps, device)
    sums = torch.zeros(num_steps, len(STATISTICS), dtype=torch.float64)
    jobs = [Job(plan.samples(batch), batch) for batch in range(plan.num_batches)]
    with (
        torch.no_grad(),
        BatchReader(
            dataset,
            table,
            jobs,
            num_rows=batch_tokens,
            fixed=device.type == "cuda",
            device=device,
            dtype=dtype,
            num_steps=num_steps,
            threads=default_threads(),
        ) as reader,
    ):
        for read in reader:
            out = ttt_forward(draft.model, read.batch, head, rows=read.rows, rotary=rotary, num_steps=num_steps)
            found = [torch.stack([getattr(step, name) for name in STATISTICS]) for step in out.steps]
            sums += torch.stack(found).cpu().double()
            on_progress(len(plan.samples(read.tag)), f"{int(sums[0][1]):,} rows")
    acceptance = Acceptance.from_sums(sums.tolist(), [1.0] * num_steps)
    return HeldOut(
        num_samples=len(samples),
        num_rows=int(sums[0][STATISTICS.index("num_rows")]),
        acceptance=acceptance.acceptance,
        accepted_length=acceptance.accepted_length,
        overlap=acceptance.overlap,
        sampled_length=expected_length(acceptance.overlap),
        out_of_vocabulary=acceptance.out_of_vocabulary,
    )
