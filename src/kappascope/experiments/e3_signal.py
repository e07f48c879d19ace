"""Experiment 3: gradient signal (Section 4.3).

How much gradient does each singular value receive, and does that decide what is learned? Every
fifth step, the slope of the batch loss along each singular direction is recorded. Whether its
imbalance keeps kappa from converging is tested by interventions (claim e3.cause).
"""

from collections.abc import Iterator

from torch import Tensor

from kappascope.components import Components
from kappascope.experiments.e3_cause import interventions
from kappascope.experiments.e3_claims import CLAIMS, FIGURES
from kappascope.figures import paths, sheet, spectrum, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.spectra import decomposition
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.training import descend, outcome

EVERY = 5  # steps between recordings
NUDGE = 1e-5  # of a singular value, in the paper's forward difference


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Batch]:
    """Follow the singular values of one matrix and the signal they receive."""
    if question:
        yield from interventions(streams, size)
        return
    random = streams.random()
    target = heterogeneous(random, size)
    for step in descend(Matrix(start(random, size)), Regression(target).batches(random)):
        if step.index % EVERY == 0 and isinstance(step.batch, LinearBatch):
            yield from ({"epoch": step.index, **row} for row in signal(step.weight, step.batch))
            if streams.name == "paper":  # one run: of many, the whole profile would drown the rest
                yield from (
                    {"epoch": step.index, **row} for row in profile(step.weight, step.batch)
                )
    yield from outcome(step.weight, target)


def signal(weight: Tensor, batch: LinearBatch) -> Iterator[Batch]:
    """The paper's difference quotient along the first, middle and last singular direction."""
    u, s, vt = decomposition(weight)
    for i in (0, len(s.mT) // 2, len(s.mT) - 1):
        nudged = weight + NUDGE * u[..., :, [i]] * vt[..., [i], :]
        rise = batch.loss(nudged) - batch.loss(weight)
        yield {"index": i, "component": "signal", "value": rise / NUDGE}


def profile(weight: Tensor, batch: LinearBatch) -> Iterator[Batch]:
    """The slope along every singular direction in closed form, and the values themselves."""
    u, s, vt = decomposition(weight)
    wanted = Components(batch.task.target).singular_values
    slopes = (u * (batch.gradient(weight) @ vt.mT)).sum(-2)  # u_i' G v_i
    for i, (slope, value, target) in enumerate(zip(slopes.mT, s.mT, wanted.mT, strict=True)):
        yield {"index": i, "component": "gradient", "value": slope}
        yield {"index": i, "component": "singular_value", "value": value, "target": target}


EXPERIMENT = Experiment(
    number=3,
    title="Gradient signal",
    section="4.3",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), question=("cause",)),
    trials=trials,
    paper=lambda setting: 0 if "question" in setting else 1,
    own=lambda setting: 64 if "question" in setting else 20,
    effort=4.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=sheet(
        paths("signal", column="value", split="index", stream="paper",
              title="Signal of the first, middle and last singular value"),
        paths("singular_value", column="value", split="index", stream="paper", index=(0, 64, 127),
              title="The singular values themselves"),
        strips("log_condition_number", by="intervention", question="cause",
               intervention=("none", "no noise", "no noise, from 0", "no imbalance"),
               title="What keeps kappa from converging"),
        spectrum("Singular values", size=128),
    ),
    quick={"own": 6},
)  # fmt: skip
