"""What experiment 11 decides: who learns kappa when all have the same training loss."""

from typing import Any

import numpy as np

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.measures import select
from kappascope.statistics import Estimate, Floats, Table, median, paired_ratio

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
    half = len(RATES)
    errors, steps = estimates[:half], estimates[half:]
    parts = zip(RATES, errors, steps, strict=True)
    return "; ".join(f"{name} {one:.2f} in {many.value:.0f} steps" for name, one, many in parts)


def ratio_to_sgd(ratio: Estimate, *found: Any) -> str:
    """The paired ratio, then everyone's error."""
    return (
        f"At an overall error of {LEVELS[-1]:g} its error of log kappa is {ratio:.2f} times SGD's "
        f"trial by trial (n = {ratio.n}), each at its tuned rate. Medians of all: {told(*found)}."
    )


def error_of(optimizer: str) -> Measure:
    """The median error of log kappa."""
    return lambda found: median(judged(found, optimizer, LOG))


ALL = (*map(error_of, RATES), *map(steps_of, RATES))
CLAIMS = (
    Claim("e11.adam", "At equal training loss Adam leaves a larger error of log kappa than SGD.",
          "R Q1, W9; P 4.2", against_sgd("adam"), Above(1), ratio_to_sgd, also=ALL),
    Claim("e11.momentum", "At equal training loss momentum leaves the error of log kappa that SGD "
          "leaves, within a factor of two.",
          "R W9", against_sgd("momentum"), Between(0.5, 2), ratio_to_sgd, also=ALL),
    Claim("e11.adamw", "At equal training loss AdamW leaves a larger error of log kappa than SGD.",
          "R Q1, W9", against_sgd("adamw"), Above(1), ratio_to_sgd, also=ALL),
    Claim("e11.muon", "At equal training loss Muon, whose steps move all singular directions "
          "alike, leaves a smaller error of log kappa than SGD.",
          "R Q1; P 4.3", against_sgd("muon"), Below(1), ratio_to_sgd, also=ALL),
    Claim(
        "e11.persists",
        "Under every optimizer kappa's error exceeds that of the row norms at equal training loss.",
        "R Q1, W9; P 6(3)",
        tuple(map(over_norms, RATES)),
        (Above(1),) * len(RATES),
        lambda *found: "In the median trial kappa's error is this multiple of the row norms', at "
        f"an overall error of {LEVELS[-1]:g} and tuned rates: {told(*found)}.",
        also=tuple(map(steps_of, RATES)),
    ),
)  # fmt: skip
