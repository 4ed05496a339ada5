"""Codec zstd: bfloat16, lossless for every bit pattern.

A bfloat16 is sign (1 bit), exponent (8), mantissa (7). Exponents of one channel stay near its median and compress;
signs and mantissas are noise and are stored as they are.

    <name>.zst      uint8           sample after sample: its exponents, uint8 [T_n, W] token-major, each minus its
                                    channel's median (mod 256), as one zstandard frame; then its signs and mantissas,
                                    uint8 [T_n, W], bit 7 the sign and bits 0-6 the mantissa
    <name>.frames   int64 [N, 3]    where in .zst sample n's frame starts, its length, where its raw bytes start
    <name>.medians  uint8 [W]

Level 1, as little match finding as it can do: exponents hold no repeats worth finding, Huffman coding does the work.
Against plain level 1, minimum match 7 and a 256-entry hash table make it 2.4 times as fast, reading twice as fast, and
the result no larger (benchmarks/codec.py; level 3 is slower and larger). Splitting exponents from the rest is ZipNN's
idea; the difference from a per-channel median is what takes it from 1.42x to 1.49x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import numpy.typing as npt
import zstandard

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
# Evenly spread over a shard's first rows, of which these are waited for. No sample is encoded before the medians are
# known: of 512 rows instead of 128 they took four times as long and made SmolLM2's states 0.08 % smaller.
_MEDIAN_ROWS = 128
_ROWS_BEFORE_MEDIANS = 512
# Planes are split and joined by blocks. Smaller ones stay in a core's own cache, but every operation on one is a moment
# in which all threads want Python's lock: with 2**18, eight threads held up the forward that ran beside them.
_SPLIT_ELEMENTS = 1 << 21
_JOIN_ELEMENTS = 1 << 18


def stored(
    name: str, dtype: str, num_samples: int, num_tokens: int, width: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{name}.frames": ("I64", (num_samples, 3)),
        f"{name}.medians": ("U8", (width,)),
        f"{name}.zst": ("U8", (-1,)),
    }


class Encoder:
    """One tensor of one shard: samples are encoded in ``pool`` as they come, against the medians of the first ones."""

    def __init__(self, name: str, pool: Executor) -> None:
        self._name = name
        self._pool = pool
        self._waiting: list[npt.NDArray[np.uint16]] = []  # for enough rows to tell the medians
        self._medians: Future[npt.NDArray[np.uint8]] | None = None
        self._encoded: list[Future[tuple[bytes, npt.NDArray[np.uint8]]]] = []

    def add(self, rows: npt.NDArray[np.uint8]) -> None:
        self._waiting.append(rows.view("<u2"))
        if self._medians is not None or sum(map(len, self._waiting)) >= _ROWS_BEFORE_MEDIANS:
            self._begin()

    def finish(self) -> dict[str, list[npt.NDArray[np.uint8]]]:
        medians = self._begin()
        pieces: list[npt.NDArray[np.uint8]] = []
        frames = np.empty((len(self._encoded), 3), dtype="<i8")
        position = 0
        for n, encoded in enumerate(self._encoded):
            frame, signs = encoded.result()
            frames[n] = position, len(frame), position + len(frame)
            position += len(frame) + signs.size
            pieces += [np.frombuffer(frame, dtype=np.uint8), signs.reshape(-1)]
        return {
            f"{self._name}.frames": [frames.reshape(-1).view(np.uint8)],
            f"{self._name}.medians": [medians.result()],
            f"{self._name}.zst": pieces,
        }

    def _begin(self) -> Future[npt.NDArray[np.uint8]]:
        """Have what waits encoded. Gives the medians."""
        if self._medians is None:
            # Before what waits for it: a pool starts its work in the order it got it, so it never waits in vain.
            self._medians = self._pool.submit(_channel_medians, list(self._waiting))
        self._encoded += [self._pool.submit(_encode_sample, rows, self._medians) for rows in self._waiting]
        self._waiting.clear()
        return self._medians


def check(
    name: str, tensors: Mapping[str, npt.NDArray[np.uint8]], offsets: npt.NDArray[np.int64], row_bytes: int
) -> None:
    frames = tensors[f"{name}.frames"].view("<i8").reshape(-1, 3)
    num_elements = np.diff(offsets) * (row_bytes // 2)
    begin, length, raw_begin = frames.T
    ends = raw_begin + num_elements
    starts = np.append(0, ends[:-1])
    bad = np.flatnonzero((begin != starts) | (length <= 0) | (raw_begin != begin + length))
    if len(bad):
        raise ValueError(f"sample {bad[0]}'s frame and raw bytes are not where the one before ends")
    if ends[-1] != tensors[f"{name}.zst"].size:
        raise ValueError(f"{tensors[f'{name}.zst'].size} bytes, and its frames end at {ends[-1]}")


def decode(
    name: str,
    tensors: Mapping[str, npt.NDArray[np.uint8]],
    offsets: npt.NDArray[np.int64],
    row_bytes: int,
    n: int,
    rows: slice,
) -> npt.NDArray[np.uint8]:
    width, num_tokens, num_rows = row_bytes // 2, int(offsets[n + 1] - offsets[n]), rows.stop - rows.start
    begin, length, raw_begin = tensors[f"{name}.frames"].view("<i8")[3 * n : 3 * n + 3].tolist()
    packed = tensors[f"{name}.zst"]
    if not 0 <= begin < begin + length == raw_begin <= packed.size - num_tokens * width:
        raise ValueError(f"frame at byte {begin} of {length} bytes, raw bytes at {raw_begin}: outside the tensor")
    frame = packed[begin:raw_begin]
    _check_frame_size(frame, num_tokens * width)
    signs = packed[raw_begin + rows.start * width : raw_begin + rows.stop * width].reshape(num_rows, width)
    exponents = _decompress(frame, rows.start * width, rows.stop * width, num_tokens * width).reshape(num_rows, width)
    return _join_planes(exponents, signs, tensors[f"{name}.medians"])


def _channel_medians(samples: Sequence[npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint8]:
    """The lower median of each channel's exponents, over an even spread of the samples' rows: uint8 [W]."""
    lengths = np.array([len(sample) for sample in samples])
    ends = np.cumsum(lengths)
    picked = np.unique(np.linspace(0, ends[-1] - 1, min(_MEDIAN_ROWS, int(ends[-1]))).astype(np.int64))
    owners = np.searchsorted(ends, picked, side="right")
    rows = np.stack(
        [samples[n][row] for n, row in zip(owners.tolist(), (picked - (ends - lengths)[owners]).tolist(), strict=True)]
    )  # [R, W]
    middle = (len(rows) - 1) // 2
    exponents = np.ascontiguousarray((rows >> 7).astype(np.uint8).T)  # [W, R]: along rows in memory it is twice as fast
    exponents.partition(middle, axis=1)
    return np.ascontiguousarray(exponents[:, middle])


def _encode_sample(
    rows: npt.NDArray[np.uint16], medians: Future[npt.NDArray[np.uint8]]
) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """rows: bfloat16 as uint16 [T, W] -> the frame of its exponents, and its signs and mantissas, uint8 [T, W]."""
    exponents, signs = _split_planes(rows, medians.result())
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(exponents), signs  # type: ignore[arg-type]


def _split_planes(
    rows: npt.NDArray[np.uint16], medians: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """uint16 [T, W] -> exponents minus medians, and signs with mantissas: uint8 [T, W] each."""
    num_tokens, width = rows.shape
    exponents, signs = np.empty((num_tokens, width), np.uint8), np.empty((num_tokens, width), np.uint8)
    step = max(1, _SPLIT_ELEMENTS // width)
    upper = np.empty((step, width), np.uint8)
    for start in range(0, num_tokens, step):
        block = rows[start : start + step]  # [t, W]
        exponent, sign, high = exponents[start : start + step], signs[start : start + step], upper[: len(block)]
        np.right_shift(block, 7, out=exponent, casting="unsafe")  # the cast drops the sign above the exponent
        np.subtract(exponent, medians, out=exponent)
        np.right_shift(block, 8, out=high, casting="unsafe")
        np.bitwise_and(high, 0x80, out=high)
        np.bitwise_and(block, 0x7F, out=sign, casting="unsafe")
        np.bitwise_or(sign, high, out=sign)
    return exponents, signs


def _join_planes(
    exponents: npt.NDArray[np.uint8], signs: npt.NDArray[np.uint8], medians: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """The inverse of _split_planes, as bytes: uint8 [T, 2W]."""
    num_tokens, width = signs.shape
    rows = np.empty((num_tokens, width), dtype="<u2")
    step = max(1, _JOIN_ELEMENTS // width)
    wide, narrow = np.empty((step, width), np.uint16), np.empty((step, width), np.uint8)
    for start in range(0, num_tokens, step):
        block = rows[start : start + step]  # [t, W]
        t = len(block)
        np.add(exponents[start : start + t], medians, out=narrow[:t])
        np.copyto(block, narrow[:t])
        np.left_shift(block, 7, out=block)
        np.copyto(wide[:t], signs[start : start + t])
        np.multiply(wide[:t], 0x0101, out=wide[:t])  # the byte twice: its sign to bit 15, its mantissa stays
        np.bitwise_and(wide[:t], 0x807F, out=wide[:t])
        np.bitwise_or(block, wide[:t], out=block)
    return rows.view(np.uint8)


def _check_frame_size(frame: npt.NDArray[np.uint8], num_elements: int) -> None:
    # Before anything is decompressed: a forged frame must not decide how much memory is taken.
    try:
        size = zstandard.frame_content_size(frame[:18].tobytes())  # a frame's header has at most 18 bytes
    except zstandard.ZstdError as error:
        raise ValueError(f"no zstandard frame ({error})") from error
    if size != num_elements:
        raise ValueError(f"frame of {size} exponents, expected {num_elements}")


def _decompress(frame: npt.NDArray[np.uint8], start: int, stop: int, size: int) -> npt.NDArray[np.uint8]:
    """Bytes start:stop of what ``frame`` holds. A frame is read from its beginning, and no further than ``stop``."""
    try:
        if (start, stop) == (0, size):
            whole = zstandard.ZstdDecompressor().decompress(frame)  # type: ignore[arg-type]
            return np.frombuffer(whole, dtype=np.uint8)
        window = np.empty(stop - start, np.uint8)
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:  # type: ignore[arg-type]
            reader.seek(start)
            view = memoryview(window)  # type: ignore[arg-type]
            while len(view):
                read = reader.readinto(view)
                if not read:
                    raise ValueError(f"frame ends before byte {stop}")
                view = view[read:]
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged frame ({error})") from error
    return window
