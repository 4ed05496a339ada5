"""Tensors out of files that others wrote: safetensors, NumPy's, torch.save's; nothing but tensors is ever unpickled."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

from eyas.taps.errors import EyasError

SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt")

_LFS_POINTER = b"version https://git-lfs"


class TensorFileError(EyasError):
    """A file that cannot be read as tensors, or not safely. ``file`` is it, ``what`` the finding."""

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(f"{file}: {what}")
        self.file, self.what = file, what


def read_tensor_file(file: Path) -> Any:
    """What a file holds: a dict by name (safetensors, .npz), an array (.npy), or whatever torch.save was given.

    That may be tensors, numbers, strings, lists and dicts. A ``.gz`` behind the suffix is unpacked in memory.

    Tensors are on the CPU, mapped where the format allows: what is not touched is not read. Raises TensorFileError.
    """
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise TensorFileError(file, "is no regular file")
    packed = file.suffix == ".gz"
    suffix = Path(file.stem).suffix if packed else file.suffix
    try:
        with open(file, "rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise TensorFileError(file, "is a Git LFS pointer, not the file itself: fetch it (git lfs pull)")
        content = io.BytesIO(gzip.decompress(file.read_bytes())) if packed else None
        if suffix == ".safetensors":
            return load_file(file) if content is None else load(content.getvalue())
        if suffix in (".npy", ".npz"):
            # "c": mapped without a way back to the file, and torch takes the array without a warning, as writable.
            loaded = np.load(content or file, allow_pickle=False, mmap_mode="c" if content is None else None)
            return loaded if suffix == ".npy" else dict(loaded)
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        mapped = True if content is None and zipfile.is_zipfile(file) else None
        return torch.load(content or file, weights_only=True, map_location="cpu", mmap=mapped)
    except pickle.UnpicklingError as error:
        raise TensorFileError(
            file,
            "is no torch file, or holds Python objects beside tensors, which loading would run: expected tensors, "
            "lists and dicts only. Save those alone, best as safetensors",
        ) from error
    except (
        SafetensorError,
        OSError,
        ValueError,
        LookupError,
        EOFError,
        RuntimeError,
        zlib.error,
        zipfile.BadZipFile,
        # What NumPy's and torch's own parsers fail with on flipped bytes.
        AssertionError,
        AttributeError,
        TypeError,
        OverflowError,
        struct.error,
        tokenize.TokenError,
    ) as error:
        raise TensorFileError(
            file, f"cannot be read, truncated or damaged ({type(error).__name__}: {error})"
        ) from error
