"""Experiment 15: sensitivity.

Which of the paper's fixed choices decide what is learned of kappa? One is changed at a time, about
the paper's own: learning rate, batch, label noise, scale and kind of the start, the multipliers'
learning rate, the penalty's strength, and the threshold of the effective rank. The same target for
all arms, and the same start and batches where these are not what is changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kappascope.components import Components, errors
from kappascope.corrections import Multipliers, SpectralPenalty
from kappascope.experiments.e4_strategies import fit
from kappascope.experiments.e15_claims import CLAIMS, SWEEPS
from kappascope.figures import sheet, spectrum, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.training import Step, descend, last, outcome, rows, together

Arm = Callable[[Iterator[LinearBatch]], Iterator[Step]]
PAPERS = "the paper's"


def labelled(noise: float, origin: Tensor, batches: Iterator[LinearBatch]) -> Iterator[Step]:
    """Train on the same inputs with labels that are more or less noisy."""
    return descend(Matrix(origin), (replace(b, task=replace(b.task, noise=noise)) for b in batches))


def arms(origin: Tensor, spectrum: Tensor) -> Iterator[tuple[tuple[str, str], Arm]]:
    """Every way of training that sees the same batches, by what is changed and to what."""
    yield ("none", PAPERS), partial(descend, Matrix(origin))
    for level in SWEEPS["learning rate"]:
        yield ("learning rate", level), partial(descend, Matrix(origin), learning_rate=float(level))
    for level in SWEEPS["label noise"]:
        yield ("label noise", level), partial(labelled, float(level), origin)
    for level in SWEEPS["start scale"]:
        yield ("start scale", level), partial(descend, Matrix(float(level) / 0.1 * origin))
    orthogonal = torch.linalg.qr(origin).Q
    kinds = {"orthogonal": orthogonal, "identity": torch.eye(origin.shape[-1]).expand_as(origin)}
    for kind in SWEEPS["start kind"]:  # each with the norm that a Gaussian start has on average
        yield ("start kind", kind), partial(descend, Matrix(0.1 * 2**0.5 * kinds[kind].to(origin)))
    for level in SWEEPS["multiplier rate"]:
        multipliers = Multipliers(rate=float(level), weight_decay=0.0)
        yield ("multiplier rate", level), partial(fit, origin, multipliers)
    for level in SWEEPS["penalty"]:
        penalty = SpectralPenalty(float(level), target=lambda weight: spectrum, band=0.0)
        yield ("penalty", level), partial(fit, origin, penalty)


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn one target in every way."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    origin = start(random, size)
    task = Regression(target.matrix)
    every = dict(arms(origin, target.singular_values))
    for (sweep, level), step in last(together(every, task.batches(random))).items():
        look = outcome if sweep in ("none", "start scale") else rows
        yield from look(step.weight, target, sweep=sweep, choice=level)
        if sweep == "none":
            yield from ranks(step.weight, target.matrix)
    for place, level in enumerate(SWEEPS["batch"]):
        batches = replace(task, rows=int(level)).batches(streams.random(2 + place))
        yield from rows(last(descend(Matrix(origin), batches)).weight, target, sweep="batch",
                        choice=level)  # fmt: skip


def ranks(weight: Tensor, target: Tensor) -> Iterator[Batch]:
    """The error of the effective rank at other thresholds."""
    for level in SWEEPS["threshold"]:
        pair = (Components(matrix, float(level)) for matrix in (weight, target))
        error = errors(*pair)["effective_rank"]
        about = {"sweep": "threshold", "choice": level, "component": "effective_rank"}
        yield {**about, "error": error}


panels = (
    strips("log_condition_number", "row_norms", by="choice", sweep=(sweep, "none"),
           choice=(*levels, PAPERS), title=sweep.capitalize())
    for sweep, levels in SWEEPS.items() if sweep != "threshold"
)  # fmt: skip
EXPERIMENT = Experiment(
    number=15,
    title="Sensitivity",
    section="review W9, detailed comments",
    question=__doc__,
    grid=grid(size=(32,)),  # small, for many trials: ratios of kappa errors scatter widely
    trials=trials,
    own=256,
    effort=45.0,
    claims=CLAIMS,
    plot=sheet(
        *panels,
        spectrum("Singular values, start from zero", sweep="start scale", choice="0"),
    ),
    quick={"own": 8},
)
