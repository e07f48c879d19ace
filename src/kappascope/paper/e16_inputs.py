"""Experiment 16: inputs that are not white.

Is kappa learned when inputs favour some directions, as those of networks do? The same targets and
starts, shown by white inputs, by a power law, by pixels of handwritten digits and by embeddings of
words in their frequencies. Errors are also taken apart by the principal directions of the inputs.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines
from kappascope.lab.inputs import INPUTS, Source
from kappascope.lab.measures import LOG_KAPPA, ROW_NORMS, medians_compared, select, typical
from kappascope.lab.statistics import Estimate, median, slopes
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, outcome, rows
from kappascope.matrix.components import Components

LOOKS = (200, 1000, 5000)  # steps
END = LOOKS[-1]
RATE = 0.01
STEEP = ("steep power law", "digits")  # inputs that hardly vary in some directions


def trials(streams: Streams, size: int, inputs: str) -> Iterator[Rows]:
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


def by_direction(weight: Tensor, target: Tensor, source: Source) -> Iterator[Rows]:
    """Measure what the answers to each principal direction of the inputs lack."""
    variances, directions = source.directions()
    lacking, wanted = (
        torch.linalg.vector_norm(matrix @ directions.to(matrix), dim=-2)
        for matrix in (weight - target, target)
    )
    for place, variance in enumerate(variances.tolist()):
        share = lacking[:, place] / wanted[:, place]
        yield {"place": place, "variance": variance, "component": "direction", "value": share}


MILD = ("power law", "tokens")


def curves(table: Table, inputs: str, epoch: int, column: str = "value") -> Floats:
    """Read one line a trial, from the direction of most variance to that of least."""
    chosen = select(table, stream="own", component="direction", inputs=inputs, epoch=epoch)
    return chosen.curves("place", column)


def exponent(inputs: str) -> Measure:
    """Fit how what is lacking after 200 steps falls with lr * variance * steps; theory says 1.

    By least squares over the directions of each trial of which a tenth to nine tenths are lacking.
    """

    def measure(table: Table) -> Estimate:
        lacking, variances = (curves(table, inputs, 200, c) for c in ("value", "variance"))
        x = RATE * 200 * variances
        return median(slopes(np.where((x > 0.1) & (x < 2.3), x, np.nan), -np.log(lacking)))

    return measure


def last_direction(inputs: str) -> Measure:
    """Measure what the direction of least variance lacks in the end."""
    return lambda table: median(curves(table, inputs, END)[:, -1])


def error(component: str, inputs: str, epoch: int = END) -> Measure:
    """Measure the median error after some steps."""
    return typical(component, inputs=inputs, epoch=epoch)


def against_white(inputs: str) -> Measure:
    """Compare the median error of log kappa in the end with that of white inputs."""
    return medians_compared({"inputs": inputs}, {"inputs": "white"}, component=LOG_KAPPA, epoch=END)


CLAIMS = (
    Claim(
        "e16.stays",
        "Where inputs hardly vary in some directions, log kappa is off by more than 0.1 after "
        "5,000 steps.",
        "R W1, W3",
        measures={
            "steep": error(LOG_KAPPA, "steep power law"),
            "digits": error(LOG_KAPPA, "digits"),
            "white": error(LOG_KAPPA, "white"),
        },
        expect={"steep": Above(0.1), "digits": Above(0.1)},
        explain="The median error is {steep:.3g} for variances that fall like k^-2 and "
        "{digits:.3g} for digits, with white inputs {white:.2g} (n = {steep.n}). A direction of "
        "variance v takes 1/(lr v) steps; here some have a v below 0.01.",
        answers=("W3(b)",),
    ),
    Claim(
        "e16.delay",
        "Where inputs vary in every direction, they only delay learning: after 5,000 steps the "
        "error of log kappa is that of white inputs.",
        "R W1, W3",
        measures={
            "power_law": against_white("power law"),
            "tokens": against_white("tokens"),
            "early": {name: error(LOG_KAPPA, name, 200) for name in (*MILD, "white")},
        },
        expect={"power_law": Between(0.5, 2), "tokens": Between(0.5, 2)},
        explain="After 5,000 steps the median error is {power_law:.2f} times that of white inputs "
        "for variances that fall like 1/k and {tokens:.2f} times for words (n = {power_law.n}); "
        "after 200 steps the errors are {early[power law]:.2f} and {early[tokens]:.2f}, and "
        "{early[white]:.2f} for white inputs.",
    ),
    Claim(
        "e16.rates",
        "Each direction is learned at a rate that is the variance of the inputs along it.",
        "R W3",
        measures={"power_law": exponent("power law"), "digits": exponent("digits")},
        expect={"power_law": Between(0.9, 1.1), "digits": Between(0.9, 1.1)},
        explain="What a direction of variance v lacks after 200 steps falls as "
        "exp(-{power_law:.2f} lr v 200) for the power law and exp(-{digits:.2f} lr v 200) for "
        "digits (n = {power_law.n}); white inputs have v = 1 in every direction.",
        answers=("W3(b)", "W3(c)"),
    ),
    Claim(
        "e16.never",
        "A direction that the inputs never show is never learned: for the inputs of the digits "
        "nothing of the last direction is learned.",
        "R W3",
        measures={
            name.replace(" ", "_"): last_direction(name)
            for name in ("digits", "power law", "tokens", "white")
        },
        expect={"digits": Between(0.95, 1.05)},
        explain="After 5,000 steps the direction of least variance lacks {digits:.2f} of itself "
        "for digits, of which three pixels are blank, {power_law:.2g} for the power law, "
        "{tokens:.2g} for tokens and {white:.2g} for white inputs (n = {digits.n}).",
    ),
    Claim(
        "e16.norms",
        "Row norms are learned (below 0.05) whatever the inputs, after 5,000 steps.",
        "R W1",
        measures={"error": {f"for {name}": error(ROW_NORMS, name) for name in INPUTS}},
        expect={"error": Below(0.05)},
        explain="The median error of the row norms after 5,000 steps is {error:.4g} "
        "(n = {error.n}).",
    ),
)

PLOT = sheet(
    paths(LOG_KAPPA, split="inputs", title="Error of log κ"),
    paths(ROW_NORMS, split="inputs", title="Error of the row norms"),
    paths("direction", over="place", column="value", split="inputs", epoch=200,
          title="What directions lack after 200 steps"),
    spectrum_lines("Singular values, digits", inputs="digits"),
)  # fmt: skip

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
    plot=PLOT,
    quick={"own": lambda setting: 6 if setting["inputs"] in ("white", *STEEP) else 0},
)
