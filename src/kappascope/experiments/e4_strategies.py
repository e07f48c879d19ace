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
from kappascope.experiments.e4_correctable import CORRECTABLE
from kappascope.experiments.e4_tradeoff import CLAIMS
from kappascope.figures import sheet, spectrum, strips, tail
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import printed
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


figure = partial(printed, seed=range(10))
FIGURES = (
    figure("e4/condition_number/strategy=standard/mean", "1.23", "P 4.4"),
    figure("e4/condition_number/strategy=multipliers/mean", "1.11", "P 4.4"),
    figure("e4/condition_number/strategy=multipliers/improvement", "10 %", "P 4.4, 5.2; S"),
    figure("e4/condition_number/strategy=spectral/mean", "0.29", "P 4.4"),
    figure("e4/condition_number/strategy=spectral/improvement", "77 %", "P abstract, 4.4; S"),
    figure("e4/condition_number/strategy=svd/improvement", "32 %", "P 4.4, 5.2; S"),
    figure("e4/row_norms/strategy=standard/mean", "0.134", "P 4.4"),
    figure("e4/row_norms/strategy=multipliers/mean", "0.044", "P 4.4"),
    figure("e4/row_norms/strategy=multipliers/improvement", "67 %", "P abstract, 4.4; S"),
    figure("e4/row_norms/strategy=spectral/mean", "0.134", "P 4.4"),
    figure("e4/row_norms/strategy=spectral/improvement", "0 %", "P 5.2; S"),
    figure("e4/row_norms/strategy=svd/improvement", "64 %", "P 4.4, 5.2; S"),
)
ARMS = ("standard", "multipliers", "spectral", "svd", "hybrid")
MEANS = {
    "condition_number": {"standard": 1.23, "multipliers": 1.11, "spectral": 0.29},
    "row_norms": {"standard": 0.134, "multipliers": 0.044, "spectral": 0.134},
}

EXPERIMENT = Experiment(
    number=4,
    title="Corrective strategies",
    section="4.4",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=512,  # from 500 on a tail index has an interval
    effort=16.0,
    figures=FIGURES,
    claims=(*CLAIMS, CORRECTABLE),
    plot=sheet(
        strips("row_norms", "condition_number", by="strategy", strategy=ARMS, stream="paper",
               printed=MEANS, title="The paper's ten trials"),
        strips("row_norms", "condition_number", by="strategy", strategy=ARMS, stream="own",
               title="Trials of our own"),
        tail("condition_number", by="strategy", stream="own"),
        spectrum("Singular values, hybrid", strategy="hybrid"),
    ),
    quick={"own": 16},
)  # fmt: skip
