"""What a standardize run tells its caller, in order; the Summary comes last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eyas.shards.ledger import SealedShard
from eyas.standardize.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A pass over the captured shards begins. There is a second one only where a shard turned out corrupt whose
    samples another shard holds too."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """``num_tokens`` captured tokens are dealt with."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A shard of the standard dataset is verified and durable."""

    shard: SealedShard
    how: Literal["linked", "copied", "written"]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A captured shard could not be used. The run goes on, and fails at its end."""

    shard: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Something that the user should know, and that fails nothing."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Target tokens are being counted in ``num_shards`` shards."""

    num_shards: int


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One shard's target tokens are counted."""


@dataclass(frozen=True, kw_only=True)
class Surveying:
    """The tokens of ``num_items`` foreign samples are being read."""

    num_items: int


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """One foreign sample's tokens are read."""


@dataclass(frozen=True, kw_only=True)
class Importing:
    """The foreign folder is surveyed: these are to be written."""

    num_samples: int
    num_tokens: int
    num_done_samples: int  # in out already
    num_duplicates: int
    num_rejected: int


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A foreign sample cannot be used. The run goes on."""

    item: str
    reason: str


@dataclass(kw_only=True)
class Summary:
    """How the run ended. The last event."""

    num_samples: int = 0  # in out
    num_tokens: int = 0
    num_bytes: int = 0
    num_shards: int = 0
    num_trained_tokens: int = 0
    num_linked: int = 0  # shards, by this run
    num_copied: int = 0
    num_written: int = 0
    num_rejected: int = 0  # by the capture, or of a foreign folder
    num_missing: int = 0  # prepared samples that are neither in out nor rejected
    num_duplicates: int = 0  # foreign samples with the tokens and mask of another one
    failures: dict[str, str] = field(default_factory=dict)  # captured shard -> reason
    stopped_early: bool = False


Event = (
    Planned
    | Advanced
    | Sealed
    | Failed
    | Noticed
    | Counting
    | Counted
    | Surveying
    | Surveyed
    | Importing
    | Rejected
    | Summary
)
