"""Experiment 5: training dynamics (Section 4.5).

How do the errors evolve while a matrix is learned? 200 steps, looked at every ten.
"""

from collections.abc import Iterator

from kappascope.components import Components
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, outcome, rows

EVERY = 10


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn one target, with a look at the first step and every tenth."""
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model = Matrix(start(random, size))
    for step in descend(model, Regression(target.matrix).batches(random)):
        if step.index == 1 or step.index % EVERY == 0:
            yield from rows(step.weight, target, epoch=step.index)
    yield from outcome(step.weight, target)


EXPERIMENT = Experiment(
    number=5,
    title="Training dynamics",
    section="4.5",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
)
