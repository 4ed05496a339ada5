"""vLLM with a draft, as it serves one: ``speculative_config`` with method eagle3 and the draft's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from eyas.align.live import CannotFeed, LiveEngine, LiveStates
from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.vllm.engine import LEARNING_TOKENS, add_request
from eyas.capture.engines.vllm.load import check_options, installed_version, start
from eyas.capture.errors import TargetError
from eyas.shards.sample import TokenSample
from eyas.taps.errors import EyasError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

# Model runner V2 of 0.24 looks for a draft's weights whatever draft_load_config says. V1, which reads layer ids alike,
# and V2 of this release make random ones (v1/worker/gpu/spec_decode/eagle/utils.py). Those between were not looked at.
V2_LOADS_DRAFTS_BY_CONFIG = Version("0.32")
WORKER_EXTENSION = "eyas.align.live.vllm_worker.LiveExtension"


class LiveVllm:
    """vLLM, started and hooked."""

    def __init__(self, engine: LLMEngine, settings: EngineSettings, *, runner: str, has_weights: bool) -> None:
        self._engine = engine
        self._settings = settings
        self._num_requests = 0
        self.release = installed_version()
        self.label = f"vllm {self.release}, model runner {runner}"
        self.path = "It served the draft (method eagle3); the slots are what its proposer gave the draft's fc."
        if not has_weights:
            self.path += " The draft's folder has no weights: random ones were loaded, which change nothing here."

    @property
    def max_tokens(self) -> int:
        config = self._engine.vllm_config
        return int(min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len - 2))

    def states(self, sample: TokenSample) -> LiveStates:
        self._engine.collective_rpc("eyas_live_expect", args=(sample,))
        self._run([int(token) for token in sample.input_ids])
        fed, features = self._engine.collective_rpc("eyas_live_taken")[0]
        if features is None or fed is None:
            raise TargetError(
                f"vLLM fed its draft nothing for a prompt of {sample.num_tokens} tokens: the forward was split, or "
                f"this draft does not take hidden states"
            )
        width = features.shape[2]
        if len(fed) != sample.num_tokens or fed.shape[1] % width:
            raise TargetError(
                f"vLLM fed its draft {list(fed.shape)} for {sample.num_tokens} tokens of width {width}: not one row of "
                f"whole taps for each token"
            )
        return LiveStates(
            slots=fed.view(len(fed), -1, width).unbind(1),
            taps=dict(zip(self._settings.taps, features.unbind(1), strict=True)),
        )

    def _run(self, ids: list[int]) -> None:
        self._num_requests += 1
        add_request(self._engine, f"live-{self._num_requests}", ids, {})
        try:
            while self._engine.has_unfinished_requests():
                self._engine.step()
        except EyasError:
            raise
        except Exception as error:
            # Layer ids that it never reaches give fewer slots than the draft's fc has inputs for, and so on.
            raise CannotFeed(f"it fails on a prompt: {type(error).__name__}: {error}") from error


@contextmanager
def open_live(settings: EngineSettings, outline: TargetOutline, draft: Path) -> Iterator[LiveEngine]:
    """Start vLLM on the target with ``draft``, which may be a config alone."""
    installed_version()
    check_options(settings.engine_options)
    has_weights = any(draft.glob("*.safetensors")) or any(draft.glob("*.bin"))
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(draft.absolute()), "num_speculative_tokens": 1}
    if not has_weights:
        speculative["draft_load_config"] = {"load_format": "dummy"}
    engine = start(
        settings,
        outline,
        draft=speculative,
        any_runner=has_weights or Version(installed_version()) >= V2_LOADS_DRAFTS_BY_CONFIG,
        worker_extension=WORKER_EXTENSION,
    )
    try:
        arguments = (settings.taps, outline.num_layers, outline.hidden_size, settings.dtype)
        runner = engine.collective_rpc("eyas_live_install", args=arguments)[0]
        live = LiveVllm(engine, settings, runner=runner, has_weights=has_weights)
        live._run([n % outline.vocab_size for n in range(LEARNING_TOKENS)])
        yield live
    finally:
        engine.engine_core.shutdown()
