"""Experiment 7, the cause: whether the condition numbers of layers multiply.

If that were the cause, the product's error would stay when training goes on. Two interventions, at
a size that can be trained to the end: train on, and start from orthogonal layers, whose kappa is 1.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappascope.claims import ANYWHERE, Above, Claim, Measure, Where, compared, select
from kappascope.components import Components
from kappascope.figures import paths
from kappascope.lab import Batch, grid
from kappascope.networks import DeepLinear
from kappascope.statistics import Estimate, Table, paired_ratio, ratio
from kappascope.tasks import Random, Regression, Streams, heterogeneous, start
from kappascope.training import descend, rows

LOOKS = (0, 300, 1000, 3000, 10_000)  # steps; the paper stops at 300
DEPTHS = (2, 3)
STARTS = {"random start": 64, "orthogonal start": 32}  # trials
SIZE = 16
GRID = grid(network=("linear",), depth=DEPTHS, size=(SIZE,), intervention=STARTS)
KAPPA = {"stream": "own", "component": "condition_number"}


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


def left(depth: int) -> Measure:
    """What is left of the product's kappa error of step 300 in the end."""
    where: Where = {"size": SIZE, "depth": depth, "layer": 0, "intervention": "random start"}
    return compared({"epoch": LOOKS[-1]}, {"epoch": 300}, **where, **KAPPA)


def left_of_layers(depth: int) -> Measure:
    """What is left of the product of the layers' kappas of step 300 in the end."""
    where: Where = {"size": SIZE, "depth": depth, "intervention": "random start", **KAPPA}

    def product(found: Table, epoch: int) -> Any:
        layers = (select(found, epoch=epoch, layer=i + 1, **where) for i in range(depth))
        return np.prod([layer.values("value") for layer in layers], axis=0)

    return lambda found: paired_ratio(product(found, LOOKS[-1]), product(found, 300))


def orthogonal(depth: int) -> Measure:
    """The median kappa error at step 300 from orthogonal layers, over that from random ones."""
    where: Where = {"size": SIZE, "depth": depth, "layer": 0, "epoch": 300, **KAPPA}

    def measure(found: Table) -> Estimate:
        random, turned = (select(found, intervention=name, **where).values() for name in STARTS)
        return ratio(turned, random)

    return measure


SO = {
    "holds": "the error stays",
    "fails": "the error is a residue of the random start, and fades",
    "undecided": "these trials do not tell whether the error stays",
}


def explain(*found: Any) -> str:
    """The product's error beside its layers, as training goes on and from another start."""
    two, three, both, all_three, two_turned, three_turned, verdict = found
    return (
        f"From step 300 to 10,000 (size {SIZE}, n = {two.n}) the product's kappa error falls to "
        f"{two:.2g} of what it was with two layers and {three:.2g} with three, the product of the "
        f"layers' kappas to {both:.2g} and {all_three:.2g}; if layers start orthogonal (kappa 1), "
        f"the median error at step 300 is {two_turned:.2g} and {three_turned:.2g} of that from "
        f"random ones: {SO[verdict]}."
    )


CLAIM = Claim(
    "e7.amplification",
    "The product's kappa error is amplified because the layers' condition numbers multiply.",
    "P 4.7; S",
    measure=(*map(left, DEPTHS), *map(left_of_layers, DEPTHS), *map(orthogonal, DEPTHS)),
    expect=(Above(0.5), Above(0.5), *(ANYWHERE,) * 4),
    explain=explain,
)

PANEL = paths(
    "condition_number", split="depth", intervention="random start", layer=0,
    title=f"κ error over longer training, size {SIZE}",
)  # fmt: skip
