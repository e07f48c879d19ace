"""Experiment 6: multipliers across structures (Section 4.6).

Do multipliers help more for some structures of the target than for others? The paper's two arms
share the target alone: ``pairing`` is "paper" for that, and "paired" where they share the start
and the batches too.
"""

from collections.abc import Iterator

from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix, Multiplied
from kappascope.tasks import STRUCTURES, Regression, Streams, start
from kappascope.training import descend, floored, last, outcome, together


def trials(streams: Streams, structure: str, size: int) -> Iterator[Batch]:
    """Learn targets of one structure with and without multipliers."""
    target = STRUCTURES[structure](streams.random(), size)
    task, random, other = Regression(target), streams.random(1), streams.random(1)
    origin = start(random, size)
    arms = {
        "standard": lambda batches: descend(Matrix(origin), batches),
        "multipliers": lambda batches: descend(Multiplied(origin), batches),
    }
    paired = last(together(arms, task.batches(random)))
    other.normal(size, size)  # thrown away in this arm alone: its start and batches are others
    alone = last(descend(Matrix(start(other, size)), task.batches(other)))
    for pairing, steps in {"paired": paired, "paper": {**paired, "standard": alone}}.items():
        for strategy, step in steps.items():
            columns = {"strategy": strategy, "pairing": pairing}
            yield from outcome(step.weight, target, **columns)
            yield from floored(step.weight, target, **columns)


EXPERIMENT = Experiment(
    number=6,
    title="Multipliers across structures",
    section="4.6",
    question=__doc__,
    grid=grid(structure=tuple(STRUCTURES), size=(64,)),
    trials=trials,
    paper=15,
    effort=3.0,
)
