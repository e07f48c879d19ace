"""Experiment 5: training dynamics (Section 4.5).

How do the errors evolve while a matrix is learned? 200 steps, looked at every ten.
"""

from collections.abc import Iterator

import numpy as np

from kappascope.claims import Above, Below, Claim, Measure
from kappascope.components import Components
from kappascope.figures import paths, sheet, spectrum
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import select, typical
from kappascope.networks import Matrix
from kappascope.statistics import Floats, Table, falls, median, quantile
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import STEPS, descend, outcome, rows

EVERY = 10


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn one target, with a look at the start, the first step and every tenth."""
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model = Matrix(start(random, size))
    for step in descend(model, Regression(target.matrix).batches(random)):
        look = rows if step.batch else outcome  # the last one shows the spectra too
        if step.index == 1 or step.index % EVERY == 0:
            yield from look(step.weight, target, epoch=step.index)


def curves(rows: Table, component: str) -> Floats:
    """The errors of every own trial, look by look."""
    return select(rows, stream="own", component=component).curves("epoch")


def falling(component: str) -> Measure:
    """In how many trials the error is lower at every look than at the one before."""
    return lambda rows: falls(curves(rows, component))


SMOOTH = Claim(
    "e5.smooth-norms",
    "Norm errors fall smoothly and monotonically.",
    "P 4.5",
    falling("row_norms"),
    Above(0.95),
    "From each look to the next the row norms' error falls in {0:.1%} of {0.n} trials, the column "
    "norms' in {1:.1%}. The norms lack what is not learned yet: a step takes a hundredth of the "
    "difference away, 0.99^200 = 0.1340 is left, and the median error at step 200 is {2:.4f}.",
    also=(falling("column_norms"), typical("row_norms", epoch=STEPS)),
)
ERRATIC = Claim(
    "e5.erratic-kappa",
    "The error of kappa is erratic, with high variance.",
    "P 4.5",
    falling("condition_number"),
    Below(0.05),
    "The error of kappa falls from each look to the next in {0:.1%} of {0.n} trials; in the median "
    "one it rises {1.value:.0f} times in 21. At step 200 half of the trials lie between "
    "{2.value:.2f} and {3.value:.2f}, with the median down from {4.value:.2f} to {5.value:.2f}. "
    "The spectral gap, which Section 4.1 calls well learned, falls throughout in {6:.1%}: what is "
    "erratic is not kappa alone.",
    also=(
        lambda rows: median((np.diff(curves(rows, "condition_number")) > 0).sum(axis=1)),
        lambda rows: quantile(curves(rows, "condition_number")[:, -1], 0.25),
        lambda rows: quantile(curves(rows, "condition_number")[:, -1], 0.75),
        typical("condition_number", epoch=0),
        typical("condition_number", epoch=STEPS),
        falling("spectral_gap"),
    ),
)

EXPERIMENT = Experiment(
    number=5,
    title="Training dynamics",
    section="4.5",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=192,
    effort=3.0,
    claims=(SMOOTH, ERRATIC),
    plot=sheet(
        paths("row_norms", "condition_number", title="Norms and κ", stream="paper"),
        paths("spectral_gap", "overall_matrix", title="Gap and whole matrix", stream="paper"),
        paths("row_norms", "condition_number", title="Own trials", stream="own", seed=range(40)),
        spectrum(stream="paper"),
    ),
    quick={"own": 24},
)
