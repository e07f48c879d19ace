"""Experiment 11: optimizers at matched convergence.

Does kappa stay unlearned under every optimizer, once none is ahead of the others? Each takes the
same start and batches at several learning rates until its overall error, hence its training loss,
is the same. The first trials tune: the rate at which all of them have arrived first is the optimizer's;
the other trials are judged at that rate.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Adam, AdamW

from kappascope.claims import Above, Below, Claim, Measure
from kappascope.figures import sheet, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import select
from kappascope.networks import Matrix
from kappascope.statistics import Estimate, Floats, Table, median, paired_ratio
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import Descent, Muon, Optimizer, arrivals, rows, train

OPTIMIZERS: dict[str, Callable[[Matrix, float], Optimizer]] = {
    "sgd": Descent,
    "momentum": lambda model, rate: SGD(model.parameters(), lr=rate, momentum=0.9),
    "adam": lambda model, rate: Adam(model.parameters(), lr=rate, fused=True),
    "adamw": lambda model, rate: AdamW(model.parameters(), lr=rate, fused=True),  # decay 0.01
    "muon": Muon,
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
TUNING = 32  # trials, or half of them if there are fewer
ROWS, LOG = "row_norms", "log_condition_number"


def trials(streams: Streams, size: int) -> Iterator[Batch]:
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
        found = arrivals(steps, loss, [level**2 for level in LEVELS])
        for level, arrival in zip(LEVELS, found.values(), strict=True):
            columns = {"optimizer": optimizer, "learning_rate": rate, "level": level}
            yield from rows(arrival.weight, target, **columns)
            yield {**columns, "component": "steps", "value": arrival.step}


def judged(found: Table, optimizer: str, component: str, column: str = "error") -> Floats:
    """The trials that did not tune, at the tuned rate and the lowest level."""
    chosen = select(found, stream="own", optimizer=optimizer, level=LEVELS[-1])
    count = len(chosen.rows["seed"].unique())
    tuning = min(TUNING, count // 2)
    rate = tuned(chosen.where(seed=range(tuning), component="steps"))
    rest = chosen.where(seed=range(tuning, count), component=component, learning_rate=rate)
    return rest.values(column)


def tuned(found: Table) -> float:
    """The rate at which the last trial arrives first; who does not arrive took all the steps."""
    steps = {
        rate: np.max(np.nan_to_num(part.values("value"), nan=PATIENCE))
        for rate, part in found.by("learning_rate").items()
    }
    return float(min(steps, key=lambda rate: steps[rate]))


def against_sgd(optimizer: str) -> Measure:
    """The error of log kappa in those of SGD at the same loss, trial by trial."""
    return lambda found: paired_ratio(judged(found, optimizer, LOG), judged(found, "sgd", LOG))


def over_norms(optimizer: str) -> Measure:
    """Kappa's error in those of the row norms, trial by trial."""
    return lambda found: paired_ratio(
        judged(found, optimizer, "condition_number"), judged(found, optimizer, ROWS)
    )


def steps_of(optimizer: str) -> Measure:
    """How many steps the trials that did not tune take."""
    return lambda found: median(judged(found, optimizer, "steps", "value"))


def told(*found: Any) -> str:
    """Each optimizer beside the steps it takes."""
    *estimates, _ = found
    half = len(OPTIMIZERS)
    errors, steps = estimates[:half], estimates[half:]
    parts = zip(OPTIMIZERS, errors, steps, strict=True)
    return "; ".join(f"{name} {one:.2f} in {many.value:.0f} steps" for name, one, many in parts)


def ratio_to_sgd(ratio: Estimate, *found: Any) -> str:
    """The paired ratio, then everyone's error."""
    return (
        f"At an overall error of {LEVELS[-1]:g} its error of log kappa is {ratio:.2f} times SGD's, "
        f"trial by trial (n = {ratio.n}), each at its tuned rate. The medians of all: {told(*found)}."
    )


def error_of(optimizer: str) -> Measure:
    """The median error of log kappa."""
    return lambda found: median(judged(found, optimizer, LOG))


ALL = (*map(error_of, OPTIMIZERS), *map(steps_of, OPTIMIZERS))
CLAIMS = (
    Claim("e11.adam", "At equal training loss Adam leaves a larger error of log kappa than SGD.",
          "R Q1, W9; P 4.2", against_sgd("adam"), Above(1), ratio_to_sgd, also=ALL),
    Claim("e11.adamw", "At equal training loss AdamW leaves a larger error of log kappa than SGD.",
          "R Q1, W9", against_sgd("adamw"), Above(1), ratio_to_sgd, also=ALL),
    Claim("e11.muon", "At equal training loss Muon, whose steps move all singular directions alike, "
          "leaves a smaller error of log kappa than SGD.",
          "R Q1; P 4.3", against_sgd("muon"), Below(1), ratio_to_sgd, also=ALL),
    Claim(
        "e11.persists",
        "Under every optimizer kappa's error exceeds that of the row norms at equal training loss.",
        "R Q1, W9; P 6(3)",
        tuple(map(over_norms, OPTIMIZERS)),
        (Above(1),) * len(OPTIMIZERS),
        lambda *found: "In the median trial kappa's error is this multiple of the row norms', at "
        f"an overall error of {LEVELS[-1]:g} and tuned rates: {told(*found)}.",
        also=tuple(map(steps_of, OPTIMIZERS)),
    ),
)  # fmt: skip

ORDER = tuple(OPTIMIZERS)
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
    plot=sheet(
        *(
            strips(LOG, by="learning_rate", optimizer=name, level=LEVELS[-1], title=f"{name}")
            for name in ORDER
        ),
        columns=2,
    ),
    quick={"own": 12},
)
