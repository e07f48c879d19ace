"""Rows of networks of digits, made by hand with a known relation of kappa and outcome."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kappascope.lab.table import Table
from kappascope.studies.digits import claims, study
from kappascope.studies.digits.model import (
    OUTCOMES,
)


def made(error: Callable[..., Any], count: int = 80, seeds: int = 6) -> Table:
    """Rows of networks whose error is a function of log kappa, log norm and noise."""
    random = np.random.default_rng(7)
    rows = []
    names = [*claims.NORMS, *claims.OTHERS, "stable_rank"]
    for setting in study.drawn(count):
        kappa, norm = random.standard_normal(2)
        norm += 0.5 * kappa  # kappa is a shadow of the norm
        for seed in range(seeds):
            k, s = kappa + random.standard_normal(), norm + random.standard_normal()
            s += 0.5 * k
            values = {("condition_number", "mean"): k, ("condition_number", "max"): k}
            values |= {(name, "mean"): random.standard_normal() for name in names}
            values |= {("spectral_norm", "mean"): s, ("train_loss", ""): 0.009}
            values |= {("condition_number", where): k for where in ("0", "start", "written")}
            for outcome in OUTCOMES:
                values[outcome, ""] = error(k, s, 0.5 * random.standard_normal())
            if seed == 0 and setting["draw"] == 0:
                values["train_loss", ""] = 0.5
            rows += [
                {"seed": seed, **setting, "component": c, "matrix": m or None, "value": float(v)}
                for (c, m), v in values.items()
            ]
    return Table.of(rows)
