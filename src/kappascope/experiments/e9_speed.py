"""Experiment 9, the cause: whether the error that remains is a matter of speed.

Train twice as long, with label noise, without it, and with smaller and smaller steps; at a size
that allows for many trials, because what remains fluctuates.
"""

from collections.abc import Iterator

from kappascope.claims import Above, Claim, Measure
from kappascope.figures import paths
from kappascope.lab import Batch, grid
from kappascope.measures import Where, compared, typical
from kappascope.networks import Matrix
from kappascope.statistics import Estimate
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.training import Step, rows, sgd, train

STEPS = 1000  # the paper's
SIZE = 32
TRIALS = {"none": 512, "no noise": 64, "smaller steps": 64}  # 512: to tell 0.8 of noise from all
GRID = grid(size=(SIZE,), intervention=TRIALS)


def longer(streams: Streams, size: int, intervention: str) -> Iterator[Batch]:
    """Learn for twice as long, looked at eight times."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    batches = Regression(target).batches(random)
    for step in fit(Matrix(start(random, size)), batches, intervention):
        if step.index and step.index % (STEPS // 4) == 0:
            yield from rows(step.weight, target, epoch=step.index)


def fit(model: Matrix, batches: Iterator[LinearBatch], intervention: str) -> Iterator[Step]:
    """Train in one of the three ways."""
    optimizer = sgd(model)
    seen = noiseless(batches) if intervention == "no noise" else batches
    for step in train(model, optimizer, seen, 2 * STEPS):
        if intervention == "smaller steps":
            # harmonic once the paper's steps are over: a tenth at the end
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + 9 * max(0, step.index / STEPS - 1))
        yield step


def left(component: str, intervention: str = "none") -> Measure:
    """What another 1000 steps leave of an error."""
    where: Where = {"size": SIZE, "intervention": intervention}
    return compared({"epoch": 2 * STEPS}, {"epoch": STEPS}, component=component, **where)


def end(component: str, intervention: str, epoch: int = 2 * STEPS) -> Measure:
    """The median error after some steps."""
    return typical(component, experiment="e9", size=SIZE, intervention=intervention, epoch=epoch)


SO = {
    "holds": "time alone does not help, for what remains is noise that constant steps keep up",
    "fails": "time alone helps",
    "undecided": "these trials do not tell whether time alone helps",
}


def explain(none: Estimate, noiseless: Estimate, smaller: Estimate, verdict: str) -> str:
    """What more steps leave, with and without what could keep the error up."""
    return (
        f"Another 1000 steps leave {none:.2f} of the error of log kappa (n = {none.n}, size "
        f"{SIZE}), {noiseless:.2g} of it where labels have no noise, and {smaller:.2f} where steps "
        f"shrink to a tenth: {SO[verdict]}."
    )


NOT_SPEED = Claim(
    "e9.not-speed",
    "The remaining kappa error is not merely a matter of convergence speed.",
    "P 4.9",
    measure=left("log_condition_number", "none"),
    expect=Above(0.8),
    also=(left("log_condition_number", "no noise"), left("log_condition_number", "smaller steps")),
    explain=explain,
)

OPEN_QUESTION = Claim(
    "all.open-question",
    "Kappa is a part of matrices, other than row and column norms, that is not learned by itself.",
    "P 1, 6",
    measure=end("log_condition_number", "no noise"),
    expect=Above(0.01),
    also=(end("row_norms", "no noise"), end("log_condition_number", "none")),
    explain="Without label noise the median error of log kappa is {0:.2g} after 2000 plain steps "
    "(n = {0.n}), that of the row norms {1:.2g}; with noise kappa's is {2:.2g}.",
)

PANEL = paths(
    "log_condition_number", split="intervention", size=SIZE, seed=range(64),
    title=f"Twice as long, size {SIZE}",
)  # fmt: skip
