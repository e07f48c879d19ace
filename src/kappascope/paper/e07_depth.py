"""Experiment 7: depth (Section 4.7).

What does depth do to the condition number of a product? One, two and three linear layers learn one
target, and a ReLU student its teacher; ``layer`` 0 is the product of all layers. Whether the
condition numbers of layers multiply is tested by an intervention (claim e7.amplification) that
takes the alleged cause away: layers that start orthogonal have kappa 1 each. If the layers'
condition numbers make the product's error, most of it goes with them. Training on, at a size that
can be trained to the end, tells whether the error is there to stay.
"""

from collections.abc import Iterator
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Estimates, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import error_lines, paths, sheet, spectrum_lines, tail
from kappascope.lab.measures import Where, compared, medians_compared, printed, select, typical
from kappascope.lab.statistics import Estimate, paired_ratio
from kappascope.lab.table import Table
from kappascope.lab.tasks import Random, Regression, Streams, Teacher, heterogeneous, start
from kappascope.lab.training import DeepLinear, Perceptron, descend, floored, last, outcome, rows
from kappascope.matrix.components import Components

LOOKS = (0, 300, 1000, 3000, 10_000)  # steps of the intervention; the paper stops at 300
STARTS = {"random start": 32, "orthogonal start": 32}  # trials of the intervention
SIZE = 20  # of the intervention: small enough for 10,000 steps


def trials(
    streams: Streams, network: str, depth: int, size: int, intervention: str | None = None
) -> Iterator[Rows]:
    """Learn with one kind of network."""
    if network == "relu":
        return relu(streams, depth, size)
    if intervention:
        return longer(streams, depth, size, intervention)
    return linear(streams, depth, size)


def layers(random: Random, depth: int, size: int) -> list[Tensor]:
    """Draw starts whose product has the scale of a single layer's start."""
    return [start(random, size, scale=0.1 ** (1 / depth)) for _ in range(depth)]


def linear(streams: Streams, depth: int, size: int) -> Iterator[Rows]:
    """Learn a matrix as the product of layers."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    model = DeepLinear(layers(random, depth, size))
    rate = 0.01 if depth == 1 else 0.005
    step = last(descend(model, Regression(target).batches(random), rate, steps=300))
    yield from outcome(step.weight, target, layer=0)
    yield from floored(step.weight, target, layer=0)
    yield from each_layer(model)


def each_layer(model: DeepLinear) -> Iterator[Rows]:
    """Give the condition numbers of the layers, which have no target of their own."""
    for layer, weight in enumerate(model.layers, start=1):
        kappa = Components(weight).condition_number
        yield {"layer": layer, "component": "condition_number", "value": kappa}


def relu(streams: Streams, depth: int, size: int) -> Iterator[Rows]:
    """Learn a ReLU network from another one's answers."""
    hidden, random = streams.random(), streams.random(7)
    teacher = Perceptron([heterogeneous(hidden, size) for _ in range(depth)])
    student = Perceptron([start(random, size) for _ in range(depth)])
    last(descend(student, Teacher(teacher, size).batches(random), 0.005, steps=300))
    yield from outcome(student.product, teacher.product, layer=0)
    pairs = zip(student.layers, teacher.layers, strict=True)
    for layer, (learned, target) in enumerate(pairs, start=1):
        yield from outcome(learned, target, layer=layer)


def longer(streams: Streams, depth: int, size: int, intervention: str) -> Iterator[Rows]:
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


PRODUCT: Where = {"network": "linear", "size": 64, "layer": 0}
PAPER: Where = {**PRODUCT, "seed": range(10)}
GUARDED: Where = {**PAPER, "component": "floored_condition_number"}  # the paper's s1 / (sd + 1e-10)
LAYERS: Where = {**PAPER, "depth": (2, 3), "layer": (1, 2, 3)}


def each_mean(rows: Table) -> list[float]:
    """Give the mean kappa of every layer, at every depth."""
    layers = (layer for depth in rows.by("depth").values() for layer in depth.by("layer").values())
    return [float(layer.values("value").mean()) for layer in layers]


FIGURES = (
    printed("e7/condition_number/depth=1/target", "~928", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=1/mean", "0.24", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=2/mean", "653", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=3/mean", "13,167", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=1/learned", "1,510", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=2/learned", "242,566", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=3/learned", "4.8e6", "P 4.7", **GUARDED),
    printed("e7/overall_matrix/depth=1/mean", "0.05", "P 4.7", **PAPER),
    printed("e7/overall_matrix/depth=2/mean", "0.22", "P 4.7", **PAPER),
    printed("e7/overall_matrix/depth=3/mean", "0.26", "P 4.7", **PAPER),
    printed("e7/condition_number/layer/learned", "1,000-1,600", "P 4.7", each_mean, **LAYERS),
    *(
        printed(f"e7/{id}", text, "P 4.7", layer=layer, seed=range(10))
        for id, text, layer in (
            ("condition_number/network=relu/target", "~1,136", (1, 2)),
            ("condition_number/network=relu/layer=1/learned", "2,719", 1),
            ("condition_number/network=relu/layer=2/learned", "6,060", 2),
            ("condition_number/network=relu/mean", "9.1", (1, 2)),
            ("overall_matrix/network=relu/mean", "0.57", 0),  # it may mean the answers' error
        )
    ),
)

KAPPA_ROWS = {"stream": "own", "component": "condition_number"}


def error(depth: int, component: str = "condition_number") -> Measure:
    """Measure the median error of the product."""
    return typical(component, depth=depth, **PRODUCT)


def factor(depth: int) -> Measure:
    """Measure what the last layer multiplies the median kappa error by."""
    return medians_compared({"depth": depth}, {"depth": depth - 1}, **KAPPA_ROWS, **PRODUCT)


def excess(layer: int) -> Measure:
    """Compare the student's kappa with the teacher's."""
    where: Where = {"network": "relu", "layer": layer, "component": "condition_number"}
    return lambda rows: paired_ratio(
        *(select(rows, stream="own", **where).values(column) for column in ("value", "target"))
    )


def orthogonal(depth: int) -> Measure:
    """Compare the median kappa error at step 300 from orthogonal layers with random ones'."""
    where: Where = {"size": SIZE, "depth": depth, "layer": 0, "epoch": 300, **KAPPA_ROWS}
    random, turned = ({"intervention": name} for name in STARTS)
    return medians_compared(turned, random, **where)


def left(depth: int) -> Measure:
    """Measure what is left of the product's kappa error of step 300 in the end."""
    where: Where = {"size": SIZE, "depth": depth, "layer": 0, "intervention": "random start"}
    return compared({"epoch": LOOKS[-1]}, {"epoch": 300}, **where, **KAPPA_ROWS)


def left_of_layers(depth: int) -> Measure:
    """Measure what is left of the product of the layers' kappas of step 300 in the end."""
    where: Where = {"size": SIZE, "depth": depth, "intervention": "random start", **KAPPA_ROWS}

    def product(table: Table, epoch: int) -> Any:
        layers = (select(table, epoch=epoch, layer=i + 1, **where) for i in range(depth))
        return np.prod([layer.values("value") for layer in layers], axis=0)

    return lambda table: paired_ratio(product(table, LOOKS[-1]), product(table, 300))


CONCLUSION = {
    "holds": "they carry it, as a residue of the random start",
    "fails": "they do not carry it",
    "undecided": "these trials do not tell whether they carry it",
}


def explain_amplification(
    orthogonal: Estimates, left: Estimates, layers_left: Estimates, verdict: str
) -> str:
    """Tell the product's error without the layers' condition numbers, and as training goes on."""
    return (
        f"If layers start orthogonal (kappa 1, the same norm) the median kappa error of the "
        f"product at step 300 is {orthogonal[2]:.2g} of that from random layers at depth 2 and "
        f"{orthogonal[3]:.2g} at depth 3 (size {SIZE}, n = {orthogonal[2].n}): "
        f"{CONCLUSION[verdict]}. From step 300 to 10,000 the error from random layers falls to "
        f"{left[2]:.2g} and {left[3]:.2g} of what it was, the product of the layers' kappas to "
        f"{layers_left[2]:.2g} and {layers_left[3]:.2g}."
    )


CLAIMS = (
    Claim(
        "e7.depth-explodes",
        "The kappa error of a product grows exponentially with depth: 0.24, 653, 13,167.",
        "P abstract, 1(2), 4.7, 5.1, 6(2); S",
        measures={
            "second": factor(2),
            "third": factor(3),
            "error": {d: error(d) for d in (1, 2, 3)},
        },
        expect={"second": Above(1), "third": Above(1)},
        explain="After 300 steps the median errors at depth 1, 2 and 3 are {error[1]:.2g}, "
        "{error[2]:.3g} and {error[3]:.3g} (n = {error[1].n} each): the second layer multiplies "
        "the median by {second:.3g}, the third by {third:.2g}; what is left of it when training "
        "goes on, e7.amplification tells.",
        answers=("W1(a)",),
        teaches={"depth delays": "holds"},
    ),
    Claim(
        "e7.amplification",
        "The product's kappa error is amplified because the layers' condition numbers multiply.",
        "P 4.7; S",
        measures={
            "orthogonal": {depth: orthogonal(depth) for depth in (2, 3)},
            "left": {depth: left(depth) for depth in (2, 3)},
            "layers_left": {depth: left_of_layers(depth) for depth in (2, 3)},
        },
        expect={"orthogonal": Below(0.5)},
        explain=explain_amplification,
        answers=("W1(a)",),
    ),
    Claim(
        "e7.overall-moderate",
        "The overall error stays moderate at every depth: 0.05, 0.22, 0.26.",
        "P 4.7",
        measures={
            "one": error(1, "overall_matrix"),
            "two": error(2, "overall_matrix"),
            "three": error(3, "overall_matrix"),
        },
        expect={
            "one": Between(0.045, 0.055),
            "two": Between(0.20, 0.24),
            "three": Between(0.235, 0.285),
        },
        explain="The medians at depth 1, 2, 3 are {one:.3f}, {two:.3f} and {three:.3f} "
        "(n = {one.n} each).",
    ),
    Claim(
        "e7.relu",
        "A two-layer ReLU network shows the same flaw: layer kappas far above its teacher's.",
        "P 4.7",
        measures={"first": excess(1), "second": excess(2)},
        expect={"first": Above(1), "second": Above(1)},
        explain="In the median trial the student's kappa is {first:.3g} times the teacher's in the "
        "first layer and {second:.3g} times in the second (n = {first.n}), after 300 steps.",
        answers=("W1(a)",),
    ),
    Claim(
        "e7.llm",
        "So deep transformers are likely severely distorted.",
        "P 5.1; S",
        measures={
            "distortion": lambda rows: Estimate(
                nan, None, None, 0, "distortion", "no transformer was trained"
            )
        },
        expect={"distortion": Above(1)},
        explain="Products of up to three linear layers and one ReLU network of two layers do not "
        "decide it: a transformer has residual paths, normalization and no known target.",
        answers=("W1(b)",),
    ),
)

PLOT = sheet(
    error_lines("condition_number", "overall_matrix", by="depth", stream="paper", **PRODUCT,
           printed={"condition_number": {1: 0.24, 2: 653, 3: 13_167},
                    "overall_matrix": {1: 0.05, 2: 0.22, 3: 0.26}}),
    tail("condition_number", by="depth", stream="own", **PRODUCT),
    paths("condition_number", split="depth", intervention="random start", layer=0,
          title=f"κ error over longer training, size {SIZE}"),
    spectrum_lines("Singular values, three layers", network="linear", depth=3),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=7,
    title="Depth",
    section="4.7",
    question=__doc__,
    grid=(
        *grid(network=("linear",), depth=(1, 2, 3), size=(64,)),
        *grid(network=("relu",), depth=(2,), size=(64,)),
        *grid(network=("linear",), depth=(2, 3), size=(SIZE,), intervention=STARTS),
    ),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: STARTS.get(str(setting.get("intervention")), 200),
    effort=4.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": lambda setting: 0 if "intervention" in setting else 8},  # 10,000 steps are dear
)
