"""The serving engine that a check is made for: ``SYSTEM`` or ``SYSTEM@VERSION``."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from eyas.taps.errors import UsageError

ENGINES = ("sglang", "vllm", "trtllm", "transformers")
_CONVENTION = {"transformers": "hf"}  # its ids are those of hidden_states


@dataclass(frozen=True)
class Engine:
    system: str
    version: Version | None  # None: any release

    def __str__(self) -> str:
        return self.system if self.version is None else f"{self.system}@{self.version}"

    @property
    def convention(self) -> str:
        """As eyas.taps.conventions names it."""
        name = _CONVENTION.get(self.system, self.system)
        return name if self.version is None else f"{name}@{self.version}"


def parse_engine(text: str) -> Engine:
    """Read ``sglang`` or ``sglang@0.5.23``. Raises UsageError."""
    system, at, version = text.strip().partition("@")
    if system not in ENGINES:
        raise UsageError(f"{text}: expected one of {', '.join(ENGINES)}, with @VERSION behind it or without")
    if not at:
        return Engine(system, None)
    try:
        return Engine(system, Version(version))
    except InvalidVersion as error:
        raise UsageError(f"--engine {text}: {version!r} is no release, such as 0.5.9") from error
