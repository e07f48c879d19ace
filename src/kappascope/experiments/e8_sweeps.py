"""Do the learning rate or weight decay change what is learned?

The paper's eighth experiment (Section 4.8): experiment 4's standard arm, swept.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.training import Step, last, outcome, sgd, together, train

LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # the paper names the first, 0.01, the last
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
SWEEPS = [(rate, 0.0) for rate in LEARNING_RATES] + [(0.01, decay) for decay in WEIGHT_DECAYS[1:]]


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every learning rate and weight decay."""
    random = streams.random(7)
    target, origin = heterogeneous(streams.random(), size), start(random, size)

    def fit(rate: float, decay: float, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        return train(model, sgd(model, rate, decay), batches)

    arms = {sweep: partial(fit, *sweep) for sweep in SWEEPS}
    final = last(together(arms, Regression(target).batches(random)))
    for (rate, decay), step in final.items():
        yield from outcome(step.weight, target, learning_rate=rate, weight_decay=decay)


EXPERIMENT = Experiment(
    number=8,
    title="Hyperparameters",
    section="4.8",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
)
