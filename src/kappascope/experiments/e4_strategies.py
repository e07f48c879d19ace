"""Which correction repairs which component?

The paper's fourth experiment (Section 4.4): four strategies, and the hybrid that the paper and
its slides prescribe but did not measure. The spectral ones are told the target's spectrum.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kappascope.components import Components
from kappascope.corrections import condition_penalty, floored_condition_number, toward_spectrum
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix, Multiplied
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, penalized, start
from kappascope.training import Step, last, outcome, sgd, together, train

EVERY = 20  # steps between two corrections of the singular values
Arm = Callable[[Iterator[LinearBatch]], Iterator[Step]]


def strategies(origin: Tensor, target: Components) -> dict[str, Arm]:
    """The arms; each trains from the same start."""
    kappa = floored_condition_number(target.singular_values)  # unfloored, one trial ends elsewhere
    penalty = partial(condition_penalty, condition_number=kappa)

    def fit(model: Matrix, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        return train(model, sgd(model), batches)

    def svd_correction(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        for step in fit(model, batches):
            if step.index and step.index % EVERY == 0:
                with torch.no_grad():
                    model.weight.copy_(toward_spectrum(model.weight, target.singular_values))
            yield step

    return {
        "standard": lambda batches: fit(Matrix(origin), batches),
        "multipliers": lambda batches: fit(Multiplied(origin), batches),
        "spectral": lambda batches: fit(Matrix(origin), penalized(batches, penalty)),
        "svd": svd_correction,
        "hybrid": lambda batches: fit(Multiplied(origin), penalized(batches, penalty)),
    }


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every strategy."""
    random = streams.random(7)
    target = heterogeneous(streams.random(), size)
    arms = strategies(start(random, size), Components(target))
    final = last(together(arms, Regression(target).batches(random)))
    for strategy, step in final.items():
        yield from outcome(step.weight, target, strategy=strategy)


EXPERIMENT = Experiment(
    number=4,
    title="Corrective strategies",
    section="4.4",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=300,
)
