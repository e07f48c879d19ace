"""Experiment 7, the cause: do the condition numbers of layers multiply?

If they did, the product's error would stay as long as theirs do. Two interventions, at a size that
can be trained to the end: train on, and start from orthogonal layers, whose kappa is one.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kappascope.claims import ANYWHERE, Above, Claim, Measure, compared, select
from kappascope.components import Components
from kappascope.lab import Batch
from kappascope.networks import DeepLinear
from kappascope.statistics import Estimate, Table, paired_ratio
from kappascope.tasks import Random, Regression, Streams, heterogeneous, start
from kappascope.training import descend, rows

LOOKS = (0, 300, 1000, 3000, 10_000)  # steps; the paper stops at 300
STARTS = ("random start", "orthogonal start")
SIZE = 16


def layers(random: Random, depth: int, size: int) -> list[Tensor]:
    """Starts whose product has the scale of a single layer's start."""
    return [start(random, size, scale=0.1 ** (1 / depth)) for _ in range(depth)]


def each_layer(model: DeepLinear) -> Iterator[Batch]:
    """The condition numbers of the layers, which have no target of their own."""
    for layer, weight in enumerate(model.layers, start=1):
        kappa = Components(weight).condition_number
        yield {"layer": layer, "component": "condition_number", "value": kappa}


def longer(streams: Streams, depth: int, size: int, intervention: str) -> Iterator[Batch]:
    """Learn for long, from random layers or from orthogonal ones of the same norm."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    starts = layers(random, depth, size)
    if intervention == "orthogonal start":
        starts = [0.1 ** (1 / depth) * 2**0.5 * torch.linalg.qr(layer).Q for layer in starts]
    model, batches = DeepLinear(starts), Regression(target).batches(random)
    for step in descend(model, batches, learning_rate=0.005, steps=LOOKS[-1]):
        if step.index in LOOKS:
            yield from rows(step.weight, target, layer=0, epoch=step.index)
            yield from ({**row, "epoch": step.index} for row in each_layer(model))


def left(depth: int, intervention: str = "random start", last: int = LOOKS[-1]) -> Measure:
    """What is left of the product's kappa error of step 300."""
    where = {"size": SIZE, "depth": depth, "layer": 0, "intervention": intervention}
    return compared({"epoch": last}, {"epoch": 300}, component="condition_number", **where)


def left_of_layers(depth: int) -> Measure:
    """What is left of the product of the layers' kappas of step 300."""

    def kappas(found: Table, epoch: int) -> np.ndarray:
        where = {"size": SIZE, "depth": depth, "intervention": "random start", "epoch": epoch}
        each = (select(found, stream="own", layer=i + 1, **where) for i in range(depth))
        return np.prod([layer.values("value") for layer in each], axis=0)

    def measure(found: Table) -> Estimate:
        return paired_ratio(kappas(found, LOOKS[-1]), kappas(found, 300))

    return measure


SO = {
    "holds": "the error stays with the layers",
    "fails": "what is large at 300 steps is unfinished, not multiplied",
    "undecided": "these trials do not tell whether the error stays",
}


def explain(two: Estimate, three: Estimate, both: Estimate, all_three: Estimate, so: str) -> str:
    """The error of the product beside what the layers would explain."""
    return (
        f"From step 300 to 10,000 (size {SIZE}, n = {two.n}) the product's kappa error falls to "
        f"{two:.2g} of what it was with two layers and to {three:.2g} with three, the product of "
        f"the layers' kappas only to {both:.2g} and {all_three:.2g}: {SO[so]}."
    )


CLAIM = Claim(
    "e7.amplification",
    "The product's kappa error grows because the layers' condition numbers multiply.",
    "P 4.7; S",
    measure=(left(2), left(3), left_of_layers(2), left_of_layers(3)),
    expect=(Above(0.5), Above(0.5), ANYWHERE, ANYWHERE),
    explain=explain,
)
