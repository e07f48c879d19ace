"""What does depth do to the condition number of a product?

The paper's seventh experiment (Section 4.7): one, two and three linear layers that learn one
target, and a ReLU student of a ReLU teacher. ``layer`` 0 is the product of all layers. Whether
layers amplify is tested by interventions at a size that can be trained to the end: train on, and
start from orthogonal layers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kappascope.components import Components
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import DeepLinear, Perceptron
from kappascope.tasks import Random, Regression, Streams, Teacher, heterogeneous, start
from kappascope.training import floored, last, outcome, rows, sgd, train

STEPS = 300
LOOKS = (0, 300, 1000, 3000, 10000)  # steps after which the longer runs are looked at


def trials(
    streams: Streams, network: str, depth: int, size: int, intervention: str | None = None
) -> Iterator[Batch]:
    """Learn with one kind of network."""
    if network == "relu":
        return relu(streams, depth, size)
    if intervention:
        return longer(streams, depth, size, intervention)
    return linear(streams, depth, size)


def layers(random: Random, depth: int, size: int) -> list[Tensor]:
    """Starts whose product has the scale of a single layer's start."""
    return [start(random, size, scale=0.1 ** (1 / depth)) for _ in range(depth)]


def linear(streams: Streams, depth: int, size: int) -> Iterator[Batch]:
    """Learn a matrix as the product of layers."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    model = DeepLinear(layers(random, depth, size))
    optimizer = sgd(model, learning_rate=0.01 if depth == 1 else 0.005)
    step = last(train(model, optimizer, Regression(target).batches(random), STEPS))
    yield from outcome(step.weight, target, layer=0)
    yield from floored(step.weight, target, layer=0)
    yield from each_layer(model)


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
        scale = 0.1 ** (1 / depth) * 2**0.5
        starts = [scale * torch.linalg.qr(layer).Q for layer in starts]
    model = DeepLinear(starts)
    for step in train(model, sgd(model, 0.005), Regression(target).batches(random), LOOKS[-1]):
        if step.index in LOOKS:
            yield from rows(step.weight, target, layer=0, epoch=step.index)
            yield from ({**row, "epoch": step.index} for row in each_layer(model))


def relu(streams: Streams, depth: int, size: int) -> Iterator[Batch]:
    """Learn a ReLU network from another one's answers."""
    hidden, random = streams.random(), streams.random(7)
    teacher = Perceptron([heterogeneous(hidden, size) for _ in range(depth)])
    student = Perceptron([start(random, size) for _ in range(depth)])
    optimizer = sgd(student, learning_rate=0.005)
    last(train(student, optimizer, Teacher(teacher, size).batches(random), STEPS))
    yield from outcome(student.product, teacher.product, layer=0)
    pairs = zip(student.layers, teacher.layers, strict=True)
    for layer, (learned, target) in enumerate(pairs, start=1):
        yield from outcome(learned, target, layer=layer)


EXPERIMENT = Experiment(
    number=7,
    title="Depth",
    section="4.7",
    question=__doc__,
    grid=(
        *grid(network=("linear",), depth=(1, 2, 3), size=(64,)),
        *grid(network=("relu",), depth=(2,), size=(64,)),
        *grid(
            network=("linear",),
            depth=(2, 3),
            size=(16,),
            intervention=("random start", "orthogonal start"),
        ),
    ),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: 64 if "intervention" in setting else 500,
)
