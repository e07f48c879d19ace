"""Experiment 12: duration.

What keeps kappa from being learned in the end: is it slow, at a noise floor, or stuck? Up to
20,000 steps, with nothing changed and with each thing that could keep the error up taken away: no
label noise, batches that grow, learning rates that decay.
"""

from collections.abc import Iterator
from itertools import count, islice

import torch

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.components import Components
from kappascope.figures import paths, sheet, spectrum
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import Where, compared, select, typical
from kappascope.networks import Matrix
from kappascope.statistics import ratio
from kappascope.tasks import LinearBatch, Random, Regression, Streams, heterogeneous, start
from kappascope.training import Descent, outcome, rows, train

LOOKS = (200, 500, 1000, 2000, 5000, 10_000, 20_000)
CHANGE = 1000  # steps before an intervention begins: the paper's longest training
TRIALS = {"none": 128, "no noise": 32, "growing batch": 64, "decaying rate": 64}
SIZE, RATE, NOISE = 32, 0.01, 0.01
LOG, ROWS = "log_condition_number", "row_norms"
# stationary variance of an entry: m = m (1 - 2 lr + lr^2 (B + d + 1) / B) + lr^2 noise^2 / B
FLOOR = NOISE * (RATE / 64 / (2 - RATE * (64 + SIZE + 1) / 64)) ** 0.5


def trials(streams: Streams, size: int, intervention: str) -> Iterator[Batch]:
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
    """Batches of the paper's size; or twice as large whenever training is twice as long."""
    noise = 0.0 if intervention == "no noise" else NOISE
    if intervention != "growing batch":
        yield from Regression(target, noise=noise).batches(random)
    for doubling in count():
        task = Regression(target, rows=64 * 2**doubling, noise=noise)
        yield from islice(task.batches(random), CHANGE * max(1, 2 ** (doubling - 1)))


def left(component: str, since: int = 2000) -> Measure:
    """What 20,000 plain steps leave of the error after fewer."""
    where: Where = {"component": component, "intervention": "none"}
    return compared({"epoch": LOOKS[-1]}, {"epoch": since}, **where)


def end(intervention: str, component: str = LOG, column: str = "error") -> Measure:
    """The median in the end."""
    return typical(component, column=column, intervention=intervention, epoch=LOOKS[-1])


def against_none(intervention: str) -> Measure:
    """The median error in the end, in that of plain training."""
    where: Where = {"stream": "own", "component": LOG, "epoch": LOOKS[-1]}
    pair = (intervention, "none")
    return lambda found: ratio(*(select(found, intervention=x, **where).values() for x in pair))


CLAIMS = (
    Claim(
        "e12.plateau",
        "Longer training does not close the gap: from 2,000 to 20,000 plain steps the error of "
        "log kappa stays.",
        "R Q2, W9; P 4.9",
        left(LOG), Above(0.5),
        "20,000 steps leave {0:.2f} of the error after 2,000 (n = {0.n}, size 32), a median of "
        "{1:.2g}; of the row norms' error they leave {2:.2f}.",
        also=(end("none"), left(ROWS)),
    ),
    Claim(
        "e12.floor",
        "What remains is the floor that label noise, learning rate and batch set.",
        "R Q2",
        lambda found: end("none", "entry", "value")(found).map(lambda x: x / FLOOR, "share"),
        Between(0.95, 1.05),
        "Entries are off by {0:.3f} times what theory gives for the stationary state, noise "
        f"(lr / B / (2 - lr (B + d + 1) / B))^0.5 = {FLOOR:.3g} (n = {{0.n}}).",
    ),
    Claim(
        "e12.noiseless",
        "Without label noise the error of log kappa vanishes, as that of the norms does.",
        "R Q2, W9",
        end("no noise"), Below(1e-9),
        "After 20,000 steps without label noise its median is {0:.2g}, the row norms' {1:.2g} "
        "(n = {0.n}); with noise log kappa's is {2:.2g}.",
        also=(end("no noise", ROWS), end("none")),
    ),
    Claim(
        "e12.remedies",
        "Batches that grow, or a learning rate that decays, halve the remaining error.",
        "R Q2, W9",
        (against_none("growing batch"), against_none("decaying rate")),
        (Below(0.5), Below(0.5)),
        "With batches that grow to 2,048 the error of log kappa after 20,000 steps is {0:.2f} of "
        "that of plain training, with a rate that decays like 1/t from step 1,000 on {1:.2f} "
        "(medians of {0.n} and {1.n} trials).",
    ),
)  # fmt: skip

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
    plot=sheet(
        paths(LOG, split="intervention", seed=range(32), title="Error of log κ"),
        paths(ROWS, split="intervention", seed=range(32), title="Error of the row norms"),
        paths("entry", column="value", split="intervention", seed=range(32), title="An entry"),
        spectrum("Singular values after 20,000 steps", intervention="none"),
    ),
    quick={"own": lambda setting: 6 if setting["intervention"] in ("none", "no noise") else 0},
)
