"""How many tokens to draft: what a cycle costs against what it gives.

A cycle of n drafted tokens costs verify(n) + n * draft and gives 1 + a0 + a0 a1 + ... + a0 .. a(n-1) tokens. Where the
target is large the verify is nearly all of a cycle (21 to 28 ms of it in the case that eyas was written for, where two
steps gave 94 tokens/s and three 88.8), so a step pays only while what it adds is worth what its row adds to the verify.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.train.acceptance.decode import Chooser
from eyas.train.acceptance.decoding import expected_length
from eyas.train.acceptance.drafters import Drafter
from eyas.train.acceptance.target import RunningTarget

CONTEXT_TOKENS = 512  # cached while costs are measured
REPEATS = 7  # of which the median counts


@dataclass(frozen=True)
class Costs:
    """Milliseconds, of batch 1."""

    verify_ms: dict[int, float]  # of a forward of n + 1 tokens, by n
    draft_ms: float  # of one draft step


@dataclass(frozen=True)
class StepChoice:
    """One number of drafted tokens."""

    steps: int
    accepted_length: float
    verify_ms: float
    draft_ms: float  # of all steps
    tokens_per_second: float

    @property
    def verify_share(self) -> float:
        """Of the cycle."""
        return self.verify_ms / (self.verify_ms + self.draft_ms)


def choose_steps(steps: Sequence[int], acceptance: Sequence[float], costs: Costs) -> list[StepChoice]:
    """A choice for each number of ``steps``, each at most len(acceptance), of conditional acceptances."""
    choices = []
    for n in steps:
        length = expected_length(acceptance[:n])
        verify, draft = costs.verify_ms[n], n * costs.draft_ms
        choices.append(StepChoice(n, length, verify, draft, 1000 * length / (verify + draft)))
    return choices


def best_choice(choices: Sequence[StepChoice]) -> StepChoice:
    """The fastest; of equals the fewest steps."""
    return max(choices, key=lambda choice: (choice.tokens_per_second, -choice.steps))


def measure_costs(target: RunningTarget, drafter: Drafter, steps: Sequence[int]) -> Costs:
    """Time verifies and draft steps on this machine, behind CONTEXT_TOKENS tokens."""
    context = min(CONTEXT_TOKENS, (target.max_positions or CONTEXT_TOKENS) - max(steps) - 2)
    ids = [n % target.vocab_size for n in range(context)]
    columns = [target.taps.index(tap) for tap in drafter.taps]
    greedy = Chooser(0.0, 0, target.device)

    def now() -> float:
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter()

    target.start()
    _, features = target.forward(ids, last_only=True)
    verify_ms = {}
    for n in steps:
        taken = []
        for _ in range(REPEATS):
            begun = now()
            target.forward(ids[: n + 1])
            target.crop(context)
            taken.append(now() - begun)
        verify_ms[n] = 1000 * statistics.median(taken)
    drafter.start()
    chosen = features[:, columns].flatten(1)
    next_ids = torch.tensor([*ids[1:], ids[0]], device=target.device)
    drafter.extend(next_ids, chosen)
    taken = []
    for _ in range(REPEATS):
        begun = now()
        drafter.extend(next_ids[-1:], chosen[-1:])
        drafter.propose(max(steps), greedy)
        taken.append((now() - begun) / max(steps))
    return Costs(verify_ms, 1000 * statistics.median(taken))
