"""Experiment 8: hyperparameters (Section 4.8).

Do the learning rate or weight decay change what is learned? Experiment 4's standard arm, swept.
"""

from collections.abc import Iterator
from functools import partial

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, last, outcome, together

LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # the paper names 0.001, 0.01 and 0.05
WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2)
SWEEPS = [(rate, 0.0) for rate in LEARNING_RATES] + [(0.01, decay) for decay in WEIGHT_DECAYS]


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every learning rate and weight decay."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    origin = start(random, size)
    arms = {
        (rate, decay): partial(descend, Matrix(origin), learning_rate=rate, weight_decay=decay)
        for rate, decay in SWEEPS
    }
    for (rate, decay), step in last(together(arms, Regression(target).batches(random))).items():
        yield from outcome(step.weight, target, learning_rate=rate, weight_decay=decay)


EXPERIMENT = Experiment(
    number=8,
    title="Hyperparameters",
    section="4.8",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    effort=5.0,
)
