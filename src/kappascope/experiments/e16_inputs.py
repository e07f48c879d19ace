"""Experiment 16: inputs that are not white.

Is kappa learned when inputs favour some directions, as those of networks do? The same targets and
starts, shown by white inputs, by a power law, by pixels of handwritten digits and by embeddings of
words in their frequencies. Errors are also taken apart by the principal directions of the inputs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kappascope.components import Components
from kappascope.experiments.e16_claims import CLAIMS, END, LOG, LOOKS, RATE, ROWS, STEEP
from kappascope.figures import paths, sheet, spectrum
from kappascope.inputs import INPUTS, Source
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, outcome, rows


def trials(streams: Streams, size: int, inputs: str) -> Iterator[Batch]:
    """Learn one target from one kind of inputs."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    source, model = INPUTS[inputs](size), Matrix(start(random, size))
    batches = source.batches(Regression(target.matrix), random)
    for step in descend(model, batches, RATE, steps=END):
        if step.index in LOOKS:
            look = outcome if step.batch is None else rows
            yield from look(step.weight, target, epoch=step.index)
            for row in by_direction(step.weight, target.matrix, source):
                yield {**row, "epoch": step.index}


def by_direction(weight: Tensor, target: Tensor, source: Source) -> Iterator[Batch]:
    """What the answers to each principal direction of the inputs lack, and its variance."""
    variances, directions = source.directions()
    lacking, wanted = (
        torch.linalg.vector_norm(matrix @ directions.to(matrix), dim=-2)
        for matrix in (weight - target, target)
    )
    for place, variance in enumerate(variances.tolist()):
        share = lacking[:, place] / wanted[:, place]
        yield {"place": place, "variance": variance, "component": "direction", "value": share}


EXPERIMENT = Experiment(
    number=16,
    title="Inputs",
    section="review W1, W3",
    question=__doc__,
    grid=grid(size=(64,), inputs=tuple(INPUTS)),
    trials=trials,
    own=lambda setting: 40 if setting["inputs"] in STEEP else 128,  # the others are compared
    effort=40.0,
    claims=CLAIMS,
    plot=sheet(
        paths(LOG, split="inputs", title="Error of log κ"),
        paths(ROWS, split="inputs", title="Error of the row norms"),
        paths("direction", over="place", column="value", split="inputs", epoch=200,
              title="What directions lack after 200 steps"),
        spectrum("Singular values, digits", inputs="digits"),
    ),
    quick={"own": lambda setting: 6 if setting["inputs"] in ("white", *STEEP) else 0},
)  # fmt: skip
