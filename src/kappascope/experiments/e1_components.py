"""Experiment 1: component learning quality (Section 4.1).

Which components of a matrix does gradient descent learn, and how does that change with size? One
matrix, 200 plain steps, all components.
"""

from collections.abc import Iterator

import torch

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, last, outcome


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn a target of one size."""
    # float32 on our own streams: the tail of kappa's error is that of float64 there (tested)
    random = streams.random(dtype=torch.float32)
    target = heterogeneous(random, size)
    random.normal(size, size)  # the paper draws a start here and throws it away
    model = Matrix(start(random, size))
    step = last(descend(model, Regression(target).batches(random)))
    yield from outcome(step.weight, target)


EXPERIMENT = Experiment(
    number=1,
    title="Component learning quality",
    section="4.1",
    question=__doc__,
    grid=grid(size=(32, 64, 128, 256, 512)),
    trials=trials,
    paper=15,
    own={32: 2000, 64: 2000, 128: 1000, 256: 100, 512: 15},
)
