"""Which samples are the canaries, and how a session captures them: the way of all samples, but by every worker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.capture.engines.base import Engine, Rejected, SampleSource, Sink, Work
from eyas.shards.rejects import append_reject
from eyas.shards.sample import TokenSample, sample_id

NUM_CANARIES = 2
CANARY_TOKENS = 128  # of each: 15 MB a worker and session for three taps and last_hidden of 7168 channels in 16 bits
CANARIES_BYTES = 1 << 30  # of a shard: all of them are in one, however small the dataset's are
_MOST_READ = 1000  # samples, in search of two that differ in their first tokens


class Prepared(SampleSource, Protocol):
    """The columns of the prepared samples that tell which of them are looked at first."""

    @property
    def sample_ids(self) -> npt.NDArray[np.uint64]: ...  # [N]

    @property
    def lengths(self) -> npt.NDArray[np.int64]: ...  # [N]


@dataclass(frozen=True)
class _Canaries:
    """A source of samples that travels to the workers."""

    samples: tuple[TokenSample, ...]

    def __getitem__(self, row: int) -> TokenSample:
        return self.samples[row]


def choose_canaries(prepared: Prepared, vocab_size: int) -> tuple[TokenSample, ...]:
    """The first tokens of two samples: the same ones whatever the order of the prepared samples.

    Those of CANARY_TOKENS tokens or more come first, then longer before shorter, by ascending id. Every token is a
    training target here, so that the logits of all rows are captured. Fewer than two where no others are usable.
    """
    kept = np.minimum(prepared.lengths, CANARY_TOKENS)
    chosen: dict[str, TokenSample] = {}
    for row in np.lexsort((prepared.sample_ids, -kept))[:_MOST_READ].tolist():
        ids = prepared[row].input_ids[:CANARY_TOKENS]
        if len(ids) < 2 or ids.min() < 0 or ids.max() >= vocab_size:
            continue
        mask = np.ones(len(ids), dtype=np.uint8)
        name = sample_id(ids, mask)
        chosen.setdefault(name, TokenSample(sample_id=name, input_ids=ids, loss_mask=mask))
        if len(chosen) == NUM_CANARIES:
            break
    return tuple(chosen.values())


def new_session() -> str:
    """A name that no other session has: when it began, in UTC, and a random number."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def capture_canaries(
    engine: Engine, canaries: tuple[TokenSample, ...], sink: Sink, *, rank: int, should_stop: Callable[[], bool]
) -> None:
    """Have every worker write ``canaries`` into ``sink``. Call it on every rank."""
    if not canaries:
        return
    work = Work(
        source=_Canaries(canaries),
        rows=np.arange(len(canaries)),
        lengths=np.array([canary.num_tokens for canary in canaries], dtype=np.int64),
        everywhere=True,
    )
    for event in engine.capture(work, sink, should_stop):
        if isinstance(event, Rejected):  # check tells whose canary is missing
            append_reject(sink.dataset, f"{sink.worker}-{rank}", event.sample_id, event.reason)
