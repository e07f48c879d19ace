"""Experiment 7: depth (Section 4.7).

What does depth do to the condition number of a product? One, two and three linear layers learn one
target, and a ReLU student its teacher; ``layer`` 0 is the product of all layers. Whether layers
amplify is tested by interventions (:mod:`kappascope.experiments.e7_amplification`).
"""

import math
from collections.abc import Iterator

from kappascope import figures
from kappascope.claims import ANYWHERE, Above, Between, Claim, Measure, printed, select, typical
from kappascope.experiments import e7_amplification as amplification
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import DeepLinear, Perceptron
from kappascope.statistics import Estimate, Table, paired_ratio, ratio
from kappascope.tasks import Regression, Streams, Teacher, heterogeneous, start
from kappascope.training import descend, floored, last, outcome

STEPS = 300


def trials(
    streams: Streams, network: str, depth: int, size: int, intervention: str | None = None
) -> Iterator[Batch]:
    """Learn with one kind of network."""
    if network == "relu":
        return relu(streams, depth, size)
    if intervention:
        return amplification.longer(streams, depth, size, intervention)
    return linear(streams, depth, size)


def linear(streams: Streams, depth: int, size: int) -> Iterator[Batch]:
    """Learn a matrix as the product of layers."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    model = DeepLinear(amplification.layers(random, depth, size))
    rate = 0.01 if depth == 1 else 0.005
    step = last(descend(model, Regression(target).batches(random), rate, steps=STEPS))
    yield from outcome(step.weight, target, layer=0)
    yield from floored(step.weight, target, layer=0)
    yield from amplification.each_layer(model)


def relu(streams: Streams, depth: int, size: int) -> Iterator[Batch]:
    """Learn a ReLU network from another one's answers."""
    hidden, random = streams.random(), streams.random(7)
    teacher = Perceptron([heterogeneous(hidden, size) for _ in range(depth)])
    student = Perceptron([start(random, size) for _ in range(depth)])
    last(descend(student, Teacher(teacher, size).batches(random), 0.005, steps=STEPS))
    yield from outcome(student.product, teacher.product, layer=0)
    pairs = zip(student.layers, teacher.layers, strict=True)
    for layer, (learned, target) in enumerate(pairs, start=1):
        yield from outcome(learned, target, layer=layer)


PRODUCT = {"network": "linear", "size": 64, "layer": 0}
TEN = {"size": 64, "seed": range(10)}
GUARDED = {**PRODUCT, **TEN, "component": "floored_condition_number"}  # the paper's s1 / (sd + 1e-10)
OVERALL = {1: 0.05, 2: 0.22, 3: 0.26}
KAPPA = {1: 0.24, 2: 653, 3: 13_167}
LEARNED = {1: "1,510", 2: "242,566", 3: "4.8e6"}


def each_mean(rows: Table) -> list[float]:
    """The mean kappa of every layer, at every depth."""
    layers = (layer for depth in rows.by("depth").values() for layer in depth.by("layer").values())
    return [float(layer.values("value").mean()) for layer in layers]


FIGURES = (
    printed("e7/condition_number/depth=1/target", "~928", "4.7", **GUARDED),
    *(
        printed(f"e7/condition_number/depth={depth}/{what}", text, "4.7", **GUARDED)
        for depth in KAPPA
        for what, text in (("mean", f"{KAPPA[depth]:,}"), ("learned", LEARNED[depth]))
    ),
    *(
        printed(f"e7/overall_matrix/depth={depth}/mean", str(error), "4.7", **PRODUCT, **TEN)
        for depth, error in OVERALL.items()
    ),
)
