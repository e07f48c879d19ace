"""Experiment 9: long training (Section 4.9).

Does kappa's error vanish with longer training? 1000 steps, looked at after the first and every
tenth. Whether what remains is a matter of speed is tested by interventions: train twice as long,
with label noise, without it, and with smaller and smaller steps.
"""

from collections.abc import Iterator

from kappascope.components import Components
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.training import Step, descend, outcome, rows, sgd, together, train

STEPS = 1000
EVERY = 10


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Batch]:
    """Learn one target for long."""
    if question:
        yield from interventions(streams, size)
        return
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model, batches = Matrix(start(random, size)), Regression(target.matrix).batches(random)
    for step in descend(model, batches, steps=STEPS):
        if step.index == 1 or step.index % EVERY == 0:
            yield from rows(step.weight, target, epoch=step.index)
    yield from outcome(step.weight, target)


def interventions(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target for twice as long, in three ways."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    origin = start(random, size)

    def fit(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        return descend(Matrix(origin), batches, steps=2 * STEPS)

    def smaller(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        optimizer = sgd(model := Matrix(origin))
        for step in train(model, optimizer, batches, 2 * STEPS):
            # harmonic once the paper's steps are over: a tenth at the end
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + 9 * max(0, step.index / STEPS - 1))
            yield step

    arms = {
        "none": fit,
        "no noise": lambda batches: fit(noiseless(batches)),
        "smaller steps": smaller,
    }
    for steps in together(arms, Regression(target).batches(random)):
        for name, step in steps.items():
            if step.index and step.index % (STEPS // 4) == 0:
                yield from rows(step.weight, target, intervention=name, epoch=step.index)


EXPERIMENT = Experiment(
    number=9,
    title="Long training",
    section="4.9",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), question=("not-speed",)),
    trials=trials,
    paper=lambda setting: 0 if "question" in setting else 10,
    own=lambda setting: 64 if "question" in setting else 0,
    effort=6.0,
)
