"""SpecForge: its run.yaml and command line for a dataset of ours.

Read in sgl-project/SpecForge at a6b6b023: specforge/config/schema.py and cli.py. It has no option
for a validation share of one folder, so all samples train, and it trains on cosine schedules alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.shards.dataset import Dataset
from eyas.standardize.formats.specforge.write import VOCABULARY_FILE
from eyas.taps.conventions import ids_for
from eyas.taps.errors import UsageError
from eyas.taps.target import TargetFacts
from eyas.train.peers.settings import PeerSettings

CONFIG_FILE = "specforge.yaml"


def config(settings: PeerSettings, dataset: Dataset, facts: TargetFacts, data: Path) -> dict[str, Any]:
    """run.yaml's contents, once ``data`` holds the dataset as standardize.formats.specforge writes it.

    Raises UsageError for what it does not do.
    """
    for option, value, only in (
        ("--optimizer", settings.optimizer, "adamw"),
        ("--schedule", settings.schedule, "cosine"),
    ):
        if value != only:
            raise UsageError(f"{option} {value}: SpecForge trains with {only} alone")
    maps = {} if settings.draft_vocab_size is None else {"vocab_mapping_path": str(data / VOCABULARY_FILE)}
    return {
        "run_id": settings.run.name,
        "output_dir": str(settings.run),
        "model": {
            "target_model_path": str(settings.target),
            "aux_hidden_state_layer_ids": list(ids_for("specforge", dataset.identity.taps, facts)),
            **maps,
        },
        "data": {"hidden_states_path": str(data), "max_length": settings.batch_tokens},
        "training": {
            "strategy": "eagle3",
            "num_epochs": settings.epochs,
            "learning_rate": settings.learning_rate,
            "ttt_length": settings.ttt_steps,
            "seed": settings.seed,
        },
        "deployment": {"trainer": {"nproc_per_node": settings.processes}},
    }


def command(settings: PeerSettings) -> list[str]:
    """What is run, with ``config`` at RUN/specforge.yaml."""
    return ["specforge", "train", "--config", str(settings.run / CONFIG_FILE), *settings.extra]


def render(values: dict[str, Any]) -> str:
    """As YAML, which JSON is a part of."""
    return json.dumps(values, indent=2) + "\n"
