"""Experiment 10: scale, up to the sizes that networks have.

Does the error of kappa go on growing at sizes that networks have? The plain protocol of experiment
1 up to d = 2048, where the review asks for the asymptotic trend. Beside it stands the error that
the matrix has before it is trained, which is the most that can be lost. At the largest sizes trials
are few. There draws of the theory (``source`` "drawn") stand beside them, which give what SGD makes
of a start.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Measure, Mended
from kappascope.lab.experiment import Experiment, Rows, grid, size_of
from kappascope.lab.figures import error_lines, sheet, spectrum_lines, tail
from kappascope.lab.measures import (
    KAPPA,
    LOG_KAPPA,
    ROW_NORMS,
    Where,
    compared,
    medians_compared,
    select,
    typical,
)
from kappascope.lab.statistics import Estimate, growth_exponent
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Random, Regression, Streams, heterogeneous, start
from kappascope.lab.training import STEPS, Matrix, descend, last, outcome
from kappascope.matrix import spectra
from kappascope.matrix.components import Components
from kappascope.theory import predicted_weights

TRIALS = {32: 512, 64: 512, 128: 384, 256: 256, 512: 128, 1024: 80, 2048: 32}  # by size


DRAWN = {1024: 200, 2048: 200}  # of theory's sampler, by size


def trials(streams: Streams, size: int, source: str | None = None) -> Iterator[Rows]:
    """Learn a target of one size, or draw what would be learned."""
    # float32: errors of log kappa are those of float64 to four digits, at 512 and 1024 too
    random = streams.random(dtype=torch.float32)
    target = Components(heterogeneous(random, size))
    origin = start(random, size)
    if source:
        yield from drawn(target.matrix, origin, random)
        return
    step = last(descend(Matrix(origin), Regression(target.matrix).batches(random)))
    yield from outcome(step.weight, target)
    untrained = Components(origin).log_condition_number - target.log_condition_number
    yield {"component": "untrained", "error": untrained.abs()}


def drawn(target: Tensor, origin: Tensor, random: Random) -> Iterator[Rows]:
    """Draw what 200 steps make of the starts, by theory; only kappa is looked at."""
    [weight] = predicted_weights(target, origin, [STEPS], random.normal)
    logs = [
        # not all singular values: at size 2048 they take longer than the draw
        torch.tensor([math.log(spectra.vitals(each).condition_number or math.nan) for each in part])
        for part in (weight, target)
    ]
    difference = (logs[0] - logs[1]).double()
    yield {"component": "log_condition_number", "error": difference.abs()}
    yield {"component": "condition_number", "error": difference.expm1().abs()}


SIZES, LARGE = tuple(TRIALS), (256, 512, 1024, 2048)


def growth(component: str, sizes: tuple[int, ...]) -> Measure:
    """Measure the power with which the median error grows: drawn at sizes that are, else trained.

    Draws are six times as many as trained trials at size 2048, and have their law (e10.drawn).
    """

    def measure(rows: Table) -> Estimate:
        groups: dict[float, Floats] = {}
        for size in sizes:
            source = "drawn" if size in DRAWN else None
            where: Where = {"stream": "own", "component": component, "size": size}
            groups[size] = select(rows, **where, source=source).values()
        return growth_exponent(groups)

    return measure


def error(component: str, size: int) -> Measure:
    """Measure the median error of trained trials of one size."""
    return typical(component, size=size, source=None)


def draw(component: str, size: int) -> Measure:
    """Measure the median error of theory's draws of one size."""
    return typical(component, size=size, source="drawn")


def agreement(size: int) -> Measure:
    """Compare the median error of log kappa in theory's draws with that of trained trials."""
    arms = ({"source": "drawn"}, {"source": None})
    return medians_compared(*arms, component=LOG_KAPPA, size=size)


CLAIMS = (
    Claim(
        "e10.trend",
        "From d = 256 to 2048 the error of log kappa goes on growing with size.",
        "R W2",
        measures={
            "power": growth(LOG_KAPPA, LARGE),
            "error": {size: error(LOG_KAPPA, size) for size in LARGE},
            "drawn": {size: draw(LOG_KAPPA, size) for size in DRAWN},
        },
        expect={"power": Above(0)},
        explain="The median of |log kappa - log kappa*| grows as d to the power {power:.2f}: "
        "{error[256]:.2f} at d = 256, {error[512]:.2f} at 512, {error[1024]:.2f} at 1024, "
        "{error[2048]:.2f} at 2048 (n = {error[2048].n}); in theory's draws {drawn[1024]:.2f} at "
        "1024 and {drawn[2048]:.2f} at 2048 (n = {drawn[2048].n}), which stand for the trained "
        "trials there.",
        answers=("W2", "S4"),
        mended=Mended(
            "undecided",
            "32 trained trials at d = 2048 did not decide. Now 200 draws of the theory, drawn "
            "after the rule, stand for trained trials at 1024 and 2048.",
        ),
    ),
    Claim(
        "e10.superlinear",
        "Up to d = 2048 the median relative error of kappa grows faster than linearly.",
        "P abstract, 4.1; R W2",
        measures={
            "power": growth(KAPPA, SIZES),
            "smallest": error(KAPPA, 32),
            "largest": draw(KAPPA, 2048),
        },
        expect={"power": Above(1)},
        explain="It grows as d to the power {power:.2f}, from {smallest:.2f} at d = 32 to "
        "{largest:.2f} at d = 2048 (n = {largest.n} draws). While errors are small, theory "
        "gives the power 0.5: what is left of the start falls as the entries do, d^-0.5, "
        "and the smallest singular value falls as 1/d.",
        answers=("W2", "S4"),
        mended=Mended(
            "fails",
            "32 trained trials stood for d = 2048. Now 200 draws of the theory, drawn after the "
            "rule, stand for trained trials at 1024 and 2048.",
        ),
    ),
    Claim(
        "e10.learned",
        "At d = 2048 training still brings kappa nearer to its target than it was at the start.",
        "R W2",
        measures={
            "ratio": compared(
                {"component": LOG_KAPPA}, {"component": "untrained"}, size=2048, source=None
            ),
            "trained": error(LOG_KAPPA, 2048),
            "untrained": error("untrained", 2048),
        },
        expect={"ratio": Below(1)},
        explain="Trial by trial the error of log kappa after 200 steps is {ratio:.2f} times that "
        "of the untrained matrix (n = {ratio.n}); the medians are {trained:.2f} and "
        "{untrained:.2f}.",
        answers=("W2",),
    ),
    Claim(
        "e10.norms",
        "Norm errors stay at about 0.13 at d = 1024 and 2048.",
        "R W2, S4",
        measures={"error": {f"at d = {size}": error(ROW_NORMS, size) for size in (1024, 2048)}},
        expect={"error": Between(0.12, 0.14)},
        explain="The median error of the row norms is {error:.4g} (n = {error.n}).",
        answers=("W2",),
    ),
    Claim(
        "e10.drawn",
        "At d = 1024 and 2048 the draws of the theory have the error of log kappa that "
        "training has.",
        "control; R W2",
        measures={"ratio": {f"at d = {size}": agreement(size) for size in DRAWN}},
        expect={"ratio": Between(0.4, 2.5)},  # 32 trained trials at 2048 tell no less
        explain="The median of |log kappa - log kappa*| in theory's draws is {ratio:.2f} times "
        "that of trained trials (n = {ratio.n}).",
        answers=("W2",),
    ),
)

PLOT = sheet(
    error_lines(LOG_KAPPA, "untrained", by="size", source=None, title="Log κ, and before training"),
    error_lines(ROW_NORMS, KAPPA, by="size", source=None),
    tail(KAPPA, by="size", source=None, size=(32, 128, 512, 2048)),
    spectrum_lines("Singular values, size 2048", size=2048),
)

EXPERIMENT = Experiment(
    number=10,
    title="Scale",
    section="review W2",
    question=__doc__,
    grid=grid(size=SIZES) + grid(size=tuple(DRAWN), source=("drawn",)),
    trials=trials,
    own=lambda setting: (DRAWN if "source" in setting else TRIALS)[size_of(setting)],
    effort=1.2,
    claims=CLAIMS,
    plot=PLOT,
    quick={"grid": grid(size=SIZES), "own": {32: 16, 64: 16, 128: 8, 256: 6, 512: 6}},
)
