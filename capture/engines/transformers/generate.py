"""The target's own answers to batches of prompts.

Prompts are padded on the left, so that all samples of a batch append their next token in the same column; padding is
masked and positions are counted from each prompt's first token. A batch shrinks as its answers end.

Shapes: B samples, T tokens, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.capture.engines.base import Answer, EngineSettings, Prompt, Sampling, TakePrompts
from eyas.capture.engines.transformers.cache import cache_argument, new_cache
from eyas.capture.engines.transformers.engine import pick_device
from eyas.capture.engines.transformers.load import load_model, read_outline
from eyas.capture.errors import TargetError
from eyas.taps.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = {"cuda": 128, "cpu": 32}
PROMPT_TOKENS = {"cuda": 131_072, "cpu": 16_384}  # padded area of the prompts of one batch
SHRINK_SHARE = 0.75  # a batch is made smaller once no more than this share of it is still being answered
TOP_TOKENS = 512  # looked at for top-p before all V are sorted


class TransformersGenerator:
    """Generator of engine ``transformers`` (capture/engines/base.py says what a generator is)."""

    max_tokens = None

    def __init__(self, settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> None:
        self._settings = settings
        self._sampling = sampling
        self._batch_size = batch_size

    def __enter__(self) -> TransformersGenerator:
        """Loads the target. Raises TargetError."""
        settings = self._settings
        outline = read_outline(
            settings.target, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        self._device = pick_device(settings)
        self._model: Any = load_model(settings, outline, device=self._device)
        self._vocab_size = outline.vocab_size
        return self

    def __exit__(self, *exc: object) -> None:
        self._model = None

    def generate(self, take: TakePrompts, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Answer]]:
        """Answer batch after batch of what ``take`` gives; yields (number, answer) as each answer ends.

        Each prompt draws from random numbers of its own, so its answer depends on the other prompts by the rounding of
        the batched arithmetic alone. ``should_stop`` is asked after each token; once true what is unfinished is
        dropped. Raises TargetError where a batch does not fit the device's memory.
        """
        import torch

        kind = self._device.type
        while not should_stop() and (taken := take(self._batch_size or BATCH_SIZE[kind], PROMPT_TOKENS[kind])):
            try:
                for place, answer in self._generate([prompt for _, prompt in taken], should_stop):
                    yield taken[place][0], answer
            except torch.OutOfMemoryError as error:
                raise TargetError(
                    f"{len(taken)} answers at a time do not fit the memory of {self._device}: run again with "
                    f"--batch-size {max(1, len(taken) // 2)}; what is finished stays"
                ) from error

    def _generate(self, prompts: Sequence[Prompt], should_stop: Callable[[], bool]) -> Iterator[tuple[int, Answer]]:
        """Answer ``prompts`` as one batch; yields (place of the prompt, its answer)."""
        import torch

        device, sampling = self._device, self._sampling
        width, num_steps = max(len(p.input_ids) for p in prompts), max(p.max_new_tokens for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # [B, T]
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for n, prompt in enumerate(prompts):
            ids[n, width - len(prompt.input_ids) :] = torch.from_numpy(np.asarray(prompt.input_ids, np.int64))
            mask[n, width - len(prompt.input_ids) :] = 1
        uniform = np.stack([np.random.default_rng(p.seed).random(num_steps) for p in prompts])  # float64 [B, steps]
        numbers = list(range(len(prompts)))  # which prompt each row of the batch answers; -1 once it has
        tokens: list[list[int]] = [[] for _ in prompts]
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)  # [B, T]
        cache = {cache_argument(self._model): new_cache(self._model)}
        with torch.inference_mode():
            for step in range(num_steps):
                output = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **cache,
                )
                draws = torch.from_numpy(uniform[[max(n, 0) for n in numbers], step]).to(device)  # [B]
                chosen = choose(output.logits[:, -1, : self._vocab_size], draws, sampling)  # int64 [B]
                for row, token in enumerate(chosen.tolist()):
                    number = numbers[row]
                    if number < 0:
                        continue
                    tokens[number].append(token)
                    ended = token in sampling.stop_ids
                    if ended or len(tokens[number]) == prompts[number].max_new_tokens:
                        numbers[row] = -1
                        yield number, Answer(token_ids=tokens[number], finish="stop" if ended else "length")
                kept = [row for row, number in enumerate(numbers) if number >= 0]
                if not kept or should_stop():
                    return
                ids, positions = chosen[:, None], positions[:, -1:] + 1  # [B, 1]
                if len(kept) <= SHRINK_SHARE * len(numbers):
                    numbers = [numbers[row] for row in kept]
                    rows = torch.tensor(kept, device=device)
                    ids, positions, mask = ids[rows], positions[rows], mask[rows]
                    for held in cache.values():
                        held.batch_select_indices(rows)
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)  # [B, T + 1]


def check_generation(settings: EngineSettings) -> None:
    """Refuse what can be refused before anything loads. Raises UsageError."""
    for option, number in (("--tp", settings.tp), ("--dp", settings.dp)):
        if number > 1:
            raise UsageError(
                f"{option} {number} with --engine transformers: it answers in this process alone; vllm and sglang "
                "spread the target"
            )


def create_generator(settings: EngineSettings, sampling: Sampling, batch_size: int | None) -> TransformersGenerator:
    """The generator that ``settings`` describe."""
    return TransformersGenerator(settings, sampling, batch_size)


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each sample: int64 [B], from logits [B, V] and ``uniform`` in [0, 1), float64 [B].

    Temperature 0 is the argmax. Otherwise the inverse of the cumulative distribution of softmax(logits / temperature),
    most probable tokens first, restricted to the fewest whose probabilities reach top_p (nucleus sampling, Holtzman et
    al. 2020).
    """
    import torch

    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / sampling.temperature, -1)  # [B, V]
    count = logits.shape[-1]
    if sampling.top_p < 1 and count > TOP_TOKENS:
        top, ids = probabilities.topk(TOP_TOKENS)  # both [B, TOP_TOKENS], descending
        if bool((top.sum(-1) >= sampling.top_p).all()):
            return _inverse(top, ids, uniform, sampling.top_p)
    top, ids = probabilities.sort(-1, descending=True)
    return _inverse(top, ids, uniform, sampling.top_p)


def _inverse(top: Tensor, ids: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """The id where the cumulative probability passes ``uniform`` of the nucleus: int64 [B]."""
    cumulative = top.double().cumsum(-1)  # [B, n]
    # The nucleus ends with the token that makes the sum reach top_p.
    last = (cumulative < top_p).sum(-1, keepdim=True).clamp_max(top.shape[-1] - 1)  # [B, 1]
    mass = cumulative.gather(-1, last)
    place = (cumulative <= uniform[:, None] * mass).sum(-1, keepdim=True).minimum(last)
    return ids.gather(-1, place)[:, 0]
