"""Experiment 7: depth (Section 4.7).

What does depth do to the condition number of a product? One, two and three linear layers learn one
target, and a ReLU student its teacher; ``layer`` 0 is the product of all layers.
Whether layers amplify is tested by interventions (``e7_amplification``).
"""

from collections.abc import Iterator

from kappascope.experiments import e7_amplification as amplification
from kappascope.experiments.e7_claims import CLAIMS, FIGURES, PRODUCT
from kappascope.figures import errors, sheet, spectrum, tail
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import DeepLinear, Perceptron
from kappascope.tasks import Regression, Streams, Teacher, heterogeneous, start
from kappascope.training import descend, floored, last, outcome


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
    step = last(descend(model, Regression(target).batches(random), rate, steps=300))
    yield from outcome(step.weight, target, layer=0)
    yield from floored(step.weight, target, layer=0)
    yield from amplification.each_layer(model)


def relu(streams: Streams, depth: int, size: int) -> Iterator[Batch]:
    """Learn a ReLU network from another one's answers."""
    hidden, random = streams.random(), streams.random(7)
    teacher = Perceptron([heterogeneous(hidden, size) for _ in range(depth)])
    student = Perceptron([start(random, size) for _ in range(depth)])
    last(descend(student, Teacher(teacher, size).batches(random), 0.005, steps=300))
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
        *amplification.GRID,
    ),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: amplification.STARTS.get(str(setting.get("intervention")), 200),
    effort=4.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=sheet(
        errors("condition_number", "overall_matrix", by="depth", stream="paper", **PRODUCT,
               printed={"condition_number": {1: 0.24, 2: 653, 3: 13_167},
                        "overall_matrix": {1: 0.05, 2: 0.22, 3: 0.26}}),
        tail("condition_number", by="depth", stream="own", **PRODUCT),
        amplification.PANEL,
        spectrum("Singular values, three layers", network="linear", depth=3),
    ),
    quick={"own": lambda setting: 0 if "intervention" in setting else 8},  # 10,000 steps are dear
)  # fmt: skip
