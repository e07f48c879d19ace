"""Experiment 10: scale.

Does the error of kappa go on growing at sizes that networks have? The plain protocol of experiment
1 up to d = 2048, where the review asks for the asymptotic trend. Beside it the error that the
matrix has before it is trained: it is the ceiling of what can be lost.
"""

from collections.abc import Iterator

import torch

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.components import Components
from kappascope.figures import errors, sheet, spectrum, tail
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import compared, listed, select, typical
from kappascope.networks import Matrix
from kappascope.statistics import Estimate, Table, growth_exponent
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, last, outcome

TRIALS = {32: 512, 64: 512, 128: 384, 256: 256, 512: 128, 1024: 80, 2048: 32}
SIZES = tuple(TRIALS)
LARGE = (256, 512, 1024, 2048)
LOG, KAPPA, ROWS = "log_condition_number", "condition_number", "row_norms"


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn a target of one size."""
    # float32: errors of log kappa are those of float64 to four digits, at 512 and 1024 too
    random = streams.random(dtype=torch.float32)
    target = Components(heterogeneous(random, size))
    origin = start(random, size)
    step = last(descend(Matrix(origin), Regression(target.matrix).batches(random)))
    yield from outcome(step.weight, target)
    untrained = Components(origin).log_condition_number - target.log_condition_number
    yield {"component": "untrained", "error": untrained.abs()}


def growth(component: str, sizes: tuple[int, ...]) -> Measure:
    """The power of the size with which the median error grows."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stream="own", component=component, size=sizes)
        return growth_exponent({d: part.values() for d, part in chosen.by("size").items()})

    return measure


CLAIMS = (
    Claim(
        "e10.trend",
        "The error of log kappa goes on growing with size, from d = 256 to 2048.",
        "R W2",
        measure=growth(LOG, LARGE),
        expect=Above(0),
        also=tuple(typical(LOG, size=d) for d in LARGE),
        explain="The median of |log kappa - log kappa*| grows as d to the power {0:.2f}: "
        "{1:.2f} at d = 256, {2:.2f} at 512, {3:.2f} at 1024, {4:.2f} at 2048 (n = {4.n}).",
    ),
    Claim(
        "e10.superlinear",
        "Up to d = 2048 the median relative error of kappa grows faster than linearly.",
        "P abstract, 4.1; R W2",
        measure=growth(KAPPA, SIZES),
        expect=Above(1),
        also=(typical(KAPPA, size=32), typical(KAPPA, size=2048)),
        explain="It grows as d to the power {0:.2f}, from {1:.2f} at d = 32 to {2:.2f} at d = 2048 "
        "(n = {2.n}). While errors are small theory gives the power 0.5: what is left of the start "
        "falls like the entries, d^-0.5, and the smallest singular value like 1/d.",
    ),
    Claim(
        "e10.learned",
        "At d = 2048 training still brings kappa nearer to its target than the start was.",
        "R W2",
        measure=compared({"component": LOG}, {"component": "untrained"}, size=2048),
        expect=Below(1),
        also=(typical(LOG, size=2048), typical("untrained", size=2048)),
        explain="Trial by trial the error of log kappa after 200 steps is {0:.2f} times that of "
        "the untrained matrix (n = {0.n}); the medians are {1:.2f} and {2:.2f}.",
    ),
    Claim(
        "e10.norms",
        "Norm errors stay at about 0.13 at d = 1024 and 2048.",
        "R W2, S4",
        measure=tuple(typical(ROWS, size=d) for d in (1024, 2048)),
        expect=(Between(0.12, 0.14),) * 2,
        explain=listed("The median error of the row norms is {0} (n = {n}).", "at d = 1024",
                       "at d = 2048"),
    ),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=10,
    title="Scale",
    section="review W2",
    question=__doc__,
    grid=grid(size=SIZES),
    trials=trials,
    own=TRIALS,
    effort=1.2,
    claims=CLAIMS,
    plot=sheet(
        errors(LOG, "untrained", by="size", title="Log κ, and before training"),
        errors(ROWS, KAPPA, by="size"),
        tail(KAPPA, by="size", size=(32, 128, 512, 2048)),
        spectrum("Singular values, size 2048", size=2048),
    ),
    quick={"own": {32: 16, 64: 16, 128: 8, 256: 6, 512: 6}},
)
