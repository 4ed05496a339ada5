"""Reading everything again: is each byte of a dataset what was once written?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from eyas.shards.errors import ShardError
from eyas.shards.identity import read_identity
from eyas.shards.ledger import SHARDS_FOLDER, LedgerState, Problem, SealedShard
from eyas.shards.token_counts import TokenCountsError, count_targets, read_token_counts
from eyas.shards.validate import validate


def verify_dataset(
    dataset: Path, state: LedgerState, *, workers: int, on_shard: Callable[[SealedShard], None]
) -> list[Problem]:
    """Validate every shard in ``state`` with ``workers`` threads; for a standard dataset the token counts too.

    Returns every bad file; on what the ledgers alone show, ``state.problems`` has it. ``on_shard`` is called in this
    thread as each shard is done.
    """
    identity = read_identity(dataset)
    bad: dict[str, Problem] = {}
    waiting: dict[Future[None], SealedShard] = {}

    def collect() -> None:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            entry = waiting.pop(future)
            error = future.exception()
            if isinstance(error, ShardError):
                where = f"{SHARDS_FOLDER}/{entry.shard}"
                tensor = f"tensor {error.tensor}: " if error.tensor else ""
                bad[entry.shard] = Problem("corrupt shard", where, f"{tensor}{error.what}")
            elif error is not None:
                raise error
            on_shard(entry)

    with ThreadPoolExecutor(workers) as pool:
        for entry in state.entries:
            if len(waiting) >= 2 * workers:
                collect()
            waiting[pool.submit(validate, dataset / SHARDS_FOLDER / entry.shard, identity, entry)] = entry
        while waiting:
            collect()
    problems = [bad[name] for name in sorted(bad)]
    if identity.stage == "standard" and not problems:
        try:
            counts = read_token_counts(dataset).copy()
            for ids, times in count_targets(dataset, state.entries, len(counts), workers=workers):
                counts[ids] -= times
            if counts.any():
                problems.append(Problem("wrong counts", "token_counts.safetensors", "differs from the shards' targets"))
        except TokenCountsError as error:
            problems.append(Problem("token counts", "token_counts.safetensors", str(error)))
    return problems
