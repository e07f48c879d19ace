"""Experiment 9: long training (Section 4.9).

Does kappa's error vanish with longer training? 1000 steps, looked at after 1, 10 and every
twentieth. Whether what remains is a matter of speed is tested by interventions (claim
e9.not-speed): train twice as long, with label noise, without it, and with smaller and smaller
steps; at a size that allows for many trials, because what remains fluctuates.
"""

from collections.abc import Iterator
from math import log

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines
from kappascope.lab.measures import (
    KAPPA,
    LOG_KAPPA,
    ROW_NORMS,
    Where,
    compared,
    printed,
    select,
    typical,
)
from kappascope.lab.optimizers import Descent
from kappascope.lab.statistics import Estimate, paired_ratio
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.lab.training import Matrix, Step, descend, outcome, rows, train
from kappascope.matrix.components import Components

STEPS = 1000  # the paper's
SIZE = 32  # of the interventions
TRIALS = {"none": 512, "no noise": 64, "smaller steps": 64}  # 512: to tell 0.8 of noise from all


def trials(streams: Streams, size: int, intervention: str | None = None) -> Iterator[Rows]:
    """Learn one target for long."""
    if intervention:
        yield from longer(streams, size, intervention)
        return
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model, batches = Matrix(start(random, size)), Regression(target.matrix).batches(random)
    for step in descend(model, batches, steps=1000):
        if step.index in (1, 10) or (step.index and step.index % 20 == 0):
            yield from rows(step.weight, target, epoch=step.index)
    yield from outcome(step.weight, target)


def longer(streams: Streams, size: int, intervention: str) -> Iterator[Rows]:
    """Learn for twice as long, looked at eight times."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    batches = Regression(target).batches(random)
    for step in fit(Matrix(start(random, size)), batches, intervention):
        if step.index and step.index % (STEPS // 4) == 0:
            yield from rows(step.weight, target, epoch=step.index)


def fit(model: Matrix, batches: Iterator[LinearBatch], intervention: str) -> Iterator[Step]:
    """Train in one of the three ways."""
    descent = Descent(model)
    seen = noiseless(batches) if intervention == "no noise" else batches
    for step in train(model, descent, seen, 2 * STEPS):
        if intervention == "smaller steps":
            # harmonic once the paper's steps are over: a tenth at the end
            descent.learning_rate = 0.01 / (1 + 9 * max(0, step.index / STEPS - 1))
        yield step


TEN: Where = {"size": 128, "seed": range(10)}
FIGURES = (
    printed("e9/row_norms/epoch=1/mean", "0.93", "P 4.9", **TEN),
    printed("e9/row_norms/epoch=1000/mean", "6.6e-5", "P abstract, 4.9", **TEN),
    printed("e9/condition_number/epoch=1/mean", "0.75", "P 4.9", **TEN),
    printed("e9/condition_number/epoch=1000/mean", "0.017", "P abstract, 4.9", **TEN),
    printed("e9/condition_number/epoch=1/ratio", "0.8x", "P 4.9", **TEN),
    printed("e9/condition_number/epoch=1000/ratio", "250x", "P abstract, 4.9", **TEN),
)


def at(table: Table, component: str, epoch: int) -> Floats:
    """Read the errors of our own trials after some steps."""
    return select(table, stream="own", size=128, component=component, epoch=epoch).values()


def rate(table: Table) -> Estimate:
    """Measure the rate per step at which the norm error falls from step 10 to 500."""
    fall = paired_ratio(at(table, ROW_NORMS, 500), at(table, ROW_NORMS, 10))
    return fall.map(lambda left: log(left) / 490, "rate per step")


def widening(table: Table) -> Estimate:
    """Compare the ratio of kappa's error to the norms' at step 1000 with that at step 1."""
    before, after = (at(table, KAPPA, epoch) / at(table, ROW_NORMS, epoch) for epoch in (1, 1000))
    return paired_ratio(after, before)


def left(component: str, intervention: str = "none") -> Measure:
    """Measure what another 1000 steps leave of an error."""
    where: Where = {"size": SIZE, "intervention": intervention}
    return compared({"epoch": 2 * STEPS}, {"epoch": STEPS}, component=component, **where)


def end(component: str, intervention: str) -> Measure:
    """Measure the median error after twice the paper's steps."""
    where: Where = {"experiment": "e9", "size": SIZE, "intervention": intervention}
    return typical(component, **where, epoch=2 * STEPS)


CONCLUSION = {
    "holds": "time alone does not help, for what remains is noise that constant steps keep up",
    "fails": "time alone helps",
    "undecided": "these trials do not tell whether time alone helps",
}


def explain_speed(none: Estimate, noiseless: Estimate, smaller: Estimate, verdict: str) -> str:
    """Tell what more steps leave, with and without what could keep the error up."""
    return (
        f"Another 1000 steps leave {none:.2f} of the error of log kappa (n = {none.n}, size "
        f"{SIZE}), {noiseless:.2g} of it where labels have no noise, and {smaller:.2f} where steps "
        f"shrink to a tenth: {CONCLUSION[verdict]}."
    )


CLAIMS = (
    Claim(
        "e9.norms-vanish",
        "Norm errors fall exponentially, to 6.6e-5 after 1000 steps.",
        "P 4.9",
        measures={
            "error": typical(ROW_NORMS, size=128, epoch=1000),
            "rate": rate,
            "left": left(ROW_NORMS),
        },
        expect={"error": Below(1e-4), "rate": Between(-0.0105, -0.0095)},
        explain="The median is {error:.2g} after 1000 steps (n = {error.n}) and falls at a rate of "
        "{rate:.5f} per step before (log 0.99 is -0.01005: every step takes its hundredth); "
        "another 1000 steps leave {left:.2f} of it (size 32), where 0.99^1000 would be 0.00004.",
    ),
    Claim(
        "e9.kappa-plateaus",
        "Kappa's error plateaus at 0.017 rather than vanishing.",
        "P abstract, 4.9, 5.1, 6(5); S",
        measures={
            "left": left(KAPPA),
            "end": end(KAPPA, "none"),
            "noiseless_end": end(KAPPA, "no noise"),
            "large": typical(KAPPA, size=128, epoch=1000),
        },
        expect={"left": Above(0.5)},
        explain="Another 1000 steps leave {left:.2f} of the error (n = {left.n}, size 32), at a "
        "median of {end:.2g}, or of {noiseless_end:.2g} if labels have no noise (for the norms see "
        "e9.norms-vanish); at size 128 the median after 1000 steps is {large:.2g}.",
        answers=("W9(b)",),
    ),
    Claim(
        "e9.gap-widens",
        "The ratio of kappa's error to the norms' widens with training, from 0.8 to 250.",
        "P abstract, 4.9",
        measures={"widening": widening},
        expect={"widening": Above(1)},
        explain="In the median trial the ratio is {widening:.3g} times as large after 1000 steps "
        "as after one (n = {widening.n}).",
    ),
    Claim(
        "e9.not-speed",
        "The remaining kappa error is not merely a matter of convergence speed.",
        "P 4.9",
        measures={
            "none": left(LOG_KAPPA, "none"),
            "noiseless": left(LOG_KAPPA, "no noise"),
            "smaller": left(LOG_KAPPA, "smaller steps"),
        },
        expect={"none": Above(0.8)},
        explain=explain_speed,
        answers=("Q2",),
    ),
    Claim(
        "all.open-question",
        "Kappa is a part of matrices, other than row and column norms, that is not learned by "
        "itself.",
        "P 1, 6",
        measures={
            "noiseless": end(LOG_KAPPA, "no noise"),
            "rows": end(ROW_NORMS, "no noise"),
            "noisy": end(LOG_KAPPA, "none"),
        },
        expect={"noiseless": Above(0.01)},
        explain="Without label noise the median error of log kappa is {noiseless:.2g} after 2000 "
        "plain steps (n = {noiseless.n}), that of the row norms {rows:.2g}; with noise kappa's is "
        "{noisy:.2g}.",
    ),
)

PLOT = sheet(
    paths(KAPPA, ROW_NORMS, size=128, stream="paper"),
    paths("condition_number / row_norms", size=128, stream="paper"),
    paths(LOG_KAPPA, split="intervention", size=SIZE, seed=range(64),
          title=f"Twice as long, size {SIZE}"),
    spectrum_lines("Singular values after 1000 steps", size=128),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=9,
    title="Long training",
    section="4.9",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(SIZE,), intervention=TRIALS),
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: TRIALS.get(str(setting.get("intervention")), 32),
    effort=6.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={
        "paper": lambda setting: 0 if "intervention" in setting else 1,
        "own": lambda setting: 0 if "intervention" in setting else 6,  # 6 give an interval
    },
)
