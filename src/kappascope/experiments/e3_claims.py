"""What experiment 3 decides: the printed figure and the claims of Section 4.3."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kappascope.claims import Between, Claim, Measure
from kappascope.experiments.e3_cause import CLAIM
from kappascope.measures import printed, select
from kappascope.statistics import Table, median

Curves = NDArray[np.float64]


def signals(rows: Table) -> tuple[Curves, Curves]:
    """What the first and the last singular value receive, by trial and recorded step."""
    first, last = (select(rows, component="signal", index=index) for index in (0, 127))
    return first.curves("epoch", "value"), last.curves("epoch", "value")


def quartiles(rows: Table) -> Curves:
    """Between which the middle half of the recorded ratios lies."""
    first, last = signals(rows)
    return np.quantile(np.abs(first / last), (0.25, 0.75))


def own(statistic: Callable[[Curves, Curves], Curves]) -> Measure:
    """The median over trials of a number for each."""
    return lambda rows: median(statistic(*signals(select(rows, stream="own", size=128))))


FIGURES = (
    printed(
        "e3/signal/d=128/quartiles of the ratio", "10-100", "P abstract, 4.3", quartiles, seed=0
    ),
)

CLAIMS = (
    Claim(
        "e3.signal",
        "The largest singular value receives 10-100 times the gradient of the smallest.",
        "P abstract, 4.3; S",
        measure=own(lambda first, last: np.median(np.abs(first / last), axis=1)),
        expect=Between(10, 100),
        also=(
            own(lambda first, last: np.abs(first).mean(axis=1) / np.abs(last).mean(axis=1)),
            own(lambda _, last: (np.diff(np.sign(last)) != 0).sum(axis=1)),
        ),
        explain="In a typical trial (n = {0.n}) the median ratio over 40 records is {0:.0f}; "
        "the smallest value's signal changes its sign {2.value:.0f} times among them. The ratio of "
        "the mean magnitudes is {1:.0f}.",
    ),
    CLAIM,
)
