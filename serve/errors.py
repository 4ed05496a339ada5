"""Errors of this room."""

from __future__ import annotations

from eyas.taps.errors import EyasError


class ServeError(EyasError):
    """A server that cannot be started, stopped or told from others."""
