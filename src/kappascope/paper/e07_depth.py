"""Experiment 7: depth (Section 4.7).

What does depth do to the condition number of a product? One, two and three linear layers learn one
target, and a ReLU student its teacher; ``layer`` 0 is the product of all layers. Whether the
condition numbers of layers multiply is tested by an intervention (claim e7.amplification) that
takes the alleged cause away: layers that start orthogonal have kappa 1 each. If the condition
numbers of the layers make the product's error, most of the error goes with them. Longer training,
at a size that can be trained to the end, tells whether the error stays.

The paper trains one layer at twice the learning rate of two and three, and compares nothing with
products that are not trained. The arm "equal rate" has depths 1 to 4 at one rate, looked at before
training, after 300 steps, and at the same overall error. In a ReLU network each hidden unit's scale
and place are free, so the arm "gauge" compares its layers once both are fixed, and trains on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Estimates, Measure, Mended, no_mean
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import error_lines, paths, sheet, tail
from kappascope.lab.heads import PRODUCTS, head_multiple
from kappascope.lab.measures import Where, compared, medians_compared, printed, select, typical
from kappascope.lab.statistics import (
    Estimate,
    contrast,
    median,
    paired_difference,
    paired_ratio,
)
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Random, Regression, Streams, Teacher, heterogeneous, start
from kappascope.lab.training import (
    DeepLinear,
    Perceptron,
    Step,
    arrivals,
    descend,
    floored,
    last,
    outcome,
    rows,
)
from kappascope.matrix.components import Components
from kappascope.theory import log_kappa_rate

Loss = Callable[[Tensor], Tensor]

LOOKS = (0, 300, 1000, 3000, 10_000)  # steps of the intervention; the paper stops at 300
STARTS = {"random start": 32, "orthogonal start": 32}  # trials of the intervention
SIZE = 20  # of the intervention: small enough for 10,000 steps
DEPTHS = (1, 2, 3, 4)  # at one learning rate
LEVEL = 0.3  # the overall error at which all depths are compared
PATIENCE = 1000  # steps within which four layers come down to it
RECTIFIED = (0, 300, 3000)  # looks at the ReLU network: its start, the paper's end, ten times that
# 192 and 48 had told neither a factor from a third of it nor 2.5 from 2
TRIALS = {**STARTS, "equal rate": 384, "gauge": 256, "gauge, longer": 48}


def trials(
    streams: Streams, network: str, depth: int, size: int, intervention: str | None = None
) -> Iterator[Rows]:
    """Learn with one kind of network."""
    if network == "relu":
        if not intervention:
            return relu(streams, depth, size)
        return gauged(streams, size, RECTIFIED if "longer" in intervention else RECTIFIED[:2])
    if intervention == "equal rate":
        return equal_rate(streams, depth, size)
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


def equal_rate(streams: Streams, depth: int, size: int) -> Iterator[Rows]:
    """Learn at one rate, looked at before, after the paper's steps and at one overall error."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(7)
    model, batches = DeepLinear(layers(random, depth, size)), Regression(target.matrix)
    whole = target.matrix.square().sum((-2, -1))
    looks: dict[int, Tensor] = {}

    def watched() -> Iterator[Step]:
        for step in descend(model, batches.batches(random), 0.005, steps=PATIENCE):
            if step.index in (0, 300):
                looks[step.index] = step.weight.clone()
            yield step

    steps = watched()
    loss: Loss = lambda w: (w - target.matrix).square().sum((-2, -1)) / whole  # noqa: E731 - typed
    arrival = arrivals(steps, loss, [LEVEL**2])[LEVEL**2]
    for step in steps:  # who has arrived before step 300 goes on to it
        if step.index >= 300:
            break
    for epoch, weight in looks.items():
        yield from rows(weight, target, layer=0, epoch=epoch)
    yield from rows(arrival.weight, target, layer=0, level=LEVEL)
    yield {"layer": 0, "level": LEVEL, "component": "steps", "value": arrival.step}


def gauged(streams: Streams, size: int, looks: tuple[int, ...]) -> Iterator[Rows]:
    """Learn a ReLU network, and compare layers after units are scaled and ordered alike."""
    hidden, random = streams.random(), streams.random(7)
    teacher = Perceptron([heterogeneous(hidden, size) for _ in range(2)])
    student = Perceptron([start(random, size) for _ in range(2)])
    inputs = streams.random(8).normal(256, size)
    wanted = [Components(layer) for layer in unit_rows(*teacher.layers)]
    for step in descend(student, Teacher(teacher, size).batches(random), 0.005, steps=looks[-1]):
        if step.index not in looks:
            continue
        with torch.no_grad():
            answers, goal = student(inputs), teacher(inputs)
            off = torch.linalg.matrix_norm(answers - goal) / torch.linalg.matrix_norm(goal)
            found = in_order(unit_rows(*student.layers), [each.matrix for each in wanted])
        yield {"layer": 0, "epoch": step.index, "component": "answers", "error": off}
        for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
            yield from rows(ours, theirs, layer=layer, epoch=step.index)


def unit_rows(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Scale hidden units so that their incoming weights have norm 1; the function is the same."""
    norms = torch.linalg.vector_norm(first, dim=-1)
    return (first / norms[..., :, None]).detach(), (second * norms[..., None, :]).detach()


def in_order(learned: Sequence[Tensor], target: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Put the hidden units of every trial into the order that brings both layers nearest."""
    (first, second), (goal_in, goal_out) = learned, target
    alike = goal_in @ first.mT / goal_in.square().sum((-2, -1), keepdim=True)
    alike = alike + goal_out.mT @ second / goal_out.square().sum((-2, -1), keepdim=True)
    orders = [linear_sum_assignment(each.numpy(), maximize=True)[1] for each in alike]
    order = torch.from_numpy(np.stack(orders))
    rows_of = order[..., :, None].expand_as(first)
    return first.gather(-2, rows_of), second.gather(-1, order[..., None, :].expand_as(second))


PRODUCT: Where = {"network": "linear", "size": 64, "layer": 0, "intervention": None}
EQUAL: Where = {**PRODUCT, "intervention": "equal rate"}
PAPER: Where = {"network": "linear", "size": 64, "layer": 0, "seed": range(10)}
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


def at_equal_error(depth: int) -> Measure:
    """Measure the median kappa error of the product at the same overall error."""
    return typical("condition_number", depth=depth, level=LEVEL, **EQUAL)


def layer_factor(depth: int) -> Measure:
    """Measure what the last layer multiplies the median kappa error by, at one overall error."""
    where: Where = {**KAPPA_ROWS, **EQUAL, "level": LEVEL}
    return medians_compared({"depth": depth}, {"depth": depth - 1}, **where)


def bend(table: Table) -> Estimate:
    """Measure the fourth layer's factor in units of the third's: 1 where growth is exponential."""
    logs = [
        at_equal_error(depth)(table).map(np.log, "log of the median error") for depth in (4, 3, 2)
    ]
    return contrast(logs, (1, -2, 1), "").map(np.exp, "ratio of factors")


def logs_of_kappa(table: Table, depth: int, **when: Any) -> tuple[Floats, Floats]:
    """Read log kappa of the product and of its target, trial by trial."""
    chosen = select(table, **KAPPA_ROWS, **EQUAL, depth=depth, **when)
    return np.log(chosen.values("value")), np.log(chosen.values("target"))


def share_before(depth: int) -> Measure:
    """Measure which share of the excess of log kappa over the target's precedes training.

    In the median trial, of its excess at the same overall error.
    """

    def measure(table: Table) -> Estimate:
        before, target = logs_of_kappa(table, depth, epoch=0)
        after, _ = logs_of_kappa(table, depth, level=LEVEL)
        return replace(median((before - target) / (after - target)), what="share before training")

    return measure


def added(depth: int) -> Measure:
    """Measure what training multiplies the product's kappa by, up to the same overall error."""

    def measure(table: Table) -> Estimate:
        before, _ = logs_of_kappa(table, depth, epoch=0)
        after, _ = logs_of_kappa(table, depth, level=LEVEL)
        return paired_difference(after, before).map(np.exp, "factor of training")

    return measure


def at_look(epoch: int) -> str:
    """Name the arm that looks at the ReLU network after so many steps."""
    return "gauge, longer" if epoch == RECTIFIED[-1] else "gauge"


def gauge(layer: int, epoch: int) -> Measure:
    """Compare the student's kappa with the teacher's, hidden units scaled alike."""
    where: Where = {"network": "relu", "intervention": at_look(epoch), "layer": layer}
    return lambda rows: paired_ratio(
        *(
            select(rows, **KAPPA_ROWS, **where, epoch=epoch).values(column)
            for column in ("value", "target")
        )
    )


def rectified(component: str, layer: int, epoch: int) -> Measure:
    """Measure the median error of a ReLU network's layer, units scaled and ordered alike."""
    where: Where = {"network": "relu", "intervention": at_look(epoch), "layer": layer}
    return typical(component, epoch=epoch, **where)


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
        f"{left[2]:.2g} and {left[3]:.2g} of what it was. The product of the layers' kappas falls "
        f"to {layers_left[2]:.2g} and {layers_left[3]:.2g} of what it was."
    )


CLAIMS = (
    Claim(
        "e7.depth-explodes",
        "The kappa error of a product grows exponentially with depth: 0.24, 653, 13,167.",
        "P abstract, 1(2), 4.7, 5.1, 6(2); S",
        measures={
            "third": layer_factor(3),
            "fourth": layer_factor(4),
            "bend": bend,
            "second": layer_factor(2),
            "error": {d: error(d) for d in (1, 2, 3)},
            "equal": {d: at_equal_error(d) for d in DEPTHS},
        },
        # exponential: every further layer multiplies, and by the same, to a factor of three
        expect={"third": Above(2), "fourth": Above(2), "bend": Between(1 / 3, 3)},
        explain="As the paper trains, after 300 steps, the median errors at depth 1, 2 and 3 are "
        "{error[1]:.2g}, {error[2]:.3g} and {error[3]:.3g} (n = {error[1].n}). At one learning "
        f"rate and the same overall error, {LEVEL:g}, they are {{equal[1]:.2g}}, {{equal[2]:.3g}}, "
        "{equal[3]:.3g} and, at depth 4, {equal[4]:.3g} (n = {equal[4].n}): the second layer "
        "multiplies the median by {second:.3g}, the third by {third:.2g}, the fourth by "
        "{fourth:.2g}, which is {bend:.2f} times the third's factor. A random layer multiplies "
        f"kappa by {np.exp(log_kappa_rate(64)):.0f}; how much is there before training, "
        "e7.untrained tells.",
        answers=("W1(a)",),
        quotes=no_mean(
            "e7/condition_number/depth=1/mean",
            "e7/condition_number/depth=2/mean",
            "e7/condition_number/depth=3/mean",
            stream="own",
            component="condition_number",
            depth=2,
            **PRODUCT,
        ),
        mended=Mended(
            "holds",
            "Growth was tested, not exponential growth, and depth 1 had twice the learning rate. "
            "Now depths 2 to 4 are compared at one rate and one overall error, in trials that are "
            "younger than the rule. At first there were 192 trials, which did not decide, and as "
            "many more were added.",
        ),
    ),
    Claim(
        "e7.untrained",
        "The large kappa of a deep product is a property of products of random matrices: at "
        "depths 2 to 4 most of the difference between log kappa and its target is there before "
        "training.",
        "control; P 4.7",
        measures={
            "share": {f"at depth {depth}": share_before(depth) for depth in DEPTHS[1:]},
            "added": {f"at depth {depth}": added(depth) for depth in DEPTHS[1:]},
            "untrained": {
                depth: typical("condition_number", column="value", depth=depth, epoch=0, **EQUAL)
                for depth in DEPTHS
            },
        },
        expect={"share": Above(0.5)},
        explain="Of the excess of log kappa over the target's, at an overall error of "
        f"{LEVEL:g}, this share is there before training: {{share:.2f}} (n = {{share.n}}). "
        "Training multiplies the product's kappa by {added:.2g}. Untrained products have kappas "
        "of {untrained[1]:.3g}, {untrained[2]:.3g}, {untrained[3]:.3g} and {untrained[4]:.3g} at "
        "depths 1 to 4; a layer of random entries multiplies kappa by about 1.89 sqrt(d) = "
        f"{np.exp(log_kappa_rate(64)):.0f} (docs/theory.md).",
        mended=Mended(
            "undecided",
            "192 trials had not decided at depth 2, and as many more were added. The rule is as it "
            "was.",
        ),
        answers=("W1(a)",),
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
        measures={
            "first": gauge(1, 300),
            "second": gauge(2, 300),
            "first_late": gauge(1, RECTIFIED[-1]),
            "second_late": gauge(2, RECTIFIED[-1]),
            "first_start": gauge(1, 0),
            "second_start": gauge(2, 0),
            "matched": {layer: rectified("overall_matrix", layer, 300) for layer in (1, 2)},
            "matched_late": {
                layer: rectified("overall_matrix", layer, RECTIFIED[-1]) for layer in (1, 2)
            },
            "answers": rectified("answers", 0, 300),
        },
        # "far above" is twice; in the gauge, where kappa can be told
        expect={"first": Above(2), "second": Above(2)},
        explain="The scale and the place of a hidden unit are free, and they change the kappa "
        "of a layer. With units scaled alike, the student's kappa after the paper's 300 "
        "steps is {first:.2f} times the teacher's in the first layer and {second:.2f} "
        "times in the second (n = {first.n}). It is {first_late:.2f} and "
        "{second_late:.2f} times after 3000 steps, and {first_start:.2f} and "
        "{second_start:.2f} times before training. After 300 steps the student has not "
        "found its teacher. With units in the best order, the relative errors of its "
        "layers are {matched[1]:.2f} and {matched[2]:.2f}, where a zero matrix has 1, "
        "and that of its answers is {answers:.2f}. After 3000 steps those of the layers "
        "are {matched_late[1]:.2f} and {matched_late[2]:.2f} (n = {first_late.n}).",
        answers=("W1(a)",),
        quotes=no_mean(
            "e7/condition_number/network=relu/mean",
            stream="own",
            component="condition_number",
            network="relu",
            layer=1,
            intervention=None,
        ),
        mended=Mended(
            "holds",
            "Layers were compared as they are, although scale and order of hidden units are free, "
            "and any excess counted as far above. Now units are scaled alike, and far above means "
            "twice, in trials that are younger than the rule. At first there were 48 trials, which "
            "did not decide, then 256.",
        ),
    ),
    Claim(
        "e7.llm",
        "So deep transformers are likely severely distorted.",
        "P 5.1; S",
        measures={kind: head_multiple(kind, "AdamW") for kind in PRODUCTS},
        expect=dict.fromkeys(PRODUCTS, Above(10)),
        explain="The measure is kappa in a transformer of two layers trained with AdamW, "
        "divided by that of products of random factors. It is {QK:.1f} for QK (what a "
        "head compares) and {OV:.1f} for OV (what it writes; n = {QK.n} seeds). Severe "
        "is taken to be ten times, for both.",
        judged_on=("gpt",),
        mended=Mended(
            "undecided",
            "No transformer had been looked at. Now the heads of the GPT study decide, at the best "
            "learning rate of AdamW.",
        ),
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
    error_lines("condition_number", by="depth", level=LEVEL, **EQUAL,
                title=f"At one rate and an overall error of {LEVEL:g}"),
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
        *grid(network=("linear",), depth=DEPTHS, size=(64,), intervention=("equal rate",)),
        *grid(network=("relu",), depth=(2,), size=(64,), intervention=("gauge", "gauge, longer")),
    ),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: TRIALS.get(str(setting.get("intervention")), 200),
    effort=4.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 0},  # the cheapest claim takes 48 trials
)
