"""Experiment 7, the cause: whether the condition numbers of layers multiply.

The intervention takes the alleged cause away: layers that start orthogonal have kappa 1 each. If
the layers' condition numbers make the product's error, most of it goes with them. Training on, at
a size that can be trained to the end, tells whether the error is there to stay.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappascope.claims import Below, Claim, Measure
from kappascope.components import Components
from kappascope.figures import paths
from kappascope.lab import Batch, grid
from kappascope.measures import Where, compared, select
from kappascope.networks import DeepLinear
from kappascope.statistics import Estimate, Table, paired_ratio, ratio
from kappascope.tasks import Random, Regression, Streams, heterogeneous, start
from kappascope.training import descend, rows

LOOKS = (0, 300, 1000, 3000, 10_000)  # steps; the paper stops at 300
DEPTHS = (2, 3)
STARTS = {"random start": 32, "orthogonal start": 32}  # trials
SIZE = 20
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
    "holds": "they carry it, as a residue of the random start",
    "fails": "they do not carry it",
    "undecided": "these trials do not tell whether they carry it",
}


def explain(*found: Any) -> str:
    """The product's error without the layers' condition numbers, and as training goes on."""
    two, three, two_left, three_left, both, all_three, verdict = found
    return (
        f"If layers start orthogonal (kappa 1, the same norm) the median kappa error of the "
        f"product at step 300 is {two:.2g} of that from random layers at depth 2 and {three:.2g} "
        f"at depth 3 (size {SIZE}, n = {two.n}): {SO[verdict]}. From step 300 to 10,000 the error "
        f"from random layers falls to {two_left:.2g} and {three_left:.2g} of what it was, the "
        f"product of the layers' kappas to {both:.2g} and {all_three:.2g}."
    )


CLAIM = Claim(
    "e7.amplification",
    "The product's kappa error is amplified because the layers' condition numbers multiply.",
    "P 4.7; S",
    measure=tuple(map(orthogonal, DEPTHS)),
    expect=(Below(0.5), Below(0.5)),
    explain=explain,
    also=(*map(left, DEPTHS), *map(left_of_layers, DEPTHS)),
)

PANEL = paths(
    "condition_number", split="depth", intervention="random start", layer=0,
    title=f"κ error over longer training, size {SIZE}",
)  # fmt: skip
