"""The engine ``transformers``: any causal language model of transformers, in this process.

Every rank of a launch builds the same engine and makes the same calls. Ranks of one tensor-parallel group run the same
batches and share the writing, since the residual stream is the same on all of them; groups are independent.

Shapes: B samples padded to T tokens, N real tokens of the samples this rank writes, K of a batch's tokens that are
followed by a training target, A taps, H hidden_size.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.base import (
    EngineSettings,
    Event,
    Forwarded,
    Rejected,
    Sink,
    TargetOutline,
    Work,
)
from eyas.capture.engines.transformers.batches import Batch, length_boundary, pad, plan_batches, real_rows
from eyas.capture.engines.transformers.hooks import TapHooks
from eyas.capture.engines.transformers.load import (
    HeadFacts,
    load_model,
    read_outline,
    target_identity,
    text_config,
)
from eyas.capture.engines.transformers.locate import TextStack, last_hidden_state, locate, probe_ids
from eyas.capture.engines.transformers.parallel import Ranks, check_tp
from eyas.capture.engines.transformers.statistics import TOLERANCES, Head, find_head, predicting_rows
from eyas.capture.errors import SelfTestError, TargetError
from eyas.capture.pump import CapturedBatch, Pump, whole
from eyas.shards.identity import TargetIdentity
from eyas.shards.sample import TokenSample
from eyas.taps.errors import EyasError
from eyas.taps.match import match_taps
from eyas.taps.notation import FINAL, Tap, after, all_taps, validate_taps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Per-token relative L2, median over the tokens (taps/match.py), between what is captured (batched, padded, from the
# text model alone) and transformers' own hidden_states (each sample alone, from the whole model).
TAP_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
SELF_TEST_SAMPLES = 4
# A GPU needs many tokens to be busy; on a CPU a batch should stay in cache (twice as fast on two cores).
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
SELF_TEST_TOKENS = 512  # of each sample


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A loaded target and this process's place in the launch."""

    model: Any
    stack: TextStack
    head: Head
    head_error: float  # of our logits against the model's own, on a probe
    hooks: TapHooks
    device: torch.device
    ranks: Ranks


class TransformersEngine:
    """Engine ``transformers`` (capture/engines/base.py says what an engine is)."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._running: _Running | None = None
        self._num_captures = 0

    def __enter__(self) -> TransformersEngine:
        """Join the launch and load the target.

        Raises TargetError or TapError: what can be refused from the configuration alone is, before anything loads.
        """
        settings = self._settings
        outline = self._outline
        check_settings(outline, settings)
        device = pick_device(settings)
        ranks = Ranks(settings.tp, device)
        try:
            model = load_model(settings, outline, device=device, quiet=ranks.rank != 0)
            stack = locate(model, outline)
            head, error = find_head(model, stack, outline)
            hooks = TapHooks(stack, [*settings.taps, *([settings.last_hidden] if settings.last_hidden else [])])
        except BaseException:
            ranks.leave(failed=True)
            raise
        self._running = _Running(
            model=model, stack=stack, head=head, head_error=error, hooks=hooks, device=device, ranks=ranks
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running = self._loaded
        self._running = None
        running.hooks.close()
        running.ranks.leave(failed=kind is not None)

    @cached_property
    def _outline(self) -> TargetOutline:
        settings = self._settings
        return read_outline(settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code)

    @property
    def _loaded(self) -> _Running:
        if self._running is None:
            raise RuntimeError("the engine is not entered: use it in a with statement")
        return self._running

    @cached_property
    def target(self) -> TargetIdentity:
        """What is being run, as dataset.json records it."""
        running, outline, settings = self._loaded, self._outline, self._settings
        head = HeadFacts.of(running.stack.final_norm, running.stack.lm_head)
        return target_identity(
            settings, outline, head, logit_scale=running.head.scale, logit_softcap=running.head.softcap
        )

    @property
    def _batch_tokens(self) -> int:
        return self._settings.batch_tokens or BATCH_TOKENS[self._loaded.device.type]

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens, that the target's positions allow; None where unlimited or unknown."""
        return self._outline.max_positions

    def self_test(self, probe: Sequence[TokenSample]) -> None:
        """Prove on up to four samples of ``probe`` (their first 512 tokens) that the taps asked for are captured.

        Captured the way ``capture`` does it, batched and padded, each tap must equal transformers' own hidden_states
        of each sample alone and be nearer to them than to those of any other depth; after:{L-1}, which transformers
        gives no one, must become ``final`` by the final norm. All ranks of a tensor-parallel group must agree, and
        with target statistics our logits must be the target's own. Raises SelfTestError.
        """
        running, settings = self._loaded, self._settings
        samples = self._usable_probe(probe)
        batch = self._forward(samples, range(len(samples)))
        columns = [(tap, batch.features[:, a]) for a, tap in enumerate(settings.taps)]  # each [N, H]
        if settings.last_hidden is not None and batch.last_hidden is not None:
            columns.append((settings.last_hidden, batch.last_hidden))
        self._check_ranks_agree(columns)
        reference = self._own_hidden_states(samples)  # L + 1 of [N, H]
        for tap, captured in columns:
            self._check_tap(tap, captured, reference)
        if settings.target_statistics and not running.head_error <= TOLERANCES[settings.dtype]:
            raise SelfTestError(
                f"target statistics: the logits of {type(running.model).__name__} are not "
                f"softcap(scale * lm_head(final)) in any way eyas knows (relative error {running.head_error:.2g}, "
                f"allowed {TOLERANCES[settings.dtype]:g}): capture without them, with --no-target-statistics"
            )

    def capture(self, work: Work, sink: Sink, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Capture ``work`` (see Engine.capture). Forwarded counts the samples that this rank writes."""
        running, settings, outline = self._loaded, self._settings, self._outline
        ranks = running.ranks
        self._num_captures += 1
        longest = self.max_positions or np.iinfo(np.int64).max
        fits = (work.lengths >= 1) & (work.lengths <= longest)
        if ranks.rank == 0:
            for row in work.rows[~fits]:
                sample = work.source[int(row)]
                yield Rejected(
                    sample_id=sample.sample_id,
                    reason=f"{sample.num_tokens} tokens, and the target's positions allow 1 to {longest}",
                )
        batches = plan_batches(
            work.rows[fits],
            work.lengths[fits],
            batch_tokens=self._batch_tokens,
            never_across=length_boundary(text_config(outline.config)),
        )
        written = np.zeros(ranks.tp, dtype=np.int64)  # tokens that each rank of the group was given to write
        with (
            sink.open(ranks.rank, self._metadata()) as writer,
            Pump(
                writer,
                taps=settings.taps,
                last_hidden=settings.last_hidden,
                device=running.device,
            ) as pump,
        ):
            counter = f"capture-{self._num_captures}" + (f"-of-{ranks.group}" if work.everywhere else "")
            while True:
                number = ranks.claim(counter, should_stop())
                if number is None or number >= len(batches):
                    break
                yield from self._capture_batch(work, batches[number], written, pump)
                yield from pump.events()
            yield from pump.finish()

    def _capture_batch(self, work: Work, batch: Batch, written: Any, pump: Pump) -> Iterator[Event]:
        """Run one batch and hand what this rank writes of it to ``pump``; in halves where it fails as a whole."""
        ranks = self._loaded.ranks
        samples = []
        for row in batch.rows:
            sample = work.source[int(row)]
            if reason := self._refusal(sample):
                if ranks.rank_in_group == 0:
                    yield Rejected(sample_id=sample.sample_id, reason=reason)
            else:
                samples.append(sample)
        waiting = [samples] if samples else []
        while waiting:
            part = waiting.pop()
            own = range(len(part)) if work.everywhere else _share(part, written)[ranks.rank_in_group]
            captured, failure = self._try_forward(part, own)
            if captured is None and len(part) > 1:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            elif captured is None:
                yield Rejected(sample_id=part[0].sample_id, reason=failure)
            elif captured.pieces:
                pump.put(captured)
                yield Forwarded(
                    num_samples=len(captured.pieces),
                    num_tokens=sum(piece.num_rows for piece in captured.pieces),
                )

    def _refusal(self, sample: TokenSample) -> str | None:
        """Why a sample must not go through the target. On CUDA an id out of range would end the process."""
        smallest, largest = int(sample.input_ids.min()), int(sample.input_ids.max())
        if smallest < 0 or largest >= self._outline.vocab_size:
            return (
                f"token id {smallest if smallest < 0 else largest} is outside the target's vocabulary of "
                f"{self._outline.vocab_size}"
            )
        return None

    def _try_forward(self, samples: Sequence[TokenSample], own: Sequence[int]) -> tuple[CapturedBatch | None, str]:
        """The captured batch, or None and why its forward failed.

        With tensor parallelism a failure ends the run: the other ranks may have failed at another collective or not at
        all, and going on could pair the wrong ones.
        """
        import torch

        running, settings = self._loaded, self._settings
        try:
            return self._forward(samples, own), ""
        except torch.OutOfMemoryError as error:
            if settings.tp > 1:
                raise TargetError(
                    f"out of memory on a batch of {len(samples)} samples, {samples[0].num_tokens} tokens the longest: "
                    f"use a smaller --batch-tokens than {self._batch_tokens}, or a larger --tp than {settings.tp}"
                ) from error
            failure = f"out of memory on {running.device}, alone in its batch, with {samples[0].num_tokens} tokens"
        except (torch.AcceleratorError, EyasError):
            raise  # the device's context is lost, or no sample is to blame
        except (RuntimeError, ValueError, IndexError) as error:
            if settings.tp > 1:
                raise
            failure = f"the target's forward failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        # Outside of the except clause, where the error's frames no longer hold the batch's memory.
        running.hooks.expect(None, ())
        if running.device.type == "cuda":
            torch.cuda.empty_cache()
        return None, failure

    def _forward(self, samples: Sequence[TokenSample], own: Sequence[int]) -> CapturedBatch:
        """Run ``samples`` together and keep the rows of samples ``own``, without waiting for the device."""
        import torch

        running, settings, outline = self._loaded, self._settings, self._outline
        device = running.device
        lengths = [sample.num_tokens for sample in samples]
        ids = pad(samples)  # [B, T]
        width = ids.shape[1]
        kept = real_rows(lengths, own, width)  # [N]
        with torch.inference_mode():
            everything = len(kept) == ids.numel()
            rows = None if everything else _to_device(kept, device)  # [N]
            wide = {"dtype": getattr(torch, settings.dtype), "device": device}
            features = torch.empty(len(kept), len(settings.taps), outline.hidden_size, **wide)  # [N, A, H]
            wanted: list[tuple[Tap, Tensor]] = [(tap, features[:, a]) for a, tap in enumerate(settings.taps)]
            last_hidden = None
            if settings.last_hidden is not None:
                last_hidden = torch.empty(len(kept), outline.hidden_size, **wide)  # [N, H]
                wanted.append((settings.last_hidden, last_hidden))
            running.hooks.expect(rows, wanted)
            output = running.stack.text_model(input_ids=_to_device(ids.numpy(), device), use_cache=False)
            if missing := running.hooks.missing():
                raise TargetError(f"a forward did not reach {', '.join(map(str, missing))}")
            top1 = lse = None
            if settings.target_statistics:
                final = last_hidden_state(output).flatten(0, 1)  # [B*T, H]
                top1, lse = self._target_statistics(final, samples, own, width)
        return CapturedBatch(
            pieces=whole([samples[n] for n in own]),
            features=features,
            last_hidden=last_hidden,
            target_top1=top1,
            target_lse=lse,
        )

    def _target_statistics(
        self, final: Tensor, samples: Sequence[TokenSample], own: Sequence[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """target_top1 int32 [N] and target_lse float32 [N] of samples ``own``.

        lm_head may be split over the ranks of a group, so each of them takes part for all samples of the batch.
        """
        import torch

        predicting = [predicting_rows(sample.loss_mask) for sample in samples]
        num_rows = sum(samples[n].num_tokens for n in own)
        top1 = torch.full((num_rows,), -1, dtype=torch.int32, device=final.device)
        lse = torch.full((num_rows,), float("nan"), dtype=torch.float32, device=final.device)
        starts = np.cumsum([0, *(len(rows) for rows in predicting)])
        if starts[-1] == 0:
            return top1, lse
        asked = np.concatenate([n * width + rows for n, rows in enumerate(predicting)])  # [K] of B*T
        all_top1, all_lse = self._loaded.head.top1_and_lse(final.index_select(0, _to_device(asked, final.device)))
        if len(own):
            begins = np.cumsum([0, *(samples[n].num_tokens for n in own)])
            place = np.concatenate([begin + predicting[n] for begin, n in zip(begins, own, strict=False)])
            source = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in own])
            places, sources = _to_device(place, final.device), _to_device(source, final.device)
            top1.index_copy_(0, places, all_top1.index_select(0, sources))
            lse.index_copy_(0, places, all_lse.index_select(0, sources))
        return top1, lse

    def _own_hidden_states(self, samples: Sequence[TokenSample]) -> list[Tensor]:
        """transformers' hidden_states of each sample alone, back to back: L + 1 of [N, H]."""
        import torch

        running, outline = self._loaded, self._outline
        alone = []
        for sample in samples:
            with torch.inference_mode():
                output = running.model(
                    input_ids=_to_device(pad([sample]).numpy(), running.device),
                    use_cache=False,
                    output_hidden_states=True,
                )
            states = output.hidden_states
            if states is None or len(states) != outline.num_layers + 1:
                raise SelfTestError(
                    f"{type(running.model).__name__} gives {0 if states is None else len(states)} hidden_states, "
                    f"expected {outline.num_layers + 1}: what is captured cannot be verified"
                )
            alone.append([state[0] for state in states])
        return [torch.cat(states) for states in zip(*alone, strict=True)]

    def _check_tap(self, tap: Tap, captured: Tensor, reference: Sequence[Tensor]) -> None:
        import torch

        num_layers = self._outline.num_layers
        # hidden_states has every tap but after:{L-1}, in whose place it has final.
        taps = [other for other in all_taps(num_layers) if other != after(num_layers - 1)]
        expected, shown = tap, str(tap)
        if tap not in taps:
            expected, shown = FINAL, f"the final norm of {tap}"
            with torch.inference_mode():
                captured = self._loaded.stack.final_norm(captured.unsqueeze(0))[0]  # [N, H]
        match = match_taps(captured, reference, taps)
        if match.num_tokens == 0:
            raise SelfTestError(
                f"every token of the probe has NaN or Inf in the target's own hidden states with --dtype "
                f"{self._settings.dtype}: are its weights whole? float16 overflows on many targets, bfloat16 does not"
            )
        error, tolerance = match.errors[taps.index(expected)], TAP_TOLERANCES[self._settings.dtype]
        if match.best != expected or not error <= tolerance:
            raise SelfTestError(
                f"{shown} is not what transformers gives as {expected}: relative error {error:.2g}, allowed "
                f"{tolerance:g}; the nearest is {match.best} with {match.best_error:.2g}"
            )

    def _check_ranks_agree(self, columns: Sequence[tuple[Tap, Tensor]]) -> None:
        ranks = self._loaded.ranks
        for tap, captured in columns:
            first, *others = ranks.gather(captured)
            for rank, other in enumerate(others, start=1):
                differs = (other.float() - first.float()).norm(dim=-1) / first.float().norm(dim=-1)  # [N]
                error = float(differs.nanmedian())
                if not error <= TAP_TOLERANCES[self._settings.dtype]:
                    raise SelfTestError(
                        f"--tp {ranks.tp}: {tap} differs between rank 0 and rank {rank} of a group (relative error "
                        f"{error:.2g}): this target's plan leaves it in parts. Use --tp 1"
                    )

    def _usable_probe(self, probe: Sequence[TokenSample]) -> list[TokenSample]:
        """The first tokens of the first samples that may go through the target; a few ids where there are none."""
        longest = min(SELF_TEST_TOKENS, self.max_positions or SELF_TEST_TOKENS)
        usable = [_head(sample, longest) for sample in probe if sample.num_tokens > 1 and not self._refusal(sample)]
        if not usable:
            ids = probe_ids(self._outline, "cpu")[0].numpy().astype(np.int32)  # [T]
            usable = [TokenSample(sample_id="", input_ids=ids, loss_mask=np.ones(len(ids), dtype=np.uint8))]
        return usable[:SELF_TEST_SAMPLES]

    def _metadata(self) -> dict[str, str]:
        """What made a shard, for its header: what may differ between workers of one dataset."""
        import torch
        import transformers

        running = self._loaded
        on_cuda = running.device.type == "cuda"
        return {
            "engine": "transformers",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(running.device) if on_cuda else platform.machine(),
            "attention": str(getattr(text_config(running.model.config), "_attn_implementation", None)),
            "tp": str(running.ranks.tp),
            "world_size": str(running.ranks.world_size),
            "batch_tokens": str(self._batch_tokens),
            "host": platform.node(),
        }


def check_settings(outline: TargetOutline, settings: EngineSettings) -> None:
    """Refuse what can be refused from the configuration alone. Raises TargetError or TapError."""
    validate_taps(settings.taps, outline.num_layers)
    check_tp(outline.config, settings.tp)


def create_engine(settings: EngineSettings) -> TransformersEngine:
    """The engine that ``settings`` describe."""
    return TransformersEngine(settings)


def pick_device(settings: EngineSettings) -> torch.device:
    """This process's device. Raises TargetError where it cannot be had."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise TargetError("--device cuda: torch finds no CUDA device here")
    if settings.device == "cpu" or not available:
        if settings.tp > 1 and available:
            raise TargetError(
                f"--device cpu with --tp {settings.tp}: transformers spreads a target over the GPUs it sees; "
                f"hide them with CUDA_VISIBLE_DEVICES="
            )
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise TargetError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()} here; start fewer processes"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _to_device(array: Any, device: torch.device) -> Tensor:
    """A NumPy array as a tensor on ``device``, without waiting for the device."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _share(samples: Sequence[TokenSample], written: Any) -> list[list[int]]:
    """Which samples each rank of a group writes, so that all write about as many tokens. Adds them to ``written``."""
    shares: list[list[int]] = [[] for _ in written]
    for n, sample in enumerate(samples):
        rank = int(written.argmin())
        shares[rank].append(n)
        written[rank] += sample.num_tokens
    return shares


def _head(sample: TokenSample, num_tokens: int) -> TokenSample:
    return replace(sample, input_ids=sample.input_ids[:num_tokens], loss_mask=sample.loss_mask[:num_tokens])
