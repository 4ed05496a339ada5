"""SGLang with the EAGLE-3 capture that it serves a draft with, and without the draft's own forward.

Which layers are captured is read from the draft's config by the function that a serving SGLang calls for it
(``resolve_spec_aux_hidden_state_config``); the target is then told these ids in the same way
(``set_eagle3_layers_to_capture``) by SGLang's official capture without a draft (``--enable-return-aux-hidden-states``),
and what a draft would be handed comes back in the answer (``return_hidden_states``). A draft's forward changes none of
this, and needs kernels that SGLang has on GPUs only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.align.live import CannotFeed, LiveEngine, LiveStates
from eyas.capture.engines.base import EngineSettings, TargetOutline
from eyas.capture.engines.sglang.engine import SglangEngine
from eyas.capture.engines.sglang.load import check_options, installed_version, server_arguments
from eyas.capture.errors import TargetError
from eyas.shards.sample import TokenSample

CAPTURE_WITHOUT_DRAFT = "enable_return_aux_hidden_states"


class LiveSglang:
    """SGLang, started and hooked."""

    def __init__(self, engine: SglangEngine, settings: EngineSettings, ids: list[int] | None) -> None:
        self._engine = engine
        self._settings = settings
        self.release = installed_version()
        self.label = f"sglang {self.release}"
        read = f"layer ids {ids}" if ids is not None else "no layer ids, so the target's default"
        self.path = (
            f"It read the draft's config as it does to serve it ({read}), and captured these layers by "
            f"--enable-return-aux-hidden-states; the slots are what it answered. The draft itself did not run."
        )

    @property
    def max_tokens(self) -> int:
        return self._engine.max_positions

    def states(self, sample: TokenSample) -> LiveStates:
        import torch

        probed, answer = self._engine.serve(sample)
        rows = [row for part in answer or [] for row in part if isinstance(row, list)]  # of chunks, back to back
        fed = torch.tensor(rows[: sample.num_tokens], dtype=getattr(torch, self._settings.dtype))  # [T, A*H]
        width = next(iter(probed.columns.values())).shape[1]
        if len(fed) != sample.num_tokens or fed.shape[1] % width:
            raise TargetError(
                f"SGLang answered hidden states of {list(fed.shape)} for {sample.num_tokens} tokens of width {width}: "
                f"not one row of whole taps for each token"
            )
        return LiveStates(slots=fed.view(len(fed), -1, width).unbind(1), taps=probed.columns)


@contextmanager
def open_live(settings: EngineSettings, outline: TargetOutline, draft: Path) -> Iterator[LiveEngine]:
    """Start SGLang on the target with the ids that it reads in ``draft``'s config; weights are not needed."""
    release = installed_version()
    check_options(settings.engine_options)
    from sglang.srt.server_args import ServerArgs

    if CAPTURE_WITHOUT_DRAFT not in inspect.signature(ServerArgs).parameters:
        raise TargetError(
            f"--engine-live sglang: SGLang {release} has no --enable-return-aux-hidden-states, by which it is asked: "
            f"pip install 'sglang>=0.5.23'"
        )
    ids = _ids_as_served(settings, outline, draft)
    serving: dict[str, Any] = {
        CAPTURE_WITHOUT_DRAFT: True,
        "speculative_algorithm": "EAGLE3",
        "return_aux_hidden_state_layer_ids": ids,
    }
    with SglangEngine(settings, from_layers=True, serving=serving) as engine:
        yield LiveSglang(engine, settings, ids)


def _ids_as_served(settings: EngineSettings, outline: TargetOutline, draft: Path) -> list[int] | None:
    """The layer ids that a serving SGLang takes from the draft's config; None: it names none."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.runtime_context import create_context, use_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft.absolute()),
        "context_length": None,
    }
    arguments = server_arguments(settings, outline, asked)
    try:
        with use_context(create_context(arguments, role="scheduler")):
            resolved = resolve_spec_aux_hidden_state_config(
                server_args=arguments,
                model_config=ModelConfig.from_server_args(arguments),
                spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"),
                is_draft_worker=False,
            )
    except (ValueError, AssertionError, OSError, KeyError, TypeError) as error:
        raise TargetError(f"--draft {draft}: SGLang does not serve it: {error}") from error
    if not resolved.eagle_use_aux_hidden_state:
        raise CannotFeed("eagle_config.use_aux_hidden_state is false: it is fed the last hidden state alone")
    ids = resolved.eagle_aux_hidden_state_layer_ids
    if ids is None:
        return None
    wrong = [k for k in ids if not isinstance(k, int) or not 0 <= k < outline.num_layers]
    if wrong or len(set(ids)) < len(ids) or not ids:
        raise CannotFeed(f"layer ids {ids}: expected different ones from 0 to {outline.num_layers - 1}")
    return list(ids)
