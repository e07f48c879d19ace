"""Does Adam learn the components that SGD does not?

The paper's second experiment (Section 4.2): the same targets, starts and batches for both. Its
explanation is tested by an intervention: every trial is looked at when its overall error has come
down to the same level, under SGD, Adam, and an Adam with one rate for the whole matrix.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Random, Regression, Streams, heterogeneous, start
from kappascope.training import Step, last, outcome, rows, sgd, together, train

LEVELS = (0.5, 0.3)  # overall errors that all three reach within PATIENCE steps
PATIENCE = 900


class MatrixAdam(Optimizer):
    """Adam with the second moment averaged over the matrix: one rate for all of its entries."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter."""
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                m, v = self.state[p].setdefault("moments", (torch.zeros_like(p), p.new_zeros(1)))
                m = 0.9 * m + 0.1 * p.grad
                v = 0.999 * v + 0.001 * p.grad.square().mean((-2, -1), keepdim=True)
                self.state[p]["moments"] = m, v
                rate = (v / (1 - 0.999 ** group["t"])).sqrt() + 1e-8
                p.sub_(group["lr"] * m / (1 - 0.9 ** group["t"]) / rate)


OPTIMIZERS: dict[str, Callable[[Matrix], Optimizer]] = {
    "sgd": sgd,
    "adam": lambda model: Adam(model.parameters(), lr=0.001, fused=True),
    "matrix adam": lambda model: MatrixAdam(model.parameters(), lr=0.001),
}


def side_by_side(
    names: tuple[str, ...], target: Tensor, random: Random, steps: int
) -> Iterator[dict[str, Step]]:
    """Train with several optimizers from one start, on the same batches."""
    origin = start(random, target.shape[-1])

    def fit(name: str, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        return train(model, OPTIMIZERS[name](model), batches, steps)

    arms = {name: partial(fit, name) for name in names}
    return together(arms, Regression(target).batches(random))


def trials(streams: Streams, size: int, intervention: str | None = None) -> Iterator[Batch]:
    """Learn the same target with every optimizer."""
    target, random = heterogeneous(streams.random(), size), streams.random(50)
    if intervention == "same overall error":
        yield from matched(side_by_side(tuple(OPTIMIZERS), target, random, PATIENCE), target)
        return
    for optimizer, step in last(side_by_side(("sgd", "adam"), target, random, 200)).items():
        yield from outcome(step.weight, target, optimizer=optimizer)


def matched(run: Iterator[dict[str, Step]], target: Tensor) -> Iterator[Batch]:
    """Rows of every trial as it was when its overall error first came down to a level."""
    norm = torch.linalg.matrix_norm
    waiting = {(name, level): torch.full_like(target, torch.nan) for name in OPTIMIZERS for level in LEVELS}
    for steps in run:
        for (name, level), weight in waiting.items():
            now = steps[name].weight
            arrived = (norm(now - target) <= level * norm(target)) & weight[:, 0, 0].isnan()
            weight[arrived] = now[arrived]
    for (name, level), weight in waiting.items():
        yield from rows(weight, target, optimizer=name, level=level)


EXPERIMENT = Experiment(
    number=2,
    title="SGD against Adam",
    section="4.2",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), intervention=("same overall error",)),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 15,
    own=lambda setting: 128 if "intervention" in setting else 0,
)
