"""What eyas train says to another trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """The options that every trainer has under some name."""

    target: Path
    run: Path
    processes: int  # on this machine
    epochs: int
    batch_tokens: int
    ttt_steps: int
    learning_rate: float
    optimizer: str  # adamw or muon
    schedule: str  # cosine or linear
    seed: int
    draft_vocab_size: int | None  # None: the target's
    train_share: float  # of the rows, the first ones; the rest validates
    extra: tuple[str, ...]  # passed on as they are
