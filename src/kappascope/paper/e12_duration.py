"""Experiment 12: duration of training, up to 20,000 steps.

What keeps kappa from being learned in the end: is it slow, at a noise floor, or stuck? Up to
20,000 steps, with nothing changed and with each thing that could keep the error up taken away: no
label noise, batches that grow, learning rates that decay.
"""

from collections.abc import Iterator
from itertools import count, islice

import torch

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines
from kappascope.lab.measures import LOG_KAPPA, ROW_NORMS, Where, compared, medians_compared, typical
from kappascope.lab.optimizers import Descent
from kappascope.lab.statistics import Estimate
from kappascope.lab.table import Table
from kappascope.lab.tasks import LinearBatch, Random, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, outcome, rows, train
from kappascope.matrix.components import Components

LOOKS = (200, 500, 1000, 2000, 5000, 10_000, 20_000)
CHANGE = 1000  # steps before an intervention begins: the paper's longest training
TRIALS = {"none": 128, "no noise": 32, "growing batch": 64, "decaying rate": 64}
SIZE, RATE, NOISE = 32, 0.01, 0.01


def trials(streams: Streams, size: int, intervention: str) -> Iterator[Rows]:
    """Learn one target for very long."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    model = Matrix(start(random, size))
    descent = Descent(model, RATE)
    batches = growing(target.matrix, random, intervention)
    for step in train(model, descent, batches, LOOKS[-1]):
        if intervention == "decaying rate":
            descent.learning_rate = RATE / max(1.0, step.index / CHANGE)
        if step.index in LOOKS:
            look = outcome if step.batch is None else rows
            yield from look(step.weight, target, epoch=step.index)
            entry = (step.weight - target.matrix).square().mean((-2, -1)).sqrt()
            yield {"epoch": step.index, "component": "entry", "value": entry}


def growing(target: torch.Tensor, random: Random, intervention: str) -> Iterator[LinearBatch]:
    """Draw batches of the paper's size, or twice as large whenever training is twice as long."""
    noise = 0.0 if intervention == "no noise" else NOISE
    if intervention != "growing batch":
        yield from Regression(target, noise=noise).batches(random)
    for doubling in count():
        task = Regression(target, rows=64 * 2**doubling, noise=noise)
        yield from islice(task.batches(random), CHANGE * max(1, 2 ** (doubling - 1)))


# stationary variance of an entry: m = m (1 - 2 lr + lr^2 (B + d + 1) / B) + lr^2 noise^2 / B
FLOOR = NOISE * (RATE / 64 / (2 - RATE * (64 + SIZE + 1) / 64)) ** 0.5


def left(component: str, since: int = 2000) -> Measure:
    """Measure what 20,000 plain steps leave of the error after fewer."""
    where: Where = {"component": component, "intervention": "none"}
    return compared({"epoch": LOOKS[-1]}, {"epoch": since}, **where)


def end(intervention: str, component: str = LOG_KAPPA, column: str = "error") -> Measure:
    """Measure the median after 20,000 steps."""
    return typical(component, column=column, intervention=intervention, epoch=LOOKS[-1])


def over_floor(rows: Table) -> Estimate:
    """Compare an entry's error after 20,000 steps with what theory gives."""
    return end("none", "entry", "value")(rows).map(lambda x: x / FLOOR, "share")


def against_none(intervention: str) -> Measure:
    """Compare the median error after 20,000 steps with that of plain training."""
    arms = ({"intervention": name} for name in (intervention, "none"))
    return medians_compared(*arms, component=LOG_KAPPA, epoch=LOOKS[-1])


CLAIMS = (
    Claim(
        "e12.plateau",
        "Longer training does not close the gap: the error of log kappa stays from 2,000 to "
        "20,000 plain steps.",
        "R Q2, W9; P 4.9",
        measures={"left": left(LOG_KAPPA), "end": end("none"), "rows_left": left(ROW_NORMS)},
        expect={"left": Above(0.5)},
        explain="20,000 steps leave {left:.2f} of the error that 2,000 leave (n = {left.n}, size "
        "32), at a median of {end:.2g}. They leave {rows_left:.2f} of the row norms' "
        "error.",
        answers=("W9(b)", "Q2"),
    ),
    Claim(
        "e12.floor",
        "The error that remains is the floor that label noise, learning rate and batch set.",
        "R Q2",
        measures={"share": over_floor},
        expect={"share": Between(0.95, 1.05)},
        explain="Entries are off by {share:.3f} times what theory gives for the stationary state, "
        f"noise (lr / B / (2 - lr (B + d + 1) / B))^0.5 = {FLOOR:.3g} (n = {{share.n}}).",
        answers=("W3(c)", "Code, noise", "Q2"),
    ),
    Claim(
        "e12.noiseless",
        "Without label noise the error of log kappa vanishes, as that of the norms does.",
        "R Q2, W9",
        measures={
            "noiseless": end("no noise"),
            "rows": end("no noise", ROW_NORMS),
            "noisy": end("none"),
        },
        expect={"noiseless": Below(1e-9)},
        explain="After 20,000 steps without label noise the median error of log kappa is "
        "{noiseless:.2g}, and that of the row norms {rows:.2g} (n = {noiseless.n}). With "
        "noise that of log kappa is {noisy:.2g}.",
        answers=("W9(b)", "Q2"),
    ),
    Claim(
        "e12.remedies",
        "Batches that grow, or a learning rate that decays, halve the remaining error.",
        "R Q2, W9",
        measures={
            "growing": against_none("growing batch"),
            "decaying": against_none("decaying rate"),
        },
        expect={"growing": Below(0.5), "decaying": Below(0.5)},
        explain="After 20,000 steps the error of log kappa is {growing:.2f} of that of plain "
        "training with batches that grow to 2,048, and {decaying:.2f} of it with a rate "
        "that decays like 1/t from step 1,000 on (medians of {growing.n} and {decaying.n} "
        "trials).",
        answers=("W9(b)", "Q2"),
    ),
)

PLOT = sheet(
    paths(LOG_KAPPA, split="intervention", seed=range(32), title="Error of log κ"),
    paths(ROW_NORMS, split="intervention", seed=range(32), title="Error of the row norms"),
    paths("entry", column="value", split="intervention", seed=range(32), title="An entry"),
    spectrum_lines("Singular values after 20,000 steps", intervention="none"),
)

EXPERIMENT = Experiment(
    number=12,
    title="Duration",
    section="review Q2, W9",
    question=__doc__,
    grid=grid(size=(SIZE,), intervention=tuple(TRIALS)),
    trials=trials,
    own=lambda setting: TRIALS[str(setting["intervention"])],
    effort=100.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": lambda setting: 6 if setting["intervention"] in ("none", "no noise") else 0},
)
