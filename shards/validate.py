"""The one proof that a shard is whole and what it says it is; the reader, recovery, standardize and check share it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.shards.codec import CODECS
from eyas.shards.errors import ShardError
from eyas.shards.identity import DatasetIdentity
from eyas.shards.layout import Header, ShardMetadata, check_header, read_header
from eyas.shards.ledger import SealedShard
from eyas.shards.sample import sample_id

_READ_BYTES = 1 << 22


def validate(path: Path, identity: DatasetIdentity, entry: SealedShard | None) -> None:
    """Prove that the shard at ``path`` is whole and belongs to a dataset of ``identity``. Raises ShardError.

    Catches truncation, a flipped byte anywhere, wrong shapes, dtypes, taps or target, offsets that do not cover the
    rows, sample ids that are not those of the tokens, and, given its ledger line ``entry``, any difference from that.
    Reads the whole file once; wide tensors are hashed, not decoded.
    """
    read_entry(path, identity, entry)


def read_entry(path: Path, identity: DatasetIdentity, entry: SealedShard | None) -> SealedShard:
    """validate(), and the ledger line that the shard should have (without ``entry``, sealed_at is the file's)."""
    header = read_header(path)
    metadata = check_header(path, header, identity)
    if entry is not None and header.num_bytes != entry.num_bytes:
        raise ShardError(path, None, f"{header.num_bytes} bytes, and its ledger line says {entry.num_bytes}")
    file_xxh3 = _check_hashes(path, header, metadata)
    _, tensors = map_tensors(path, header)
    offsets = check_offsets(path, tensors, metadata)
    check_codec(path, tensors, offsets, identity)
    _check_tokens(path, tensors, offsets, metadata, identity)
    found = SealedShard(
        shard=path.name,
        num_bytes=header.num_bytes,
        xxh3=file_xxh3,
        num_tokens=metadata.num_tokens,
        num_trained_tokens=sum(metadata.num_trained_tokens),
        sample_ids=metadata.sample_ids,
        statistics=metadata.statistics,
        seconds=metadata.seconds if entry is None else entry.seconds,
        sealed_at=os.stat(path).st_mtime if entry is None else entry.sealed_at,
    )
    if entry is not None:
        for field in ("xxh3", "num_tokens", "num_trained_tokens", "sample_ids", "statistics"):
            if getattr(found, field) != getattr(entry, field):
                raise ShardError(path, None, f"its {field} is not what its ledger line says")
    return found


def map_tensors(path: Path, header: Header) -> tuple[npt.NDArray[np.uint8], dict[str, npt.NDArray[np.uint8]]]:
    """The file, and the flat bytes of each of its tensors, memory-mapped: what is not touched is not read.

    The mapping is private, so writing into it changes no file, and it holds no file descriptor: a shuffle buffer may
    keep views of thousands of shards.
    """
    import torch

    try:
        mapped = torch.from_file(str(path), shared=False, size=header.num_bytes, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise ShardError(path, None, f"cannot be mapped into memory ({error})") from error
    return mapped, {name: mapped[place.begin : place.end] for name, place in header.tensors.items()}


def check_offsets(
    path: Path, tensors: dict[str, npt.NDArray[np.uint8]], metadata: ShardMetadata
) -> npt.NDArray[np.int64]:
    """The shard's offsets, int64 [N+1], proven to cover its rows with samples of at least one token."""
    offsets = tensors["offsets"].view("<i8")
    if offsets[0] != 0 or offsets[-1] != metadata.num_tokens or bool(np.any(offsets[1:] <= offsets[:-1])):
        raise ShardError(path, "offsets", f"do not rise from 0 to the number of rows, {metadata.num_tokens}")
    return offsets


def check_codec(
    path: Path,
    tensors: dict[str, npt.NDArray[np.uint8]],
    offsets: npt.NDArray[np.int64],
    identity: DatasetIdentity,
) -> None:
    """Prove that the wide tensors of every sample can be located."""
    for name, width in identity.wide_tensors.items():
        try:
            CODECS[identity.codec].check(name, tensors, offsets, width * identity.itemsize_bytes)
        except ValueError as error:
            raise ShardError(path, name, str(error)) from error


def _check_hashes(path: Path, header: Header, metadata: ShardMetadata) -> str:
    """Compare each tensor with its checksum; the xxh3-64 of the whole file comes from the same pass."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        whole = xxhash.xxh3_64(file.read(8 + len(header.content)))
        for name, place in header.tensors.items():
            tensor, left = xxhash.xxh3_64(), place.end - place.begin
            while left:
                num_read = file.readinto(buffer[: min(left, _READ_BYTES)])
                if not num_read:
                    raise ShardError(path, name, "truncated")
                tensor.update(buffer[:num_read])
                whole.update(buffer[:num_read])
                left -= num_read
            if tensor.hexdigest() != metadata.xxh3[name]:
                raise ShardError(path, name, "does not match its checksum: damaged")
    return whole.hexdigest()


def _check_tokens(
    path: Path,
    tensors: dict[str, npt.NDArray[np.uint8]],
    offsets: npt.NDArray[np.int64],
    metadata: ShardMetadata,
    identity: DatasetIdentity,
) -> None:
    input_ids, loss_mask = tensors["input_ids"].view("<i4"), tensors["loss_mask"]
    if int(loss_mask.max()) > 1:
        raise ShardError(path, "loss_mask", f"holds {int(loss_mask.max())}, expected 0 and 1")
    if int(input_ids.min()) < 0:
        raise ShardError(path, "input_ids", f"holds {int(input_ids.min())}, expected token ids")
    trained = np.add.reduceat(loss_mask.astype(np.int64), offsets[:-1]).tolist()
    if trained != list(metadata.num_trained_tokens):
        raise ShardError(path, "loss_mask", "does not have the trained tokens that the metadata says")
    if len(set(metadata.sample_ids)) != len(metadata.sample_ids):
        raise ShardError(path, None, "holds a sample twice")
    for n, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        found = sample_id(input_ids[begin:end], loss_mask[begin:end])
        if found != metadata.sample_ids[n]:
            raise ShardError(
                path, "input_ids", f"sample {n} is {found} by its tokens, {metadata.sample_ids[n]} by name"
            )
