"""Experiment 5: training dynamics (Section 4.5).

How do the errors evolve while a matrix is learned? 200 steps, looked at every ten.
"""

from collections.abc import Iterator

import numpy as np

from kappascope.lab.claims import Above, Below, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines
from kappascope.lab.measures import select, typical
from kappascope.lab.statistics import Estimate, falls, median, quantile
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import STEPS, Matrix, descend, outcome, rows
from kappascope.matrix.components import Components

EVERY = 10  # steps between looks


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn one target, with a look at the start, the first step and every tenth."""
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model = Matrix(start(random, size))
    for step in descend(model, Regression(target.matrix).batches(random)):
        look = rows if step.batch else outcome  # the last one shows the spectra too
        if step.index == 1 or step.index % EVERY == 0:
            yield from look(step.weight, target, epoch=step.index)


def curves(rows: Table, component: str) -> Floats:
    """Read the errors of every own trial, look by look."""
    return select(rows, stream="own", component=component).curves("epoch")


def falling(component: str) -> Measure:
    """Measure in how many trials the error is lower at every look than at the one before."""
    return lambda rows: falls(curves(rows, component))


def rises(rows: Table) -> Estimate:
    """Count how often kappa's error rises from one look to the next, in the median trial."""
    return median((np.diff(curves(rows, "condition_number")) > 0).sum(axis=1))


def kappa_quartile(share: float) -> Measure:
    """Measure a quartile of kappa's error at the last step."""
    return lambda rows: quantile(curves(rows, "condition_number")[:, -1], share)


CLAIMS = (
    Claim(
        "e5.smooth-norms",
        "Norm errors fall smoothly and monotonically.",
        "P 4.5",
        measures={
            "rows": falling("row_norms"),
            "columns": falling("column_norms"),
            "last": typical("row_norms", epoch=STEPS),
        },
        expect={"rows": Above(0.95)},
        explain="From one look to the next the row norms' error falls in {rows:.1%} of {rows.n} "
        "trials, and the column norms' in {columns:.1%}. Every step removes a hundredth "
        "of the difference, so that 200 steps leave 0.99^200 = 0.1340. The median error "
        "at step 200 is {last:.4f}.",
        answers=("W8",),
    ),
    Claim(
        "e5.erratic-kappa",
        "The error of kappa is erratic, with high variance.",
        "P 4.5",
        measures={
            "kappa": falling("condition_number"),
            "rises": rises,
            "lower_quartile": kappa_quartile(0.25),
            "upper_quartile": kappa_quartile(0.75),
            "first": typical("condition_number", epoch=0),
            "last": typical("condition_number", epoch=STEPS),
            "gap": falling("spectral_gap"),
        },
        expect={"kappa": Below(0.05)},
        explain="The error of kappa falls from every look to the next in {kappa:.1%} of "
        "{kappa.n} trials. In the median trial it rises {rises.value:.0f} times in 21. "
        "At step 200 half of the trials lie between {lower_quartile.value:.2f} and "
        "{upper_quartile.value:.2f}, and the median has fallen from {first.value:.2f} "
        "to {last.value:.2f}. Kappa is not the only erratic component: the spectral "
        "gap, which Section 4.1 calls well learned, falls throughout in {gap:.1%}.",
        answers=("W8",),
    ),
)

PLOT = sheet(
    paths("row_norms", "condition_number", title="Norms and κ", stream="paper"),
    paths("spectral_gap", "overall_matrix", title="Gap and whole matrix", stream="paper"),
    paths("row_norms", "condition_number", title="Own trials", stream="own", seed=range(40)),
    spectrum_lines(stream="paper"),
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
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 96},  # decide both claims
)
