"""Experiment 3: gradient signal (Section 4.3).

How much gradient does each singular value receive, and does that decide what is learned? Every
fifth step, the slope of the batch loss along each singular direction is recorded. Whether its
imbalance keeps kappa from converging is tested by interventions: leave the imbalance and take away
the label noise, then the random start too; or leave both and take away the imbalance.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kappascope.components import Components
from kappascope.corrections import orthogonalized
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.training import Step, descend, last, outcome, rows, sgd, together, train

EVERY = 5  # steps between recordings
NUDGE = 1e-5  # of a singular value, in the paper's forward difference


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Batch]:
    """Follow the singular values of one matrix and the signal they receive."""
    if question:
        yield from interventions(streams, size)
        return
    random = streams.random()
    target = heterogeneous(random, size)
    for step in descend(Matrix(start(random, size)), Regression(target).batches(random)):
        if step.index % EVERY == 0 and isinstance(step.batch, LinearBatch):
            yield from ({"epoch": step.index, **row} for row in signal(step.weight, step.batch))
    yield from outcome(step.weight, target)


def signal(weight: Tensor, batch: LinearBatch) -> Iterator[Batch]:
    """The slope along every singular direction; for three, the paper's difference quotient too."""
    u, s, vt = torch.linalg.svd(weight)
    wanted = Components(batch.task.target).singular_values
    slopes = (u * (batch.gradient(weight) @ vt.mT)).sum(-2)  # u_i' G v_i
    for i, (slope, value, target) in enumerate(zip(slopes.mT, s.mT, wanted.mT, strict=True)):
        yield {"index": i, "component": "gradient", "value": slope}
        yield {"index": i, "component": "singular_value", "value": value, "target": target}
    for i in (0, len(s.mT) // 2, len(s.mT) - 1):
        nudged = weight + NUDGE * u[..., :, [i]] * vt[..., [i], :]
        rise = batch.loss(nudged) - batch.loss(weight)
        yield {"index": i, "component": "signal", "value": rise / NUDGE}


def interventions(streams: Streams, size: int) -> Iterator[Batch]:
    """Take away, one at a time, what may keep kappa from converging."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    origin = start(random, size)

    def alike(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        optimizer = sgd(model := Matrix(origin))
        model.weight.register_hook(orthogonalized)
        for step in train(model, optimizer, batches):
            # falls to zero; all steps together reach the largest singular values, about 3
            optimizer.param_groups[0]["lr"] = 0.03 * (1 - step.index / 200)
            yield step

    arms = {
        "none": lambda batches: descend(Matrix(origin), batches),
        "no noise": lambda batches: descend(Matrix(origin), noiseless(batches)),
        "no noise, no start": lambda batches: descend(Matrix(0 * origin), noiseless(batches)),
        "no imbalance": alike,
    }
    for name, step in last(together(arms, Regression(target).batches(random))).items():
        yield from rows(step.weight, target, intervention=name)


EXPERIMENT = Experiment(
    number=3,
    title="Gradient signal",
    section="4.3",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), question=("cause",)),
    trials=trials,
    paper=lambda setting: 0 if "question" in setting else 1,
    own=lambda setting: 128 if "question" in setting else 0,
)
