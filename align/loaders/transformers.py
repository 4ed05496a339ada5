"""Hugging Face transformers: no EAGLE-3 draft is loaded (nothing in 5.24.0 mentions one), so there is nothing to check."""

from eyas.align.loaders.base import Loader

LOADERS: tuple[Loader, ...] = ()
