"""The self-test of engines other than transformers: what they capture, compared with transformers and across workers.

A serving engine in 16 bits differs from transformers by 1 to 5 % per token, single channels reach 25 000, and token 0
is an attention sink, so that a test of the largest error picks wrong layers. The test here is taps/match.py's: the
median over tokens of the relative L2 distance, to every tap of the target, token 0 left out.

Shapes: T tokens of a sample, N tokens of all samples of the probe, L layers, H hidden_size.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.errors import SelfTestError, TargetError
from eyas.shards.sample import TokenSample
from eyas.taps.match import MAX_ERROR, MIN_MARGIN, match_taps
from eyas.taps.notation import Tap, all_taps

if TYPE_CHECKING:
    from torch import Tensor

PROBE_SAMPLES = 4
PROBE_TOKENS = 512  # of each sample
# Relative L2 distance allowed, median over tokens: between an engine and transformers, and between workers of one
# engine. Small float32 targets agree to 1e-6 on a CPU; a GPU's kernels may multiply float32 in TF32, which is 1e-3.
TOLERANCES = {"float32": 1e-3, "float16": MAX_ERROR, "bfloat16": MAX_ERROR}
RANK_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Of target_lse, in nats: the median over tokens.
LSE_TOLERANCES = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
MEMORY_FOR_WEIGHTS = 0.8  # share of the memory that is free


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes for the samples of a probe, each alone, on the CPU."""

    taps: tuple[Tap, ...]  # embed, after:0 ... after:L-1, final
    states: Sequence[Sequence[Tensor]]  # per sample, per tap: [T, H]
    lse: Sequence[Tensor]  # per sample: float32 [T], logsumexp of the full-vocabulary logits of every row


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What one worker captured of one sample of the probe, on the CPU."""

    columns: Mapping[Tap, Tensor]  # every tap asked for, last_hidden's among them: [T, H]
    target_lse: Tensor | None  # float32 [T], NaN where unset


def usable_probe(probe: Sequence[TokenSample], outline: TargetOutline) -> list[TokenSample]:
    """The first tokens of the first few samples that may go through the target; made-up ids where there are none."""
    longest = min(PROBE_TOKENS, outline.max_positions or PROBE_TOKENS)
    usable = [
        replace(sample, input_ids=sample.input_ids[:longest], loss_mask=sample.loss_mask[:longest])
        for sample in probe
        if sample.num_tokens > 1 and sample.input_ids.min() >= 0 and sample.input_ids.max() < outline.vocab_size
    ]
    if not usable:
        ids = np.arange(min(8, outline.vocab_size, longest), dtype=np.int32)[::-1].copy()  # [T]
        usable = [TokenSample(sample_id="", input_ids=ids, loss_mask=np.ones(len(ids), dtype=np.uint8))]
    return usable[:PROBE_SAMPLES]


def read_reference(
    settings: EngineSettings, outline: TargetOutline, samples: Sequence[TokenSample]
) -> tuple[Reference | None, str]:
    """transformers' own tensors of ``samples``, on the CPU in ``settings.dtype``; else None and why there are none.

    There are none where the weights do not fit into this machine's free memory, or transformers cannot load them.
    """
    import torch

    from eyas.capture.engines.transformers.hooks import TapHooks
    from eyas.capture.engines.transformers.load import load_model, num_weight_bytes
    from eyas.capture.engines.transformers.locate import last_hidden_state, locate
    from eyas.capture.engines.transformers.statistics import find_head

    needed, free = num_weight_bytes(settings.target, settings.revision), _free_bytes()
    if needed > MEMORY_FOR_WEIGHTS * free:
        return None, f"its weights take {needed / 2**30:.0f} GiB and {free / 2**30:.0f} GiB of memory are free"
    alone = replace(settings, tp=1, engine_options=())
    try:
        model = load_model(alone, outline, device=torch.device("cpu"), quiet=True)
        stack = locate(model, outline)
        head, _ = find_head(model, stack, outline)
    except TargetError as error:
        return None, f"transformers does not run it: {error}"
    taps = all_taps(outline.num_layers)
    states, lse = [], []
    hooks = TapHooks(stack, taps)
    with torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)  # [1, T]
            wide = torch.empty(len(taps), sample.num_tokens, outline.hidden_size, dtype=getattr(torch, settings.dtype))
            hooks.expect(None, list(zip(taps, wide, strict=True)))
            final = last_hidden_state(stack.text_model(input_ids=ids, use_cache=False))[0]  # [T, H]
            states.append(list(wide))
            lse.append(head.top1_and_lse(final)[1])
    hooks.close()
    del model, stack, head, hooks
    gc.collect()
    return Reference(taps=taps, states=states, lse=lse), ""


def check_taps(engine: str, dtype: str, captured: Sequence[Probed], reference: Reference) -> None:
    """Prove that every captured column is the tap it is called. ``captured`` is one worker's, sample by sample.

    Of all taps of the target the one asked for must be the nearest, within TOLERANCES and by match_taps' margin; where
    target_lse is captured, it must be transformers' too. Raises SelfTestError.
    """
    for tap in captured[0].columns:
        # match_taps leaves out row 0 of what it is given: of the other samples row 0 is cut off here.
        column = join_samples([sample.columns[tap] for sample in captured])
        states = [join_samples([sample[t] for sample in reference.states]) for t in range(len(reference.taps))]
        match = match_taps(column, states, reference.taps)
        if match.num_tokens == 0:
            raise SelfTestError(
                f"every token of the probe has NaN or Inf, in {engine} or in transformers, with --dtype {dtype}: are "
                f"the target's weights whole? float16 overflows on many targets, bfloat16 does not"
            )
        error = match.errors[reference.taps.index(tap)]
        if match.best != tap or not error <= TOLERANCES[dtype]:
            raise SelfTestError(
                f"what {engine} gives as {tap} is not transformers' {tap}: relative error {error:.2g}, allowed "
                f"{TOLERANCES[dtype]:g}; the nearest is {match.best} with {match.best_error:.2g}. Nothing was written"
            )
        if not match.margin >= MIN_MARGIN:
            raise SelfTestError(
                f"what {engine} gives as {tap} cannot be told from {match.runner_up}: relative errors "
                f"{match.best_error:.2g} and {match.runner_up_error:.2g}. Nothing was written"
            )
    _check_lse(engine, dtype, captured, reference)


def check_workers_agree(engine: str, dtype: str, captured: Sequence[Sequence[Probed]]) -> None:
    """Prove that all workers captured the same of the same samples. ``captured``: per worker, sample by sample.

    A tap that one worker holds only a part of (an all-reduce that is deferred) differs between them. Raises
    SelfTestError.
    """
    first, *others = captured
    for rank, other in enumerate(others, start=1):
        for tap in first[0].columns:
            theirs = join_samples([sample.columns[tap] for sample in other]).float()  # [N, H]
            ours = join_samples([sample.columns[tap] for sample in first]).float()  # [N, H]
            differs = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)  # [N]
            error = float(differs.nanmedian())
            if not error <= RANK_TOLERANCES[dtype]:
                raise SelfTestError(
                    f"{tap} differs between worker 0 and worker {rank} of {engine} (relative error {error:.2g}): each "
                    f"of them holds a part of it there. Nothing was written; use --tp 1"
                )


def _check_lse(engine: str, dtype: str, captured: Sequence[Probed], reference: Reference) -> None:
    import torch

    differs = [
        (sample.target_lse - lse).abs()
        for sample, lse in zip(captured, reference.lse, strict=True)
        if sample.target_lse is not None
    ]
    if not differs:
        return
    found = torch.cat(differs)  # [N], NaN where unset
    if bool(found.isnan().all()):
        return
    error = float(found.nanmedian())
    if not error <= LSE_TOLERANCES[dtype]:
        raise SelfTestError(
            f"target statistics: the logits of {engine} are not transformers': their logsumexp differs by {error:.2g}, "
            f"allowed {LSE_TOLERANCES[dtype]:g}. Capture without them, with --no-target-statistics"
        )


def join_samples(parts: Sequence[Tensor]) -> Tensor:
    """[T, H] of several samples back to back, row 0 of all but the first one left out."""
    import torch

    return torch.cat([parts[0], *(part[1:] for part in parts[1:])])


def _free_bytes() -> int:
    """Of this machine's memory, without swapping (Linux)."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62  # unknown: try it
