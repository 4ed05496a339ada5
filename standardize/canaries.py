"""The canaries of a captured dataset, brought along: converted as its samples are, one shard for each of its shards."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.shards.canaries import SESSION, begin_canaries, open_canaries
from eyas.shards.dataset import Dataset, Shard
from eyas.shards.errors import ShardError
from eyas.shards.ledger import SHARDS_FOLDER
from eyas.shards.validate import validate
from eyas.shards.writer import ShardWriter
from eyas.standardize.convert import Converter, OverflowRefusedError
from eyas.standardize.plan import Request


def carry_canaries(request: Request) -> Iterator[str]:
    """Write into out the canaries that it has not got yet; yields why one was left. Call it under out's lock."""
    source = open_canaries(request.source)
    if source is None:
        return
    folder = begin_canaries(request.out, request.identity)
    there = {_key(shard) for shard in Dataset.open(folder).iter_shards()}
    converter = Converter(source.identity, request.identity)
    for index, entry in enumerate(source.ledgers.entries):
        path = source.path / SHARDS_FOLDER / entry.shard
        try:
            shard = source.shard(index)
            if _key(shard) in there:
                continue
            validate(path, source.identity, entry)
            samples = [converter.convert(sample, where=str(path)) for sample in shard]
        except (ShardError, OverflowRefusedError) as error:
            yield f"{path}: this canary is left out ({error})"
            continue
        with ShardWriter(
            folder, identity=request.identity, worker=_worker(shard), metadata=shard.metadata.engine, verify=True
        ) as writer:
            for sample in samples:
                writer.add(sample)


def _worker(shard: Shard) -> str:
    return shard.path.name.rpartition("-")[0]


def _key(shard: Shard) -> tuple[str, str | None]:
    return _worker(shard), shard.metadata.engine.get(SESSION)
