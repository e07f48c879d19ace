"""The readings of a monitor as curves and histograms in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """A sink that writes into a folder for TensorBoard, or by a writer that exists already.

    ``Monitor("runs/gpt", sinks=[TensorBoardSink("runs/gpt/tensorboard")])``
    """

    def __init__(self, writer: str | Path | Any) -> None:
        self.writer: Any = SummaryWriter(str(writer)) if isinstance(writer, str | Path) else writer

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one reading."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Draw the singular values of each kind of matrix."""
        for name, numbers in values.items():
            self.writer.add_histogram(name, np.asarray(numbers), step)
