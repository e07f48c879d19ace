"""The readings of a monitor as curves and histograms in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


class WandbSink:
    """A sink that logs into a run of Weights & Biases: the one given, or the current one.

    Steps are a metric of their own, ``kappascope_step``, and a reading joins the row that is being
    logged: a run drops rows of an earlier step than its own, and so must not be moved to the next.
    """

    def __init__(self, run: Any = None) -> None:
        self.wandb = import_module("wandb")
        self.run = run if run is not None else self.wandb.run
        if self.run is None:
            raise ValueError("expected a run of wandb, and none is open; call wandb.init() first")
        self._row: int | None = None  # of the run, which the last reading has joined

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one reading."""
        if self._row == self.run.step:  # nobody has logged since: this is a row of its own
            self.run.log({}, commit=True)
        self.run.log({**values, "kappascope_step": step}, commit=False)
        self._row = self.run.step

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Draw the singular values of each kind of matrix."""
        drawn = {name: self.wandb.Histogram(list(numbers)) for name, numbers in values.items()}
        self.run.log({**drawn, "kappascope_step": step}, commit=False)
