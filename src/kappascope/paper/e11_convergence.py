"""Experiment 11: optimizers at matched convergence.

Does kappa stay unlearned under every optimizer, once none is ahead of the others? Each optimizer
gets the same start and batches, at several learning rates, until its overall error, hence its
training loss, is the same. The first trials tune: an optimizer gets the rate at which the last of
them arrives first. The other trials are judged at that rate.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Adam, AdamW

from kappascope.lab.claims import Above, Below, Between, Claim, Estimates, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import sheet, strips
from kappascope.lab.measures import KAPPA, LOG_KAPPA, ROW_NORMS, select
from kappascope.lab.optimizers import Descent, Muon, Optimizer
from kappascope.lab.statistics import Estimate, median, paired_ratio
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, arrivals, rows, train

OPTIMIZERS: dict[str, Callable[[Matrix, float], Optimizer]] = {
    "sgd": Descent,
    "momentum": lambda model, rate: SGD(model.parameters(), lr=rate, momentum=0.9),
    "adam": lambda model, rate: Adam(model.parameters(), lr=rate, fused=True),
    "adamw": lambda model, rate: AdamW(model.parameters(), lr=rate, fused=True),  # decay 0.01
    "muon": lambda model, rate: Muon(model.parameters(), lr=rate, weight_decay=0.0),
}
RATES = {  # half decades about the fastest of a coarse search
    "sgd": (0.03, 0.1, 0.3),
    "momentum": (0.003, 0.01, 0.03),
    "adam": (0.003, 0.01, 0.03),
    "adamw": (0.003, 0.01, 0.03),
    "muon": (0.01, 0.02, 0.03),  # from there on its steps keep it from arriving
}
LEVELS = (0.1, 0.03)  # overall errors at which all are looked at
PATIENCE = 1000  # steps; the slowest needs some 750


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn one target with every optimizer at every rate."""
    target = heterogeneous(streams.random(), size)
    whole = target.square().sum((-2, -1))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (weight - target).square().sum((-2, -1)) / whole

    for optimizer, rate in ((name, rate) for name, rates in RATES.items() for rate in rates):
        random = streams.random(1)  # the same start and batches again
        model = Matrix(start(random, size))
        steps = train(
            model, OPTIMIZERS[optimizer](model, rate), Regression(target).batches(random), PATIENCE
        )
        arrived = arrivals(steps, loss, [level**2 for level in LEVELS])
        for level, arrival in zip(LEVELS, arrived.values(), strict=True):
            columns = {"optimizer": optimizer, "learning_rate": rate, "level": level}
            yield from rows(arrival.weight, target, **columns)
            yield {**columns, "component": "steps", "value": arrival.step}


TUNING = 32  # trials that choose the rate, or half of them if there are fewer


def judged(table: Table, optimizer: str, component: str, column: str = "error") -> Floats:
    """Read the trials that did not tune, at the tuned rate and the lowest level."""
    chosen = select(table, stream="own", optimizer=optimizer, level=LEVELS[-1])
    count = len(chosen.rows["seed"].unique())
    tuning = min(TUNING, count // 2)
    rate = tuned(chosen.where(seed=range(tuning), component="steps"))
    rest = chosen.where(seed=range(tuning, count), component=component, learning_rate=rate)
    return rest.values(column)


def tuned(table: Table) -> float:
    """Choose the rate whose last trial arrives first; who does not arrive took all the steps."""
    steps = {
        rate: np.max(np.nan_to_num(part.values("value"), nan=PATIENCE))
        for rate, part in table.by("learning_rate").items()
    }
    return float(min(steps, key=lambda rate: steps[rate]))


def over_sgd(optimizer: str) -> Measure:
    """Compare the error of log kappa with SGD's at the same loss, trial by trial."""
    return lambda table: paired_ratio(
        judged(table, optimizer, LOG_KAPPA), judged(table, "sgd", LOG_KAPPA)
    )


def over_norms(optimizer: str) -> Measure:
    """Compare kappa's error with that of the row norms, trial by trial."""
    return lambda table: paired_ratio(
        judged(table, optimizer, KAPPA), judged(table, optimizer, ROW_NORMS)
    )


def median_of(optimizer: str, component: str, column: str = "error") -> Measure:
    """Measure the median over the trials that did not tune."""
    return lambda table: median(judged(table, optimizer, component, column))


def with_steps(estimates: Estimates, steps: Estimates) -> str:
    """Write each optimizer's number beside the steps it takes."""
    return "; ".join(
        f"{name} {estimate:.2f} in {steps[name].value:.0f} steps"
        for name, estimate in estimates.items()
    )


def explain_against_sgd(ratio: Estimate, errors: Estimates, steps: Estimates, verdict: str) -> str:
    """Tell the paired ratio, then everyone's error."""
    return (
        f"At an overall error of {LEVELS[-1]:g} its error of log kappa is {ratio:.2f} times SGD's, "
        f"trial by trial (n = {ratio.n}), with each optimizer at its tuned rate. Medians of all: "
        f"{with_steps(errors, steps)}."
    )


def explain_against_norms(ratios: Estimates, steps: Estimates, verdict: str) -> str:
    """Tell kappa's error in multiples of the row norms' for every optimizer."""
    return (
        "In the median trial kappa's error is this multiple of the row norms', at an overall error "
        f"of {LEVELS[-1]:g} and tuned rates: {with_steps(ratios, steps)}."
    )


STEPS = {name: median_of(name, "steps", "value") for name in RATES}


def against_sgd(optimizer: str, **more: Any) -> Claim:
    """Claim something of an optimizer's error of log kappa in multiples of SGD's."""
    errors = {name: median_of(name, LOG_KAPPA) for name in RATES}
    return Claim(
        f"e11.{optimizer}",
        measures={"ratio": over_sgd(optimizer), "errors": errors, "steps": STEPS},
        explain=explain_against_sgd,
        **more,
    )


CLAIMS = (
    against_sgd(
        "adam",
        sentence="At equal training loss Adam leaves a larger error of log kappa than SGD.",
        source="R Q1, W9; P 4.2",
        expect={"ratio": Above(1)},
        answers=("W9(a)", "Q1"),
    ),
    against_sgd(
        "momentum",
        sentence="At equal training loss momentum leaves the same error of log kappa as SGD, "
        "within a factor of two.",
        source="R W9",
        expect={"ratio": Between(0.5, 2)},
        answers=("Q1",),
    ),
    against_sgd(
        "adamw",
        sentence="At equal training loss AdamW leaves a larger error of log kappa than SGD.",
        source="R Q1, W9",
        expect={"ratio": Above(1)},
        answers=("Q1",),
    ),
    against_sgd(
        "muon",
        sentence="At equal training loss Muon leaves a smaller error of log kappa than SGD: its "
        "steps move all singular directions alike.",
        source="R Q1; P 4.3",
        expect={"ratio": Below(1)},
        answers=("Q1",),
    ),
    Claim(
        "e11.persists",
        "Under every optimizer kappa's error exceeds that of the row norms at equal training loss.",
        "R Q1, W9; P 6(3)",
        measures={"ratios": {name: over_norms(name) for name in RATES}, "steps": STEPS},
        expect={"ratios": Above(1)},
        explain=explain_against_norms,
        answers=("W9(a)", "Q1"),
    ),
)

PLOT = sheet(
    *(
        strips(LOG_KAPPA, by="learning_rate", optimizer=name, level=LEVELS[-1], title=name)
        for name in OPTIMIZERS
    ),
    columns=2,
)

EXPERIMENT = Experiment(
    number=11,
    title="Optimizers at matched convergence",
    section="review W9, Q1",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    own=160,
    effort=50.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 12},
)
