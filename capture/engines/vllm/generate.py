"""The target's own answers from vLLM, in this process: token ids in, token ids out.

Whatever makes serving fast is left to vLLM (prefix caching, CUDA graphs, compilation, asynchronous scheduling). It
holds more prompts than it answers at a time, and each answer that ends makes room for the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from eyas.capture.endpoints.dialects import seed_of
from eyas.capture.engines.base import Answer, EngineSettings, Prompt, Refused, Sampling, TakePrompts
from eyas.capture.engines.vllm.load import (
    DECIDED,
    Rules,
    check_options,
    installed_version,
    launch,
    parse_options,
    set_environment,
)
from eyas.capture.errors import TargetError
from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

# Prompts that vLLM holds, for each one it answers at a time: one that ends is followed without a word from here.
HELD_SHARE = 1.5

_SEVERAL = "eyas drives one engine: for several copies run servers and give each as --endpoint"
_RULES = Rules(
    command="regenerate",
    decided=DECIDED,
    refused={
        "data_parallel_size": _SEVERAL,
        "nnodes": "for a target over several nodes run a server and give it as --endpoint",
        "runner": "the target generates",
        "skip_tokenizer_init": "eyas gives tokens",
    },
)


class VllmGenerator:
    """Generator of engine ``vllm`` (capture/engines/base.py says what a generator is)."""

    def __init__(self, settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> None:
        self._settings = settings
        self._sampling = sampling
        self._batch_size = batch_size
        self._engine: LLMEngine | None = None

    def __enter__(self) -> VllmGenerator:
        """Start vLLM with the target. Raises TargetError or UsageError."""
        check_generation(self._settings)
        set_environment()
        self._engine = launch(parse_options(self._settings, _RULES))
        return self

    def __exit__(self, *exc: object) -> None:
        engine, self._engine = self._vllm, None
        engine.engine_core.shutdown()

    @property
    def _vllm(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the generator is not entered: use it in a with statement")
        return self._engine

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer, in tokens (--max-model-len)."""
        return int(self._vllm.vllm_config.model_config.max_model_len)

    def generate(self, take: TakePrompts, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Answer | Refused]]:
        """Answer what ``take`` gives (see Generator.generate)."""
        engine = self._vllm
        most = self._batch_size or int(HELD_SHARE * engine.vllm_config.scheduler_config.max_num_seqs)
        held: set[str] = set()
        while not should_stop():
            refused = []
            for number, prompt in take(most - len(held)) if len(held) < most else ():
                try:
                    self._add(str(number), prompt)
                except ValueError as error:  # vLLM's word for a request that it cannot take
                    refused.append((number, Refused(reason=f"vLLM: {error}")))
                else:
                    held.add(str(number))
            yield from refused
            if not held and not refused:
                return
            try:
                finished = [output for output in engine.step() if output.finished]
            except Exception as error:
                if should_stop():  # a signal to the whole process group ends vLLM's workers as well
                    return
                raise TargetError(
                    f"vLLM failed: {type(error).__name__}: {error}. What is finished stays: run the same command "
                    "again to go on"
                ) from error
            for output in finished:
                held.discard(output.request_id)
                yield int(output.request_id), _answer(output)

    def _add(self, name: str, prompt: Prompt) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, engine = self._sampling, self._vllm
        greedy = sampling.temperature == 0
        parameters = SamplingParams(
            max_tokens=prompt.max_new_tokens,
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            seed=None if greedy else seed_of(prompt),
            stop_token_ids=sorted(sampling.stop_ids),
            ignore_eos=True,  # the stop ids are all that end an answer
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        (rendered,) = engine.renderer.render_cmpl([{"prompt_token_ids": prompt.input_ids.tolist()}])
        engine.add_request(name, rendered, parameters)


def check_generation(settings: EngineSettings) -> None:
    """Refuse what can be refused before anything loads. Raises TargetError or UsageError."""
    check_options(settings.engine_options, _RULES)
    if settings.dp > 1:
        raise UsageError(f"--dp {settings.dp} with --engine vllm: {_SEVERAL}")
    if settings.device != "auto":
        raise UsageError(f"--device {settings.device} with --engine vllm: vLLM's build decides where it runs")
    installed_version()


def create_generator(settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> VllmGenerator:
    """The generator that ``settings`` describe."""
    return VllmGenerator(settings, sampling, batch_size)


def _answer(output: Any) -> Answer | Refused:
    (completion,) = output.outputs
    reason = completion.finish_reason
    if reason not in ("stop", "length"):
        return Refused(reason=f"vLLM: finish reason {reason}")
    return Answer(token_ids=list(completion.token_ids), finish=reason)
