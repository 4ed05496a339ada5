"""Chain speculative decoding of one sequence, and plain decoding to compare it with.

A cycle: the draft proposes N tokens; the target runs the last token and the N proposed ones in one forward; the
longest acceptable beginning is kept, with one token of the target's own behind it. Greedily a token is acceptable where
it is the target's argmax, so the output is that of plain greedy decoding. Sampled, a token x drawn from q is accepted
with probability min(1, p(x) / q(x)), and the first that is not is replaced by one from norm(max(p - q, 0)), so the
output has the target's distribution (Leviathan et al., arXiv 2211.17192, algorithm 1). Tokens outside the draft's
vocabulary have q = 0.

Shapes: N proposed tokens, U taps, H hidden_size, V vocab_size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.train.acceptance.drafters import Drafter, Proposal
from eyas.train.acceptance.target import RunningTarget

NUM_BEST = 8


@dataclass(frozen=True)
class Best:
    """The target's best tokens at a position, where decoding is greedy; bfloat16 may hold several equal."""

    token_ids: tuple[int, ...]  # NUM_BEST, descending
    logits: tuple[float, ...]


@dataclass
class Decoded:
    """An answer, and what it took. Times are of decoding, the prompt's own forward left out."""

    token_ids: list[int]  # the first is the prompt's own forward's
    num_forwards: int = 0  # of the target, each of which gave one token at least
    num_tokens: int = 0  # that those gave
    reached: list[int] = field(default_factory=list)  # [N] proposals whose predecessors were all accepted
    accepted: list[int] = field(default_factory=list)  # [N]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    best: list[Best] = field(default_factory=list)  # of each token but the first, where greedy

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


class Chooser:
    """Draws tokens: the argmax at temperature 0, else from softmax(logits / temperature)."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """logits [Vd] -> which (int64 scalar), and the probabilities it was drawn from (float32 [Vd])."""
        if self.temperature == 0:
            return logits.argmax(-1), None
        probabilities = torch.softmax(logits.float() / self.temperature, -1)
        return self.draw(probabilities), probabilities

    def draw(self, weights: Tensor) -> Tensor:
        """int64 scalar, from unnormalised probabilities [V]."""
        return torch.multinomial(weights, 1, generator=self._generator)[0]

    def uniform(self, count: int) -> Tensor:
        """float64 [count] in [0, 1)."""
        return torch.rand(count, generator=self._generator, device=self._generator.device, dtype=torch.float64)


@dataclass(frozen=True)
class Prompted:
    """The target behind a prompt: what every decoding of it starts from."""

    token_ids: list[int]  # P of the prompt
    first: int  # the token behind it
    features: Tensor  # [P, U, H]


def prompt(target: RunningTarget, token_ids: Sequence[int], choose: Chooser) -> Prompted:
    """Run a prompt on the target, alone."""
    target.start()
    logits, features = target.forward(token_ids, last_only=True)
    return Prompted(list(token_ids), int(choose(logits[0])[0]), features)


def decode_plain(
    target: RunningTarget, start: Prompted, choose: Chooser, *, max_new_tokens: int, stop_ids: frozenset[int]
) -> Decoded:
    """One token a forward."""
    target.crop(len(start.token_ids))
    decoded = Decoded([start.first])
    started = time.perf_counter()
    while decoded.token_ids[-1] not in stop_ids and len(decoded.token_ids) < max_new_tokens:
        logits, _ = target.forward(decoded.token_ids[-1:])
        decoded.token_ids.append(int(choose(logits[0])[0]))
        if choose.temperature == 0:
            decoded.best += _best(logits)
        decoded.num_forwards += 1
        decoded.num_tokens += 1
    decoded.verify_seconds = time.perf_counter() - started
    return decoded


def decode_speculative(
    target: RunningTarget,
    drafter: Drafter,
    start: Prompted,
    choose: Chooser,
    *,
    num_draft: int,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> Decoded:
    """Propose ``num_draft`` tokens, verify, and so on. Ends at an end token or at max_new_tokens."""
    columns = [target.taps.index(tap) for tap in drafter.taps]

    def extend(next_ids: Sequence[int], features: Tensor) -> None:
        drafter.extend(torch.tensor(next_ids, device=target.device), features[:, columns].flatten(1))

    target.crop(len(start.token_ids))
    decoded = Decoded([start.first], reached=[0] * num_draft, accepted=[0] * num_draft)
    drafter.start()
    extend([*start.token_ids[1:], start.first], start.features)
    while decoded.token_ids[-1] not in stop_ids and len(decoded.token_ids) < max_new_tokens:
        begun = time.perf_counter()
        proposal = drafter.propose(num_draft, choose)
        proposed = time.perf_counter()
        known = target.num_tokens
        logits, features = target.forward([decoded.token_ids[-1], *proposal.token_ids])  # [N + 1, V], [N + 1, U, H]
        num_accepted, own = verify(logits, proposal, choose)
        target.crop(known + 1 + num_accepted)
        new = [*proposal.token_ids[:num_accepted], own]
        verified = time.perf_counter()
        extend(new, features[: num_accepted + 1])
        end = next((n for n, token in enumerate(new) if token in stop_ids), len(new) - 1)
        for n in range(min(num_draft, num_accepted + 1, end + 1)):
            decoded.reached[n] += 1
            decoded.accepted[n] += n < num_accepted
        decoded.token_ids += new[: end + 1]
        if choose.temperature == 0:
            decoded.best += _best(logits[: end + 1])
        decoded.num_forwards += 1
        decoded.num_tokens += end + 1
        decoded.draft_seconds += proposed - begun + time.perf_counter() - verified
        decoded.verify_seconds += verified - proposed
    del decoded.token_ids[max_new_tokens:], decoded.best[max_new_tokens - 1 :]
    return decoded


@torch.inference_mode()
def verify(logits: Tensor, proposal: Proposal, choose: Chooser) -> tuple[int, int]:
    """How many of the proposed tokens stand, and the target's own token behind them.

    logits: [N + 1, V], the target's; row n judges proposed token n, the last row has none.
    """
    num_draft = len(proposal.token_ids)
    if choose.temperature == 0:
        best = logits.argmax(-1).tolist()
        accepted = next((n for n, token in enumerate(proposal.token_ids) if token != best[n]), num_draft)
        return accepted, best[accepted]
    p = torch.softmax(logits.double() / choose.temperature, -1)  # [N + 1, V]
    tokens = torch.tensor(proposal.token_ids, device=logits.device)[:, None]  # [N, 1]
    if proposal.probabilities is None:
        q = torch.zeros_like(p[:num_draft]).scatter_(1, tokens, 1.0)
    else:
        q = proposal.probabilities.double()
        q = q / q.sum(-1, keepdim=True)
    stands = choose.uniform(num_draft) * q.gather(1, tokens)[:, 0] < p[:num_draft].gather(1, tokens)[:, 0]
    accepted = next((n for n, stood in enumerate(stands.tolist()) if not stood), num_draft)
    rest = p[accepted] if accepted == num_draft else (p[accepted] - q[accepted]).clamp_min(0)
    return accepted, int(choose.draw(rest))


def _best(logits: Tensor) -> list[Best]:
    values, ids = logits.float().topk(min(NUM_BEST, logits.shape[-1]))
    return [Best(tuple(row), tuple(best)) for row, best in zip(ids.tolist(), values.tolist(), strict=True)]
