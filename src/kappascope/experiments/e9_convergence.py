"""Does kappa's error vanish with longer training?

The paper's ninth experiment (Section 4.9): 1000 steps, looked at after the first and every tenth.
Whether what remains is a matter of speed is tested by interventions: train twice as long, with
label noise, without it, and with smaller and smaller steps.
"""

from collections.abc import Iterator

from kappascope.components import Components
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.training import Step, outcome, rows, sgd, together, train

STEPS = 1000
EVERY = 10


def trials(streams: Streams, size: int, intervention: str | None = None) -> Iterator[Batch]:
    """Learn one target for long."""
    if intervention:
        yield from interventions(streams, size)
        return
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model = Matrix(start(random, size))
    for step in train(model, sgd(model), Regression(target.matrix).batches(random), STEPS):
        if step.index == 1 or step.index % EVERY == 0:
            yield from rows(step.weight, target, epoch=step.index)
    yield from outcome(step.weight, target)


def interventions(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target for twice as long, in three ways."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    origin = start(random, size)

    def fit(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        return train(model, sgd(model), batches, 2 * STEPS)

    def decayed(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        optimizer = sgd(model)
        for step in train(model, optimizer, batches, 2 * STEPS):
            # harmonic after the paper's end: down to a tenth at the end
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + 9 * max(0, step.index / STEPS - 1))
            yield step

    arms = {
        "none": fit,
        "no noise": lambda batches: fit(noiseless(batches)),
        "smaller steps": decayed,
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
    grid=grid(size=(128,)) + grid(size=(64,), intervention=("each",)),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: 64 if "intervention" in setting else 0,
)
