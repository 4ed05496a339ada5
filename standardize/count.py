"""The token counts of a standard dataset: its last step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

import numpy as np

from eyas.shards.ledger import read_ledgers
from eyas.shards.token_counts import TokenCountsError, count_targets, read_token_counts, write_token_counts
from eyas.standardize.events import Counted, Counting, Event


def count_tokens(
    out: Path, vocab_size: int, workers: int, should_stop: Callable[[], bool]
) -> Generator[Event, None, bool]:
    """Write token_counts.safetensors, unless it is of the shards that are there. Returns whether it is done."""
    with suppress(TokenCountsError):
        read_token_counts(out)
        return True
    entries = read_ledgers(out).entries
    yield Counting(num_shards=len(entries))
    counts = np.zeros(vocab_size, dtype=np.int64)  # [vocab]
    for ids, times in count_targets(out, entries, len(counts), workers=workers):
        counts[ids] += times
        yield Counted()
        if should_stop():
            return False
    write_token_counts(out, counts, entries)
    return True
