"""token_counts.safetensors: how often each token id is a training target in a standard dataset.

One tensor, ``counts`` int64 [vocab]: the number of tokens with loss_mask 1, by id, over all shards. Its metadata
names the shards it was counted from, so that counts older than the shards are seen to be stale. Written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.shards.atomic import publish
from eyas.shards.identity import read_identity
from eyas.shards.ledger import SHARDS_FOLDER, SealedShard, read_ledgers
from eyas.taps.errors import EyasError

TOKEN_COUNTS_FILE = "token_counts.safetensors"


class TokenCountsError(EyasError):
    """token_counts.safetensors is missing, unreadable, or was counted from other shards than are there."""


def count_targets(
    dataset: Path, entries: Iterable[SealedShard], vocab_size: int, *, workers: int
) -> Iterator[npt.NDArray[np.int64]]:
    """For each shard of ``entries``, in order: its distinct target ids and how often each is one, int64 [2, n].

    Only ids and masks are read, by ``workers`` threads. Raises TokenCountsError for an id outside the vocabulary.
    """
    from safetensors import safe_open

    def count(entry: SealedShard) -> npt.NDArray[np.int64]:
        path = dataset / SHARDS_FOLDER / entry.shard
        with safe_open(path, framework="numpy") as shard:
            input_ids_T, loss_mask_T = shard.get_tensor("input_ids"), shard.get_tensor("loss_mask")
        targets = input_ids_T[loss_mask_T == 1]
        if targets.size and (targets.min() < 0 or targets.max() >= vocab_size):
            raise TokenCountsError(
                f"{path}: input_ids holds {targets.min()} to {targets.max()}, and the target's vocabulary is 0 to "
                f"{vocab_size - 1}: the dataset was captured with another tokenizer than its target's"
            )
        return np.stack(np.unique(targets, return_counts=True)).astype(np.int64)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(count, entries)


def write_token_counts(dataset: Path, counts: npt.NDArray[np.int64], entries: Iterable[SealedShard]) -> None:
    """Publish ``counts`` int64 [vocab], counted from ``entries``, in one step."""
    from safetensors.numpy import save

    metadata = {"shards": shards_fingerprint(entries), "num_trained_tokens": str(int(counts.sum()))}
    publish(dataset / TOKEN_COUNTS_FILE, save({"counts": counts}, metadata=metadata))


def read_token_counts(dataset: Path) -> npt.NDArray[np.int64]:
    """counts int64 [vocab], proven to be of the shards that are there.

    Raises TokenCountsError where the file is missing, unreadable or stale.
    """
    from safetensors import SafetensorError, safe_open

    path = dataset / TOKEN_COUNTS_FILE
    mend = "run the same eyas standardize again, which counts anew"
    try:
        with safe_open(path, framework="numpy") as file:
            counts = file.get_tensor("counts")
            counted = (file.metadata() or {}).get("shards")
    except FileNotFoundError as error:
        raise TokenCountsError(f"{path} is missing, so the dataset is not complete: {mend}") from error
    except SafetensorError as error:
        raise TokenCountsError(f"{path}: unreadable ({error}): {mend}") from error
    vocab_size = read_identity(dataset).target.vocab_size
    if counts.dtype != np.int64 or counts.shape != (vocab_size,):
        raise TokenCountsError(
            f"{path}: counts is {counts.dtype} {counts.shape}, expected int64 ({vocab_size},): {mend}"
        )
    if counted != shards_fingerprint(read_ledgers(dataset).entries):
        raise TokenCountsError(f"{path} was counted from other shards than are there: {mend}")
    return np.asarray(counts, dtype=np.int64)


def counted_shards(content: bytes) -> str | None:
    """The shards_fingerprint() that token_counts.safetensors, given as bytes, was counted from; None if unreadable."""
    size = int.from_bytes(content[:8], "little")
    try:
        counted = json.loads(content[8 : 8 + size])["__metadata__"]["shards"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(counted)


def shards_fingerprint(entries: Iterable[SealedShard]) -> str:
    """blake2b-128, hex, over the sorted lines ``<shard> <xxh3>``: which bytes a derived file was made from."""
    digest = hashlib.blake2b(digest_size=16)
    for line in sorted(f"{entry.shard} {entry.xxh3}\n" for entry in entries):
        digest.update(line.encode())
    return digest.hexdigest()
