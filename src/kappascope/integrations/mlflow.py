"""The readings of a monitor as metrics in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


class MLflowSink:
    """A sink that logs into the run of MLflow that is active, or the one of the given id."""

    def __init__(self, run_id: str | None = None) -> None:
        self.mlflow, self.run_id = import_module("mlflow"), run_id

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one reading."""
        self.mlflow.log_metrics(dict(values), step=step, run_id=self.run_id)
