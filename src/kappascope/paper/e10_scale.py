"""Experiment 10: scale, up to the sizes that networks have.

Does the error of kappa go on growing at sizes that networks have? The plain protocol of experiment
1 up to d = 2048, where the review asks for the asymptotic trend. Beside it the error that the
matrix has before it is trained: it is the ceiling of what can be lost.
"""

from collections.abc import Iterator

import torch

from kappascope.lab.claims import Above, Below, Between, Claim
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import error_lines, sheet, spectrum_lines, tail
from kappascope.lab.measures import KAPPA, LOG_KAPPA, ROW_NORMS, compared, growth_with_size, typical
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, last, outcome
from kappascope.matrix.components import Components

TRIALS = {32: 512, 64: 512, 128: 384, 256: 256, 512: 128, 1024: 80, 2048: 32}  # by size


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn a target of one size."""
    # float32: errors of log kappa are those of float64 to four digits, at 512 and 1024 too
    random = streams.random(dtype=torch.float32)
    target = Components(heterogeneous(random, size))
    origin = start(random, size)
    step = last(descend(Matrix(origin), Regression(target.matrix).batches(random)))
    yield from outcome(step.weight, target)
    untrained = Components(origin).log_condition_number - target.log_condition_number
    yield {"component": "untrained", "error": untrained.abs()}


SIZES, LARGE = tuple(TRIALS), (256, 512, 1024, 2048)

CLAIMS = (
    Claim(
        "e10.trend",
        "The error of log kappa goes on growing with size, from d = 256 to 2048.",
        "R W2",
        measures={
            "power": growth_with_size(stream="own", component=LOG_KAPPA, size=LARGE),
            "error": {size: typical(LOG_KAPPA, size=size) for size in LARGE},
        },
        expect={"power": Above(0)},
        explain="The median of |log kappa - log kappa*| grows as d to the power {power:.2f}: "
        "{error[256]:.2f} at d = 256, {error[512]:.2f} at 512, {error[1024]:.2f} at 1024, "
        "{error[2048]:.2f} at 2048 (n = {error[2048].n}).",
        answers=("W2",),
    ),
    Claim(
        "e10.superlinear",
        "Up to d = 2048 the median relative error of kappa grows faster than linearly.",
        "P abstract, 4.1; R W2",
        measures={
            "power": growth_with_size(stream="own", component=KAPPA, size=SIZES),
            "smallest": typical(KAPPA, size=32),
            "largest": typical(KAPPA, size=2048),
        },
        expect={"power": Above(1)},
        explain="It grows as d to the power {power:.2f}, from {smallest:.2f} at d = 32 to "
        "{largest:.2f} at d = 2048 (n = {largest.n}). While errors are small theory gives the "
        "power 0.5: what is left of the start falls like the entries, d^-0.5, and the smallest "
        "singular value like 1/d.",
        answers=("W2",),
        teaches={"size": "fails"},
    ),
    Claim(
        "e10.learned",
        "At d = 2048 training still brings kappa nearer to its target than the start was.",
        "R W2",
        measures={
            "ratio": compared({"component": LOG_KAPPA}, {"component": "untrained"}, size=2048),
            "trained": typical(LOG_KAPPA, size=2048),
            "untrained": typical("untrained", size=2048),
        },
        expect={"ratio": Below(1)},
        explain="Trial by trial the error of log kappa after 200 steps is {ratio:.2f} times that "
        "of the untrained matrix (n = {ratio.n}); the medians are {trained:.2f} and "
        "{untrained:.2f}.",
        answers=("W2",),
        teaches={"size": "holds"},
    ),
    Claim(
        "e10.norms",
        "Norm errors stay at about 0.13 at d = 1024 and 2048.",
        "R W2, S4",
        measures={
            "error": {f"at d = {size}": typical(ROW_NORMS, size=size) for size in (1024, 2048)}
        },
        expect={"error": Between(0.12, 0.14)},
        explain="The median error of the row norms is {error:.4g} (n = {error.n}).",
        answers=("W2",),
    ),
)

PLOT = sheet(
    error_lines(LOG_KAPPA, "untrained", by="size", title="Log κ, and before training"),
    error_lines(ROW_NORMS, KAPPA, by="size"),
    tail(KAPPA, by="size", size=(32, 128, 512, 2048)),
    spectrum_lines("Singular values, size 2048", size=2048),
)

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
    plot=PLOT,
    quick={"own": {32: 16, 64: 16, 128: 8, 256: 6, 512: 6}},
)
