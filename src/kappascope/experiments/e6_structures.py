"""Do multipliers help more for some structures of the target than for others?

The paper's sixth experiment (Section 4.6). Its two arms share the target alone: ``pairing`` is
"paper" for that and "paired" where they share the start and the batches too.
"""

from collections.abc import Iterator

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix, Multiplied
from kappascope.tasks import STRUCTURES, LinearBatch, Regression, Streams, start
from kappascope.training import Step, last, outcome, sgd, together, train


def trials(streams: Streams, structure: str, size: int) -> Iterator[Batch]:
    """Learn targets of one structure with and without multipliers."""
    target = STRUCTURES[structure](streams.random(), size)
    task, random, other = Regression(target), streams.random(1), streams.random(1)
    origin = start(random, size)

    def standard(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Matrix(origin)
        return train(model, sgd(model), batches)

    def multipliers(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        model = Multiplied(origin)
        return train(model, sgd(model), batches)

    arms = {"standard": standard, "multipliers": multipliers}
    final = last(together(arms, task.batches(random)))
    for strategy, step in final.items():
        yield from outcome(step.weight, target, strategy=strategy, pairing="paired")
    yield from outcome(final["multipliers"].weight, target, strategy="multipliers", pairing="paper")

    other.normal(size, size)  # thrown away in this arm alone: its start and batches are others
    model = Matrix(start(other, size))
    step = last(train(model, sgd(model), task.batches(other)))
    yield from outcome(step.weight, target, strategy="standard", pairing="paper")


EXPERIMENT = Experiment(
    number=6,
    title="Multipliers across structures",
    section="4.6",
    question=__doc__,
    grid=grid(structure=tuple(STRUCTURES), size=(64,)),
    trials=trials,
    paper=15,
)
