"""The readings of a monitor as curves in trackio."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


class TrackioSink:
    """A sink that logs into the current run of trackio, which ``trackio.init`` has begun."""

    def __init__(self) -> None:
        self.trackio = import_module("trackio")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one reading."""
        self.trackio.log({**values, "kappascope_step": step})
