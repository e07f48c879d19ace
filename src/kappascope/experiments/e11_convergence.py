"""Experiment 11: optimizers at matched convergence.

Does kappa stay unlearned under every optimizer, once none is ahead of the others? Each takes the
same start and batches at several learning rates until its overall error, hence its training loss,
is the same. The first trials tune: the rate at which the last of them arrives first is the
optimizer's; the other trials are judged at that rate.
"""

from collections.abc import Callable, Iterator

import torch
from torch.optim import SGD, Adam, AdamW

from kappascope.experiments.e11_claims import CLAIMS, LEVELS, LOG, PATIENCE, RATES
from kappascope.figures import sheet, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import Descent, Muon, Optimizer, arrivals, rows, train

OPTIMIZERS: dict[str, Callable[[Matrix, float], Optimizer]] = {
    "sgd": Descent,
    "momentum": lambda model, rate: SGD(model.parameters(), lr=rate, momentum=0.9),
    "adam": lambda model, rate: Adam(model.parameters(), lr=rate, fused=True),
    "adamw": lambda model, rate: AdamW(model.parameters(), lr=rate, fused=True),  # decay 0.01
    "muon": Muon,
}


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn one target with every optimizer at every rate."""
    target = heterogeneous(streams.random(), size)
    whole = target.square().sum((-2, -1))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (weight - target).square().sum((-2, -1)) / whole

    for optimizer, rate in ((name, rate) for name, rates in RATES.items() for rate in rates):
        random = streams.random(1)  # the same start and batches again
        model = Matrix(start(random, size))
        steps = train(
            model, OPTIMIZERS[optimizer](model, rate), Regression(target).batches(random), PATIENCE
        )
        found = arrivals(steps, loss, [level**2 for level in LEVELS])
        for level, arrival in zip(LEVELS, found.values(), strict=True):
            columns = {"optimizer": optimizer, "learning_rate": rate, "level": level}
            yield from rows(arrival.weight, target, **columns)
            yield {**columns, "component": "steps", "value": arrival.step}


EXPERIMENT = Experiment(
    number=11,
    title="Optimizers at matched convergence",
    section="review W9, Q1",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    own=160,
    effort=50.0,
    claims=CLAIMS,
    plot=sheet(
        *(
            strips(LOG, by="learning_rate", optimizer=name, level=LEVELS[-1], title=f"{name}")
            for name in OPTIMIZERS
        ),
        columns=2,
    ),
    quick={"own": 12},
)
