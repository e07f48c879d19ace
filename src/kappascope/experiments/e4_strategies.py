"""Experiment 4: corrective strategies (Section 4.4).

Which correction repairs which component? Four strategies, and the hybrid that the paper and its
slides prescribe but did not measure. The spectral ones are told the target's spectrum.
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
from kappascope.training import Step, descend, last, outcome, together

EVERY = 20  # steps between two corrections of the singular values


def strategies(
    origin: Tensor, spectrum: Tensor
) -> dict[str, Callable[[Iterator[LinearBatch]], Iterator[Step]]]:
    """The arms; each trains from the same start."""
    kappa = floored_condition_number(spectrum)  # without the floor, one trial ends elsewhere
    penalty = partial(condition_penalty, condition_number=kappa)

    def svd_correction(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        for step in descend(model := Matrix(origin), batches):
            if step.index and step.index % EVERY == 0:
                with torch.no_grad():
                    model.weight.copy_(toward_spectrum(model.weight, spectrum))
            yield step

    return {
        "standard": lambda batches: descend(Matrix(origin), batches),
        "multipliers": lambda batches: descend(Multiplied(origin), batches),
        "spectral": lambda batches: descend(Matrix(origin), penalized(batches, penalty)),
        "svd": svd_correction,
        "hybrid": lambda batches: descend(Multiplied(origin), penalized(batches, penalty)),
    }


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every strategy."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    arms = strategies(start(random, size), Components(target).singular_values)
    for strategy, step in last(together(arms, Regression(target).batches(random))).items():
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
    effort=8.0,
)
