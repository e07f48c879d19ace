"""What heads of attention compare (QK) and write (OV), beside products of random factors.

A head can trade shape between query and key, and between value and output, without changing what
it computes: kappa of one of these matrices says little, kappa of the product is the same in every
gauge. Chance is a product of Gaussian factors of the same shapes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kappascope.lab.claims import Measure
from kappascope.lab.measures import LOG_KAPPA, select
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import generator
from kappascope.matrix.spectra import product_singular_values

PRODUCTS = ("QK", "OV")
HEAD_SIZE = 16  # rows of a head in the GPT study, at every width
DRAWS = 400  # the standard error of the median log kappa is then below 0.01


@cache
def chance_log_kappa(width: int) -> float:
    """Return the median log kappa of a Gaussian factor of a head's size times the other one.

    >>> round(float(np.exp(chance_log_kappa(64))), 1)
    4.0
    """
    random = generator("random factors", width, HEAD_SIZE)
    left = torch.randn(DRAWS, width, HEAD_SIZE, generator=random, dtype=torch.float64)
    right = torch.randn(DRAWS, HEAD_SIZE, width, generator=random, dtype=torch.float64)
    values, _ = product_singular_values(left, right)
    return float((values[:, 0] / values[:, -1]).log().median())


def excess_by_seed(rows: Table, kind: str, **where: Any) -> dict[int, Floats]:
    """List by how much log kappa of every head exceeds chance at the end of training, by seed."""
    chosen = select(rows, component=LOG_KAPPA, kind=kind, correction="alone", **where)
    last = chosen.where(epoch=max(chosen.rows["epoch"].to_pylist()))
    width = int(last.rows["width"][0].as_py())
    return {
        seed: heads.values("value") - chance_log_kappa(width)
        for seed, heads in last.by("seed").items()
    }


def head_excess(kind: str, optimizer: str, stage: str = "compare") -> Measure:
    """Measure by how much the median head's log kappa exceeds chance, at the best learning rate.

    Each seed gives one number, the median over its heads. On the logarithmic scale these are not
    skewed, and Student's interval is taken over seeds.
    """

    def measure(rows: Table) -> Estimate:
        seeds = excess_by_seed(rows, kind, optimizer=optimizer, stage=stage)
        return over_seeds([np.median(heads) for heads in seeds.values()], "excess of log kappa")

    return measure


def head_multiple(kind: str, optimizer: str, stage: str = "compare") -> Measure:
    """Measure how many times chance's kappa the median head has: the exponential of the excess."""
    excess = head_excess(kind, optimizer, stage)
    return lambda rows: excess(rows).map(lambda x: float(np.exp(x)), "multiple of chance")


def multiples_by_rate(rows: Table, kind: str, optimizer: str) -> dict[float, Floats]:
    """List how many times chance's kappa the heads have after tuning, by learning rate.

    Tuning has one seed: its heads are no sample of seeds, and there is no interval.
    """
    rates = select(rows, stage="tune", optimizer=optimizer, correction="alone").by("rate")
    return {
        rate: np.exp(np.concatenate([*excess_by_seed(part, kind).values()]))
        for rate, part in rates.items()
    }
