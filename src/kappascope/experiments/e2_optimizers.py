"""Experiment 2: SGD against Adam (Section 4.2).

Does Adam learn the components that SGD does not? Both get the same targets, starts and batches.
The paper's explanation is tested by an intervention: every trial is looked at when its overall
error has come down to the same level, under SGD, Adam, and an Adam with one rate for the matrix.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Random, Regression, Streams, heterogeneous, start
from kappascope.training import MatrixAdam, Step, last, outcome, rows, sgd, together, train

OPTIMIZERS: dict[str, Callable[[Matrix], Optimizer]] = {
    "sgd": sgd,
    "adam": lambda model: Adam(model.parameters(), lr=0.001, fused=True),
    "matrix adam": lambda model: MatrixAdam(model.parameters(), lr=0.001),
}
LEVELS = (0.5, 0.3)  # overall errors that all three reach within PATIENCE steps
PATIENCE = 900


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Batch]:
    """Learn the same target with every optimizer."""
    target, random = heterogeneous(streams.random(), size), streams.random(50)
    if question:
        yield from matched(side_by_side(tuple(OPTIMIZERS), target, random, PATIENCE), target)
        return
    for optimizer, step in last(side_by_side(("sgd", "adam"), target, random, 200)).items():
        yield from outcome(step.weight, target, optimizer=optimizer)


def side_by_side(
    optimizers: tuple[str, ...], target: Tensor, random: Random, steps: int
) -> Iterator[dict[str, Step]]:
    """Train with several optimizers from one start, on the same batches."""
    origin = start(random, target.shape[-1])

    def fit(optimizer: str, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        return train(model := Matrix(origin), OPTIMIZERS[optimizer](model), batches, steps)

    arms = {optimizer: partial(fit, optimizer) for optimizer in optimizers}
    return together(arms, Regression(target).batches(random))


def matched(run: Iterator[dict[str, Step]], target: Tensor) -> Iterator[Batch]:
    """Rows of every trial as it was when its overall error first came down to a level."""
    norm = torch.linalg.matrix_norm
    caught = {
        (optimizer, level): torch.full_like(target, torch.nan)
        for optimizer in OPTIMIZERS
        for level in LEVELS
    }
    for steps in run:
        for (optimizer, level), weight in caught.items():
            now = steps[optimizer].weight
            arrived = (norm(now - target) <= level * norm(target)) & weight[:, 0, 0].isnan()
            weight[arrived] = now[arrived]
    for (optimizer, level), weight in caught.items():
        yield from rows(weight, target, optimizer=optimizer, level=level)


EXPERIMENT = Experiment(
    number=2,
    title="SGD against Adam",
    section="4.2",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), question=("mechanism",)),
    trials=trials,
    paper=lambda setting: 0 if "question" in setting else 15,
    own=lambda setting: 128 if "question" in setting else 0,
)
