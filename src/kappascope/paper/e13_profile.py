"""Experiment 13: gradient signal of every singular value.

Do small singular values receive too little gradient to be learned? Along each singular direction
of the target: the slope of the expected loss, that slope in units of the singular value, and its
ratio to the scatter of mini-batches. White inputs, d = 64, the paper's training.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines
from kappascope.lab.measures import select
from kappascope.lab.statistics import Estimate, median, slopes
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, outcome
from kappascope.matrix.spectra import decomposition

LOOKS = (0, 50, 100, 200, 400)
BATCHES = 48  # from which the scatter is measured: known to 10 %
SIZE = 64


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Follow the signal along every singular direction of the target."""
    random = streams.random()
    target = heterogeneous(random, size)
    origin, aside = start(random, size), Regression(target).batches(streams.random(1))
    samples = [next(aside) for _ in range(BATCHES)]
    for step in descend(Matrix(origin), Regression(target).batches(random), steps=LOOKS[-1]):
        if step.index in LOOKS:
            yield from ({"epoch": step.index, **row} for row in profile(step.weight, samples))
        if step.index == 200:
            yield from outcome(step.weight, target)


def profile(weight: Tensor, samples: list[LinearBatch]) -> Iterator[Rows]:
    """Give slope, relative slope and signal-to-noise ratio, by place of the singular value."""
    target = samples[0].task.target
    u, s, vt = decomposition(target)

    def slopes(gradient: Tensor) -> Tensor:
        return (u * (gradient @ vt.mT)).sum(-2)  # u_i' G v_i

    mean = slopes(weight - target)  # the expected gradient, for white inputs
    scatter = torch.stack([slopes(batch.gradient(weight)) for batch in samples]).std(0)
    profiles = {"signal": mean, "relative": mean / s, "certainty": mean / scatter}
    for name, values in profiles.items():
        for place, value in enumerate(values.abs().mT):
            yield {"place": place, "component": name, "value": value, "target": s[:, place]}


def curves(rows: Table, name: str, epoch: int, column: str = "value") -> Floats:
    """Read one line a trial, from the largest singular value to the smallest."""
    return select(rows, stream="own", component=name, epoch=epoch).curves("place", column)


def power(rows: Table) -> Estimate:
    """Estimate the power of the singular value with which the slope grows, in the median trial.

    It is fitted by least squares at step 100, where neither start nor noise dominates.
    """
    columns = ("target", "value")
    return median(slopes(*(np.log(curves(rows, "signal", 100, column)) for column in columns)))


def bottom_to_top(name: str, epoch: int) -> Measure:
    """Compare the smallest singular value's number with the largest's, trial by trial."""
    return lambda rows: median((c := curves(rows, name, epoch))[:, -1] / c[:, 0])


def certainty(place: int) -> Measure:
    """Measure the slope over its scatter at step 100, of the singular value at one place."""
    return lambda rows: median(curves(rows, "certainty", 100)[:, place])


CLAIMS = (
    Claim(
        "e13.proportional",
        "Small singular values receive less gradient: the slope is proportional to the value.",
        "R W3, Q3; P 4.3",
        measures={"power": power, "smallest": bottom_to_top("signal", 100)},
        expect={"power": Between(0.85, 1.15)},
        explain="Across the 64 directions of a trial the slope grows as the singular value to the "
        "power {power:.2f} at step 100 (n = {power.n}). The smallest value receives "
        "{smallest:.2g} of what the largest receives.",
        answers=("W3(a)", "Q3"),
    ),
    Claim(
        "e13.relative",
        "Relative to its value, the smallest singular value is learned as fast as the largest.",
        "R W3, Q3",
        measures={"early": bottom_to_top("relative", 50), "late": bottom_to_top("relative", 200)},
        expect={"early": Between(0.5, 2)},
        explain="At step 50 the slope over the singular value is {early:.2f} times as large for "
        "the smallest as for the largest, at step 200 {late:.2f} times (n = {early.n}). It would "
        "be 1 but for the start, which is no multiple of the target.",
        answers=("W3(a)", "Q3"),
    ),
    Claim(
        "e13.drowned",
        "In one mini-batch noise hides the signal of the smallest singular value, but not that "
        "of the largest.",
        "R W3, Q3",
        measures={
            "smallest": certainty(SIZE - 1),
            "largest": certainty(0),
            "middle": certainty(SIZE // 2),
        },
        expect={"smallest": Below(1), "largest": Above(1)},
        explain="At step 100 the slope is {smallest:.2f} times the scatter of a batch of 64 for "
        "the smallest singular value, {middle:.2f} times for the one in the middle, and "
        "{largest:.2f} times for the largest (n = {smallest.n}). Noise that is new in "
        "every batch averages out over the steps.",
        answers=("W3(a)", "Q3"),
    ),
)

PLOT = sheet(
    *(
        paths(name, over="place", column="value", epoch=100, title=title, seed=range(32))
        for name, title in (
            ("signal", "Slope of the loss"),
            ("relative", "Slope over singular value"),
            ("certainty", "Slope over scatter of batches"),
        )
    ),
    spectrum_lines("Singular values after 200 steps", size=SIZE),
)

EXPERIMENT = Experiment(
    number=13,
    title="Signal of every singular value",
    section="review W3, Q3",
    question=__doc__,
    grid=grid(size=(SIZE,)),
    trials=trials,
    own=96,
    effort=6.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 8},
)
