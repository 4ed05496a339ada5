"""speculators 0.9: its trainer's command line for a dataset of ours.

Flags and their meaning were read in speculators/train/config/schema.py of 0.9.0. Its defaults for the norms
(norm_before_residual, norm_before_fc and norm_output on) are its own and stay; what it reads as layer ids is vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eyas.shards.dataset import Dataset
from eyas.taps.conventions import ids_for
from eyas.taps.target import TargetFacts
from eyas.train.peers.settings import PeerSettings

MODULE = "speculators.train"
VERSION = "0.9.0"


def command(settings: PeerSettings, dataset: Dataset, facts: TargetFacts, data: Path) -> list[str]:
    """What is run, once ``data`` holds the dataset as standardize.formats.speculators writes it."""
    ids = ids_for(f"speculators@{VERSION}", dataset.identity.taps, facts)
    options: Sequence[tuple[str, object]] = (
        ("--speculator-type", "eagle3"),
        ("--verifier-name-or-path", settings.target),
        ("--data-path", data),
        ("--save-path", settings.run / "checkpoints"),
        ("--log-dir", settings.run / "logs"),
        ("--on-missing", "raise"),
        ("--train-data-ratio", settings.train_share),
        ("--total-seq-len", settings.batch_tokens),
        ("--ttt-steps", settings.ttt_steps),
        ("--epochs", settings.epochs),
        ("--lr", settings.learning_rate),
        ("--optimizer", settings.optimizer),
        ("--scheduler-type", settings.schedule),
        ("--seed", settings.seed),
        ("--draft-vocab-size", settings.draft_vocab_size),
    )
    given = [text for name, value in options if value is not None for text in (name, str(value))]
    launcher = [sys.executable, "-m", MODULE]
    if settings.processes > 1:
        ranks = ["--nproc-per-node", str(settings.processes)]
        launcher = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", MODULE]
    return [*launcher, *given, "--target-layer-ids", *map(str, ids), *settings.extra]
