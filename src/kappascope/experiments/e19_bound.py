"""Experiment 19: a proven bound against measurement.

How fast does plain SGD reduce the error of log kappa, and does the bound of docs/theory.md say so?
It holds with a probability of 0.95 at least, on the condition that the disturbance e it allows for
is below the target's smallest singular value. In *hindsight*, with the norm of W_t / (1 - p) - W*,
p = (1 - lr)^t, in place of e, it always holds (Weyl).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kappascope import spectra
from kappascope.components import Components
from kappascope.experiments.e19_claims import (
    CELLS,
    CLAIMS,
    HUNDRED,
    LOG,
    NARROW,
    OTHERS,
    PAPER,
    TEN,
    THOUSAND,
    TIMES,
)  # fmt: skip
from kappascope.figures import MARKS, Panel, paths, sheet
from kappascope.lab import Batch, Experiment
from kappascope.measures import Where
from kappascope.networks import Matrix
from kappascope.tasks import Random, Regression, Streams, Structure, heterogeneous, start
from kappascope.theory import Relaxation, log_kappa_bound, weyl_bound
from kappascope.training import descend, outcome, rows

RISK = 0.05


def conditioned(random: Random, size: int, kappa: float) -> Tensor:
    """Random singular vectors, and singular values from 1 down to 1 / kappa, evenly in logs."""
    left, right = (torch.linalg.qr(random.normal(size, size)).Q for _ in range(2))
    values = kappa ** -torch.linspace(0, 1, size, dtype=left.dtype)
    return left * values @ right.mT


TARGETS: dict[str, Structure] = {
    PAPER: heterogeneous,
    TEN: partial(conditioned, kappa=10.0),
    HUNDRED: partial(conditioned, kappa=100.0),
    THOUSAND: partial(conditioned, kappa=1000.0),
}


def trials(
    streams: Streams, size: int, structure: str, noise: float, learning_rate: float
) -> Iterator[Batch]:
    """Learn one target, and bound the error on the way."""
    target, random = Components(TARGETS[structure](streams.random(), size)), streams.random(1)
    setting, origin = Relaxation(size, learning_rate, noise=noise), start(random, size)
    batches = Regression(target.matrix, noise=noise).batches(random)
    looks = [round(time / learning_rate) for time in TIMES]
    for step in descend(Matrix(origin), batches, learning_rate, steps=looks[-1]):
        if step.index in looks:
            look = outcome if step.batch is None else rows
            yield from look(step.weight, target, epoch=step.index, quantity="measured")
            for row in bounds(step.weight, target, origin, setting, step.index):
                yield {"epoch": step.index, **row}


def bounds(
    weight: Tensor, target: Components, origin: Tensor, setting: Relaxation, step: int
) -> Iterator[Batch]:
    """Both bounds, NaN where their condition does not hold, and the norm that hindsight knows."""
    rest = weight / (1 - setting.mean(step)) - target.matrix
    norm, s = spectra.singular_values(rest)[:, 0], target.singular_values
    yield {"component": "disturbance", "value": norm / s[:, -1]}  # below 1: the condition
    found = {
        "bound": log_kappa_bound(setting, target.matrix, origin, step, RISK),
        "hindsight": weyl_bound(norm, s[:, 0], s[:, -1]),
    }
    for quantity, bound in found.items():
        known = torch.where(bound.isfinite(), bound, torch.nan)
        yield {"quantity": quantity, "component": LOG, "error": known}


def against(size: int, structure: str, noise: float) -> Panel:
    """Measurement under the two bounds."""
    where: Where = {"size": size, "structure": structure, "noise": noise, "learning_rate": 0.01}
    title = f"{structure}, size {size}, {'with' if noise else 'no'} label noise"
    return paths(LOG, split="quantity", title=title, seed=range(32), **where)


EXPERIMENT = Experiment(
    number=19,
    title="A bound on the rate",
    section="review W3(c)",
    question=__doc__,
    grid=(*CELLS, *OTHERS),
    trials=trials,
    own=96,  # from 72 on, none above the bound is more than 95 %
    effort=12.0,
    claims=CLAIMS,
    plot=sheet(
        *(against(32, PAPER, noise) for noise in (0.0, 0.01)),
        *(against(16, HUNDRED, noise) for noise in (0.0, 0.01)),
        paths("disturbance", column="value", split="structure", seed=range(32), learning_rate=0.01,
              **NARROW, title="Disturbance / smallest σ: condition below 1"),
        paths("disturbance", column="value", split="learning_rate", seed=range(32),
              structure=THOUSAND, **NARROW, title="The same for kappa 1000, by learning rate"),
        marks=f"{MARKS} Bounds are drawn for the trials in which their condition holds.",
    ),
    quick={"own": 6},
)  # fmt: skip
