"""What is checked: a dataset, and what is at hand of the draft, the engine and the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.align.draft import Draft
from eyas.align.engine import Engine
from eyas.shards.identity import DatasetIdentity
from eyas.shards.ledger import LedgerState
from eyas.taps.errors import EyasError
from eyas.taps.target import TargetFacts, language_configs


@dataclass(frozen=True)
class TargetFolder:
    """The target's folder, for its configuration and tokenizer; no weight is loaded."""

    path: Path
    trust_remote_code: bool = False

    @cached_property
    def config_bytes(self) -> bytes:
        try:
            return (self.path / "config.json").read_bytes()
        except OSError as error:
            raise EyasError(
                f"--target {self.path}: no config.json there ({error.strerror}); give the folder of the target"
            ) from error

    @cached_property
    def config(self) -> Mapping[str, Any]:
        try:
            config = json.loads(self.config_bytes)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise EyasError(f"{self.path / 'config.json'}: unreadable ({error})") from error
        if not isinstance(config, dict):
            raise EyasError(f"{self.path / 'config.json'}: expected a JSON object")
        return config

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of a multimodal configuration; all of it elsewhere."""
        return language_configs(self.config)[-1]

    @cached_property
    def facts(self) -> TargetFacts:
        return TargetFacts.from_config(self.config, str(self.path / "config.json"))

    @cached_property
    def tokenizer(self) -> Any:
        """Raises TargetError where there is none, or where it needs code of its own that may not run."""
        from eyas.capture.tokenizer import load_tokenizer

        return load_tokenizer(self.path, None, self.trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One run of the checks."""

    dataset: Path
    identity: DatasetIdentity
    ledgers: LedgerState
    draft: Draft | None = None
    engine: Engine | None = None
    target: TargetFolder | None = None

    @cached_property
    def facts(self) -> TargetFacts:
        """What the reading of ids depends on: of the target's folder if there is one, else as the dataset has it."""
        if self.target is not None:
            return self.target.facts
        return TargetFacts(num_layers=self.identity.target.num_layers, model_class=self.identity.target.model_class)
