"""The arms that are compared, and the learning rate that tuning finds for each.

An arm is an optimizer with a correction, or alone. Every arm is tuned at the same number of rates.
"""

from __future__ import annotations

import math

import numpy as np

from kappascope.lab.measures import select
from kappascope.lab.table import Table

OPTIMIZERS = ("AdamW", "Muon")
REMEDIES = ("multipliers", "penalty", "hybrid", "bound")
ARMS = tuple((o, c) for o in OPTIMIZERS for c in ("alone", *REMEDIES))
LOSS = "validation_loss"


def arm_rows(
    rows: Table, optimizer: str, correction: str, component: str = LOSS, stage: str = "compare"
) -> Table:
    """Select a component of an arm's runs in a stage: at all rates, or at the best one."""
    arm = {"stage": stage, "optimizer": optimizer, "correction": correction}
    return select(rows, **arm, component=component)


def losses_by_rate(rows: Table, optimizer: str, correction: str) -> dict[float, float]:
    """List the validation loss of an arm at every rate tried; infinite if it diverged."""
    rates = arm_rows(rows, optimizer, correction, stage="tune").by("rate").items()
    return {
        rate: float(np.nan_to_num(trials.values("value")[0], nan=math.inf))
        for rate, trials in rates
    }


def best_rate(rows: Table, optimizer: str, correction: str) -> float:
    """Return the rate with the lowest validation loss; of two alike, the lower rate."""
    losses = losses_by_rate(rows, optimizer, correction)
    return min(losses, key=lambda rate: (losses[rate], rate))


def best_correction(rows: Table) -> str:
    """Return the correction, Hybrid aside, with the lowest tuned loss under AdamW."""
    others = [name for name in REMEDIES if name != "hybrid"]
    return min(others, key=lambda name: min(losses_by_rate(rows, "AdamW", name).values()))
