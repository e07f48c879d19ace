"""Whether it is Adam's element-wise rates that spoil the spectrum (Sections 4.2, 5.3).

Tested by an intervention: give Adam one rate for the whole matrix, and look at every trial when
its overall error has come down to the same level, so that none is ahead of the others.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from kappascope.claims import Above, Claim
from kappascope.lab import Batch
from kappascope.measures import Where, compared, typical
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Random, Regression, start
from kappascope.training import Descent, MatrixAdam, Optimizer, Step, rows, together, train

OPTIMIZERS: dict[str, Callable[[Matrix], Optimizer]] = {
    "sgd": Descent,
    "adam": lambda model: Adam(model.parameters(), lr=0.001, fused=True),
    "matrix adam": MatrixAdam,
}
LEVEL = 0.3  # an overall error that all three reach within PATIENCE steps
PATIENCE = 1200


def side_by_side(
    optimizers: tuple[str, ...], target: Tensor, random: Random, steps: int
) -> Iterator[dict[str, Step]]:
    """Train with several optimizers from one start, on the same batches."""
    origin = start(random, target.shape[-1])

    def fit(optimizer: str, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        return train(model := Matrix(origin), OPTIMIZERS[optimizer](model), batches, steps)

    arms = {optimizer: partial(fit, optimizer) for optimizer in optimizers}
    return together(arms, Regression(target).batches(random))


def mechanism(target: Tensor, random: Random) -> Iterator[Batch]:
    """Rows of every trial as it was when its overall error first came down to the level."""
    near = LEVEL * torch.linalg.matrix_norm(target)
    caught = {optimizer: torch.full_like(target, torch.nan) for optimizer in OPTIMIZERS}
    for steps in side_by_side(tuple(OPTIMIZERS), target, random, PATIENCE):
        late = {name: weight[:, 0, 0].isnan() for name, weight in caught.items()}
        late = {name: trials for name, trials in late.items() if trials.any()}
        for optimizer, trials in late.items():
            now = steps[optimizer].weight
            arrived = trials & (torch.linalg.matrix_norm(now - target) <= near)
            caught[optimizer][arrived] = now[arrived]
        if not late:
            break
    for optimizer, weight in caught.items():
        yield from rows(weight, target, optimizer=optimizer, level=LEVEL)


KAPPA: Where = {"component": "log_condition_number", "question": "mechanism"}
ADAM, SGD, ONE_RATE = ({"optimizer": name} for name in ("adam", "sgd", "matrix adam"))

CLAIM = Claim(
    "e2.mechanism",
    "Adam's element-wise rates disrupt coherent spectral structure.",
    "P 4.2, 5.3; S",
    measure=(compared(ADAM, ONE_RATE, **KAPPA), compared(ADAM, SGD, **KAPPA)),
    expect=(Above(1), Above(1)),
    also=tuple(typical(**KAPPA, **optimizer) for optimizer in (ADAM, ONE_RATE, SGD)),
    explain="When the overall error is down to 0.3, log kappa is off by {2:.2f} under Adam, by "
    "{3:.2f} under Adam with one rate for the matrix, and by {4:.2f} under SGD (medians); trial by "
    "trial Adam's error is {0:.2f} times that with one rate and {1:.2f} times SGD's (n = {0.n}).",
)
