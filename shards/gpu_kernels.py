"""Whether kernels of our own can run on a GPU here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil


@functools.cache
def can_compile_kernels() -> bool:
    """Whether Triton is there, and finds a C compiler for what launches its kernels (its runtime/build.py): images that
    are made to run torch alone have none, and torch's own operations do the same there, more slowly."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(has_compiler) and importlib.util.find_spec("triton") is not None
