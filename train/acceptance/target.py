"""The target as a speculative decoder runs it: one sequence, a cache that gives tokens back, the taps of every forward.

Shapes: n tokens of a forward, U taps, H hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.capture.engines.base import EngineSettings
from eyas.capture.engines.transformers.cache import cache_argument, new_cache
from eyas.capture.engines.transformers.engine import pick_device
from eyas.capture.engines.transformers.hooks import TapHooks
from eyas.capture.engines.transformers.load import load_model, read_outline
from eyas.capture.engines.transformers.locate import locate
from eyas.taps.notation import Tap


class RunningTarget:
    """A loaded target. ``taps``: what its forwards give, in this order."""

    def __init__(
        self,
        target: str,
        *,
        taps: Sequence[Tap],
        dtype: str | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """dtype None: the checkpoint's. Raises TargetError."""
        outline = read_outline(target, revision=revision, trust_remote_code=trust_remote_code)
        settings = EngineSettings(
            target=target,
            taps=tuple(taps),
            dtype=dtype or outline.dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        self.device = pick_device(settings)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.taps = tuple(taps)
        self.vocab_size = outline.vocab_size
        self.max_positions = outline.max_positions
        self._hidden_size = outline.hidden_size
        self._model: Any = load_model(settings, outline, device=self.device)
        self._hooks = TapHooks(locate(self._model, outline), self.taps)
        self._cache_argument = cache_argument(self._model)
        self.start()

    def start(self) -> None:
        """Forget the sequence."""
        self._cache = new_cache(self._model, croppable=True)
        self.num_tokens = 0  # cached

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Run ``token_ids`` behind the sequence: logits [n, V] (``last_only``: [1, V]) and taps [n, U, H]."""
        ids = torch.tensor([list(token_ids)], device=self.device)  # int64 [1, n]
        features = torch.empty(len(token_ids), len(self.taps), self._hidden_size, dtype=self.dtype, device=self.device)
        self._hooks.expect(None, [(tap, features[:, u]) for u, tap in enumerate(self.taps)])
        output = self._model(
            input_ids=ids, use_cache=True, logits_to_keep=int(last_only), **{self._cache_argument: self._cache}
        )
        self.num_tokens += len(token_ids)
        return output.logits[0, :, : self.vocab_size], features

    def crop(self, num_tokens: int) -> None:
        """Take back all but the first ``num_tokens`` of the sequence."""
        if num_tokens < self.num_tokens:
            self._cache.crop(num_tokens - self.num_tokens)
            self.num_tokens = num_tokens
