"""What runs inside vLLM's worker for the live check: mixed into its worker class (``worker_extension_cls``).

What the draft is fed is what vLLM's proposer hands to the draft's ``combine_hidden_states``, the input of its fc: in
both model runners the concatenation of the target's aux hidden states (v1/spec_decode/llm_base_proposer.py and
v1/worker/gpu/spec_decode in vLLM 0.32.0; the same in 0.24.0). It is taken there. Every tap of the same forward comes
from the hooks of the capture, which know nothing of vLLM's own layer ids.

One request runs at a time, so that the rows of a forward are its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eyas.capture.engines.vllm.hooks import ScheduledPiece, StepHooks, Wanted
from eyas.capture.engines.vllm.locate import locate
from eyas.capture.errors import TargetError
from eyas.capture.pump import CapturedBatch, Piece

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.shards.sample import TokenSample
    from eyas.taps.notation import Tap


class LiveExtension:
    """Methods of vLLM's worker, on every rank."""

    def eyas_live_install(self, taps: tuple[Tap, ...], num_layers: int, hidden_size: int, dtype: str) -> str:
        """Hook the target and the draft; the next forward teaches the hooks. Gives the name of the model runner."""
        self._eyas_live = _Live(self, taps, num_layers, hidden_size, dtype)
        return self._eyas_live.runner_name

    def eyas_live_expect(self, sample: TokenSample) -> None:
        """The next forward is of ``sample``, whole."""
        self._eyas_live.expect(sample)

    def eyas_live_taken(self) -> tuple[Tensor | None, Tensor | None]:
        """What the draft was fed, [T, A*H], and all taps, [T, L+2, H], on the CPU; None for what did not come."""
        return self._eyas_live.taken()


class _Live:
    def __init__(self, worker: Any, taps: tuple[Tap, ...], num_layers: int, hidden_size: int, dtype: str) -> None:
        import torch

        runner: Any = worker.model_runner
        self.runner_name = "V2" if ".gpu.model_runner" in type(runner).__module__ else "V1"
        self._sample: TokenSample | None = None
        self._fed: list[Tensor] = []
        self._features: Tensor | None = None
        wanted = Wanted(
            taps=taps,
            last_hidden=None,
            target_statistics=False,
            dtype=getattr(torch, dtype),
            hidden_size=hidden_size,
        )
        hooks = StepHooks(locate(runner.get_model(), num_layers), wanted, schedule=self._schedule, take=self._take_taps)
        hooks.learn()
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        draft = getattr(proposer, "model", None)
        combine = getattr(draft, "combine_hidden_states", None)
        if draft is None or combine is None:
            raise TargetError(
                f"vLLM's {type(proposer).__name__} has no draft that combines hidden states: --draft is no EAGLE-3 "
                f"draft for vLLM"
            )

        def combine_and_keep(hidden_states: Tensor) -> Any:
            self._take_fed(hidden_states)
            return combine(hidden_states)

        draft.combine_hidden_states = combine_and_keep

    def expect(self, sample: TokenSample) -> None:
        self._sample, self._fed, self._features = sample, [], None

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        fed = self._fed[0] if self._fed else None
        features = self._features
        self._sample, self._fed, self._features = None, [], None
        return fed, features

    def _schedule(self) -> list[ScheduledPiece] | None:
        if self._sample is None or self._features is not None:
            return None
        piece = Piece(sample=self._sample, begin=0, num_rows=self._sample.num_tokens)
        return [ScheduledPiece(piece=piece, start=0, is_own=True)]

    def _take_taps(self, batch: CapturedBatch) -> None:
        import numpy as np

        sample = batch.pieces[0].sample
        if batch.input_ids is not None and not np.array_equal(batch.input_ids.cpu().numpy(), sample.input_ids):
            raise TargetError("vLLM's forward does not hold the tokens that it was given: a fault of eyas")
        self._features = batch.features.cpu()

    def _take_fed(self, hidden_states: Tensor) -> None:
        """hidden_states: [T or more, A*H], of the forward that was just captured."""
        if self._sample is not None and self._features is not None and not self._fed:
            self._fed.append(hidden_states[: self._sample.num_tokens].detach().cpu().clone())
