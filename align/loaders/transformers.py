"""Hugging Face transformers: it loads no EAGLE-3 draft (nothing in 5.24.0 mentions one)."""

from eyas.align.loaders.base import Loader

LOADERS: tuple[Loader, ...] = ()
