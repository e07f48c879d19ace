"""Experiment 8: hyperparameters (Section 4.8).

Do the learning rate or weight decay change what is learned? Experiment 4's standard arm, swept.
"""

from collections.abc import Iterator
from functools import partial

from kappascope.experiments.e8_claims import CLAIMS, SWEEPS
from kappascope.figures import errors, sheet, spectrum
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import printed
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, last, outcome, together


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every learning rate and weight decay."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    origin = start(random, size)
    arms = {
        (rate, decay): partial(descend, Matrix(origin), learning_rate=rate, weight_decay=decay)
        for rate, decay in SWEEPS
    }
    for (rate, decay), step in last(together(arms, Regression(target).batches(random))).items():
        yield from outcome(step.weight, target, learning_rate=rate, weight_decay=decay)


rate = partial(printed, weight_decay=0.0, seed=range(10))
decay = partial(printed, learning_rate=0.01, seed=range(10))
FIGURES = (
    rate("e8/condition_number/lr=0.001/ratio", "1.0x", "P 4.8"),
    rate("e8/condition_number/lr=0.01/ratio", "9.2x", "P 4.8"),
    rate("e8/condition_number/lr=0.05/ratio", "440x", "P 4.8"),
    decay("e8/condition_number/wd=0/mean", "~1.23", "P 4.8"),
    decay("e8/condition_number/wd=0.0001/mean", "~1.23", "P 4.8"),
    decay("e8/condition_number/wd=0.001/mean", "~1.23", "P 4.8"),
    decay("e8/condition_number/wd=0.01/mean", "~1.23", "P 4.8"),
)

BOTH, GAP = ("condition_number", "row_norms"), "condition_number / row_norms"
EXPERIMENT = Experiment(
    number=8,
    title="Hyperparameters",
    section="4.8",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=300,
    effort=5.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=sheet(
        errors(*BOTH, by="learning_rate", weight_decay=0.0, stream="own"),
        errors(GAP, by="learning_rate", weight_decay=0.0, stream="own",
               title="κ error over norm error", printed={GAP: {0.001: 1.0, 0.01: 9.2, 0.05: 440}}),
        errors(*BOTH, by="weight_decay", learning_rate=0.01, stream="own"),
        spectrum("Singular values, learning rate 0.05", learning_rate=0.05),
    ),
    quick={"own": 8},
)  # fmt: skip
