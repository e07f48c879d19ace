"""Experiment 4: corrective strategies (Section 4.4).

Which correction repairs which component? Four strategies, and the hybrid that the paper and its
slides prescribe but did not measure. The spectral ones are told the target's spectrum.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.optim import SGD

from kappascope.components import Components
from kappascope.corrections import Correction, Hybrid, Multipliers, SpectralPenalty, SVDCorrection
from kappascope.experiments.e4_correctable import CORRECTABLE
from kappascope.experiments.e4_tradeoff import CLAIMS
from kappascope.figures import sheet, spectrum, strips, tail
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import printed
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.training import Step, last, outcome, together, train


def strategies(spectrum: Tensor) -> dict[str, Correction | None]:
    """The paper's settings; an oracle tells the spectral ones what is to be learned."""
    multipliers = Multipliers(rate=0.1, weight_decay=0.0)
    spectral = SpectralPenalty(0.005, target=lambda weight: spectrum, band=0.0)
    return {
        "standard": None,
        "multipliers": multipliers,
        "spectral": spectral,
        "svd": SVDCorrection(every=20, rate=0.1, target=lambda weight: spectrum),
        "hybrid": Hybrid(multipliers, spectral),
    }


def fit(
    origin: Tensor, correction: Correction | None, batches: Iterator[LinearBatch]
) -> Iterator[Step]:
    """Train from a start, with a correction attached."""
    model = Matrix(origin)
    optimizer = SGD(model.parameters(), lr=0.01)
    with correction.attach(model, optimizer) if correction else nullcontext():
        yield from train(model, optimizer, batches)


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every strategy."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    origin, found = start(random, size), strategies(Components(target).singular_values)
    arms: dict[str, Callable[[Iterator[LinearBatch]], Iterator[Step]]] = {
        name: partial(fit, origin, correction) for name, correction in found.items()
    }
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
    quick={"own": 6},  # give an interval
)  # fmt: skip
