"""Several drafters over many prompts with one target: accepted lengths, speeds, and whether greedy output is plain's.

Each turn is answered plainly once, which is also what later turns of its conversation see, and by each drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from eyas.taps.errors import EyasError
from eyas.train.acceptance.decode import Best, Chooser, Decoded, decode_plain, decode_speculative, prompt
from eyas.train.acceptance.drafters import Drafter
from eyas.train.acceptance.prompts import Prompts, Turn
from eyas.train.acceptance.target import RunningTarget


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where greedy output left that of plain decoding: everything before is the same."""

    prompt: int
    turn: int
    position: int  # in the answer
    plain: int  # token ids
    drafted: int
    gap: float | None  # between the two in plain decoding's logits; None: ``drafted`` is not among the best there


@dataclass
class Tally:
    """What one drafter did."""

    name: str
    num_draft: int
    num_tokens: int = 0  # given by the target's forwards, the prompts' own left out
    num_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    reached: list[int] = field(default_factory=list)  # [N]
    accepted: list[int] = field(default_factory=list)  # [N]
    categories: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens and forwards
    num_turns: int = 0
    num_identical: int = 0  # turns whose greedy output is plain's, token for token
    differences: list[Difference] = field(default_factory=list)
    rounding: float = 0.0  # largest difference of a best token's logit between the two, where both chose it

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0] * self.num_draft, [0] * self.num_draft

    @property
    def accepted_length(self) -> float:
        """Tokens per target forward, the bonus token included."""
        return self.num_tokens / max(self.num_forwards, 1)

    @property
    def acceptance(self) -> list[float]:
        """[N], conditional: of the proposals whose predecessors were all accepted."""
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.draft_seconds + self.verify_seconds, 1e-9)

    @property
    def unexplained(self) -> list[Difference]:
        """Differences that rounding cannot have made: the two logits were further apart than two roundings."""
        return [d for d in self.differences if d.gap is None or d.gap > 2 * self.rounding]

    def add(self, turn: Turn, decoded: Decoded) -> None:
        self.num_turns += 1
        self.num_tokens += decoded.num_tokens
        self.num_forwards += decoded.num_forwards
        self.draft_seconds += decoded.draft_seconds
        self.verify_seconds += decoded.verify_seconds
        for n in range(self.num_draft):
            self.reached[n] += decoded.reached[n]
            self.accepted[n] += decoded.accepted[n]
        tokens, forwards = self.categories.get(turn.category, (0, 0))
        self.categories[turn.category] = (tokens + decoded.num_tokens, forwards + decoded.num_forwards)

    def compare(self, turn: Turn, plain: Decoded, decoded: Decoded) -> None:
        """Prove greedy output against plain decoding's."""
        pairs = list(zip(plain.token_ids, decoded.token_ids, strict=False))
        apart = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        same = len(pairs) if apart is None else apart
        for ours, theirs in zip(plain.best[: same - 1], decoded.best[: same - 1], strict=True):
            self.rounding = max(self.rounding, abs(ours.logits[0] - theirs.logits[0]))
        if apart is None:
            self.num_identical += len(plain.token_ids) == len(decoded.token_ids)
            return
        best: Best = plain.best[apart - 1]  # the first token is the prompt's own, the same for both
        drafted = decoded.token_ids[apart]
        rank = best.token_ids.index(drafted) if drafted in best.token_ids else None
        self.differences.append(
            Difference(
                prompt=turn.prompt,
                turn=turn.turn,
                position=apart,
                plain=plain.token_ids[apart],
                drafted=drafted,
                gap=None if rank is None else best.logits[0] - best.logits[rank],
            )
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "accepted_length": self.accepted_length,
            "acceptance": self.acceptance,
            "tokens_per_second": self.tokens_per_second,
            "num_unexplained": len(self.unexplained),
        }


@dataclass(frozen=True)
class Decoding:
    """The result of ``decode_prompts``."""

    tallies: list[Tally]  # a drafter each
    plain: Tally  # one token a forward
    temperature: float

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "drafts": [tally.to_json() for tally in self.tallies],
            "plain": {"num_tokens": self.plain.num_tokens, "tokens_per_second": self.plain.tokens_per_second},
        }


def expected_length(acceptance: Sequence[float]) -> float:
    """1 + a0 + a0 a1 + ... of conditional acceptances."""
    return 1 + sum(prod(acceptance[: n + 1]) for n in range(len(acceptance)))


def decode_prompts(
    target: RunningTarget,
    drafters: Sequence[Drafter],
    prompts: Prompts,
    *,
    num_draft: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    on_progress: Callable[[int, str], None] = lambda amount, note: None,
) -> Decoding:
    """Answer every turn of ``prompts`` plainly and with each drafter. ``on_progress`` is told after each prompt.

    Raises EyasError where no prompt leaves room for an answer.
    """
    tallies = [Tally(drafter.name, num_draft) for drafter in drafters]
    plain = Tally("plain", 0)
    stop_ids = prompts.stop_ids
    room = (target.max_positions or 1 << 30) - num_draft - 1
    last = 0
    for turn in prompts.turns(max_new_tokens=max_new_tokens, max_tokens=room):
        if turn.prompt != last:
            on_progress(turn.prompt - last, f"{plain.num_tokens:,} tokens")
            last = turn.prompt
        drawn = seed + (turn.prompt << 32) + (turn.turn << 16)
        start = prompt(target, turn.token_ids, Chooser(temperature, drawn, target.device))
        answer = decode_plain(
            target,
            start,
            Chooser(temperature, drawn + 1, target.device),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        plain.add(turn, answer)
        for n, (drafter, tally) in enumerate(zip(drafters, tallies, strict=True)):
            decoded = decode_speculative(
                target,
                drafter,
                start,
                Chooser(temperature, drawn + 2 + n, target.device),
                num_draft=num_draft,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
            )
            tally.add(turn, decoded)
            if temperature == 0:
                tally.compare(turn, answer, decoded)
        prompts.answer(turn, answer.token_ids)
    if not plain.num_turns:
        raise EyasError(f"no prompt leaves room for {max_new_tokens} tokens within the target's positions")
    on_progress(len(prompts) - last, f"{plain.num_tokens:,} tokens")
    return Decoding(tallies, plain, temperature)
