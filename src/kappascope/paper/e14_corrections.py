"""Experiment 14: corrections, with and without an oracle.

Which correction helps kappa, and which only because it is told the answer? Every correction of the
package, torch's spectral normalization and a full re-projection every 20 steps; a correction that
can be told the target's spectrum runs with it and without. The same target, start and batches for
all.

A correction at one untuned default is not tested fairly: a pin to the norm of the start holds a
matrix at a tenth of its target's norm. So each correction has three choices of its one number,
which is its strength or what it takes for the right scale. The first trials choose, by the error
that a claim speaks of, and the other trials are judged. A correction without such a number has one
choice.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD

from kappascope import corrections as c
from kappascope.lab.claims import Above, Below, Claim, Measure, Mended
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import sheet, strips
from kappascope.lab.measures import LOG_KAPPA, ROW_NORMS, Where, select
from kappascope.lab.optimizers import Descent
from kappascope.lab.statistics import Estimate, paired_ratio, wins
from kappascope.lab.table import Table
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, Step, last, rows, together, train
from kappascope.matrix import spectra
from kappascope.matrix.components import Components
from kappascope.matrix.spectra import decomposition
from kappascope.paper.e04_strategies import fit

Arm = Callable[[Iterator[LinearBatch]], Iterator[Step]]
SIZE = 32
HE = (2 * SIZE) ** 0.5  # the Frobenius norm of a start at scale 1; the paper's start has a tenth


def times_start(factor: float) -> Callable[[Tensor], Tensor]:
    """Make the start's spectrum, times a factor, the target of a correction."""
    return lambda weight: factor * spectra.singular_values(weight)


def hybrid(rate: float) -> c.Hybrid:
    """Give the hybrid's multipliers a learning rate."""
    return c.Hybrid(multipliers=c.Multipliers(rate=rate))


Choices = dict[str, dict[str, c.Correction | None]]
FREE: Choices = {
    "standard": {"": None},
    "multipliers": {f"{x}": c.Multipliers(rate=x) for x in (0.1, 0.3, 1.0)},
    "norm pin": {f"{x} of He's": c.NormPin(norm=x * HE) for x in (0.1, 0.3, 1.0)},
    # holds kappa below that of 19 in 20 random matrices
    "penalty": {f"{x}": c.SpectralPenalty(strength=x) for x in (0.0005, 0.005, 0.05)},
    "orthogonal": {f"{x}": c.OrthogonalPenalty(strength=x) for x in (1e-4, 1e-3, 1e-2)},
    "srip": {f"{x}": c.OrthogonalPenalty(strength=x, spectral=True) for x in (1e-4, 1e-3, 1e-2)},
    "svd": {f"{x:g} of start's": c.SVDCorrection(target=times_start(x)) for x in (1, 3, 10)},
    "re-projection": {
        f"{x:g} of start's": c.SVDCorrection(step=1.0, target=times_start(x)) for x in (1, 3, 10)
    },
    "decay": {f"{x}": c.SpectralDecay(strength=x) for x in (0.01, 0.1, 1.0)},
    # a Gaussian matrix exceeds the second once in 10
    "bound": {f"{x:g} d": c.SingularValueBound(kappa=x * SIZE) for x in (5.0, 20.0, 80.0)},
    "value multipliers": {f"{x}": c.SingularValueMultipliers(rate=x) for x in (0.1, 0.3, 1.0)},
    "hybrid": {f"{x}": hybrid(x) for x in (0.1, 0.3, 1.0)},
}
NORMS = (1.0, 3.0, 10.0)  # under torch's spectral normalization; a He start has 2.8


def oracle(spectrum: Tensor) -> Choices:
    """Make the corrections that are told the singular values to be learned."""
    target = lambda weight: spectrum  # noqa: E731 - as corrections take it
    penalty = {f"{x}": c.PaperPenalty(strength=x, target=target) for x in (0.0005, 0.005, 0.05)}
    return {
        "penalty": {**penalty},
        "svd": {f"{x}": c.SVDCorrection(step=x, target=target) for x in (0.03, 0.1, 0.3)},
        "re-projection": {"": c.SVDCorrection(step=1.0, target=target)},
        "hybrid": {
            f"{x}": c.Hybrid(c.Multipliers(rate=x), penalty["0.005"]) for x in (0.1, 0.3, 1.0)
        },
    }


def _normed(weight: Tensor, u: Tensor, vt: Tensor) -> nn.Linear:
    """Put a layer under spectral normalization that begins at the true singular vectors.

    Torch begins at random ones of its global generator, which is no trial's own.
    """
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    normed: Any = parametrizations.spectral_norm(layer)
    power = normed.parametrizations.weight[0]
    power._u, power._v = u[:, 0].clone(), vt[0].clone()
    return layer


class Normalized(nn.Module):
    """A matrix for each trial under torch's own spectral normalization, times a given norm."""

    def __init__(self, starts: Tensor, norms: Tensor) -> None:
        super().__init__()
        self.norms = norms[:, None, None]
        u, _, vt = decomposition(starts)
        self.layers = [_normed(*trial) for trial in zip(starts, u, vt, strict=True)]
        self.each = nn.ModuleList(self.layers)

    def forward(self) -> Tensor:
        """Return the matrices, each with its norm."""
        return self.norms * torch.stack([layer.weight for layer in self.layers])


def normalized(starts: Tensor, norms: Tensor, batches: Iterator[LinearBatch]) -> Iterator[Step]:
    """Train under spectral normalization."""
    model = Normalized(starts, norms)
    return train(model, SGD(model.parameters(), lr=0.01), batches)


def bounded(starts: Tensor, kappa: Tensor, batches: Iterator[LinearBatch]) -> Iterator[Step]:
    """Train within a bound on kappa that is each trial's own."""
    model = Matrix(starts)
    for step in train(model, Descent(model), batches):
        u, s, vt = decomposition(step.weight)
        within = c.banded(s, kappa[:, None])  # one bound a trial
        model.weight.data.copy_((u * within[..., None, :]) @ vt)
        yield step


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn the same target with every choice of every correction."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    origin, s = start(random, size), target.singular_values
    arms: dict[tuple[str, bool, str], Arm] = {
        (name, informed, choice): partial(fit, origin, correction)
        for informed, corrections in ((False, FREE), (True, oracle(s)))
        for name, choices in corrections.items()
        for choice, correction in choices.items()
    }
    arms["bound", True, ""] = partial(bounded, origin, target.condition_number)
    arms["spectral norm", True, ""] = partial(normalized, origin, s[:, 0])
    for norm in NORMS:
        norms = torch.full_like(s[:, 0], norm)
        arms["spectral norm", False, f"{norm}"] = partial(normalized, origin, norms)
    ended = last(together(arms, Regression(target.matrix).batches(random)))
    for (name, informed, choice), step in ended.items():
        yield from rows(step.weight, target, strategy=name, oracle=informed, choice=choice)


OVERALL = "overall_matrix"
BLIND = (*(name for name in FREE if name != "standard"), "spectral norm")
TOLD = ("penalty", "svd", "re-projection", "bound", "hybrid", "spectral norm")
TUNING = 48  # trials that choose, or half of them if there are fewer


def judged(table: Table, strategy: str, informed: bool, component: str, aim: str) -> Table:
    """Select the trials that did not choose, at the choice with the least median error of the aim.

    The rows are those of one component.
    """
    where: Where = {"stream": "own", "strategy": strategy, "oracle": informed}
    chosen = select(table, **where)
    count = len(chosen.rows["seed"].unique())
    tuning = min(TUNING, count // 2)
    errors = chosen.where(seed=range(tuning), component=aim).by("choice")
    medians = {choice: np.nanmedian(part.values()) for choice, part in errors.items()}
    best = min(medians, key=lambda choice: medians[choice])
    return chosen.where(seed=range(tuning, count), component=component, choice=best)


def gain(strategy: str, component: str, informed: bool = False, aim: str | None = None) -> Measure:
    """Measure by how many per cent an error is below that of plain training, trial by trial.

    The correction is tuned for that error, unless another ``aim`` is named.
    """

    def measure(table: Table) -> Estimate:
        ours = judged(table, strategy, informed, component, aim or component)
        theirs = judged(table, "standard", False, component, component)
        left = paired_ratio(*ours.paired(theirs))
        return left.map(lambda share: 100 * (1 - share), "improvement in per cent")

    return measure


def helped(strategy: str) -> Measure:
    """Measure the share of trials in which the oracle makes the error of log kappa smaller."""

    def measure(table: Table) -> Estimate:
        told, blind = (
            judged(table, strategy, informed, LOG_KAPPA, LOG_KAPPA) for informed in (True, False)
        )
        return wins(*told.paired(blind))

    return measure


ONE_DEFAULT = (
    "Every correction had one untuned default. Now each is tuned among three choices, in trials "
    "that are younger than the rule."
)

CLAIMS = (
    Claim(
        "e14.value-multipliers",
        "Learnable multipliers of the singular values correct the spectrum: they remove half "
        "of log kappa's error.",
        "R Q6, W4(c)",
        measures={
            "values_kappa": gain("value multipliers", LOG_KAPPA),
            "values_rows": gain("value multipliers", ROW_NORMS),
            "values_matrix": gain("value multipliers", OVERALL),
            "rows_kappa": gain("multipliers", LOG_KAPPA),
            "rows_matrix": gain("multipliers", OVERALL),
        },
        expect={"values_kappa": Above(50)},
        explain="Trial by trial they take away {values_kappa:.0f} % of log kappa's error (n = "
        "{values_kappa.n}), {values_rows:.0f} % of the row norms' and {values_matrix:.0f} "
        "% of the matrix's. Row and column multipliers take away {rows_kappa:.0f} % of log "
        "kappa's error and {rows_matrix:.0f} % of the matrix's.",
        answers=("W4(c)", "Q6"),
        mended=Mended(
            "fails",
            ONE_DEFAULT,
        ),
    ),
    Claim(
        "e14.oracle",
        "How much a spectral correction improves kappa depends on whether it is told the "
        "target's spectrum.",
        "R W4",
        measures={"shares": {f"for {name}": helped(name) for name in TOLD}},
        expect={"shares": Above(0.5)},
        explain="Every correction is tuned for the error of log kappa. With the oracle it lowers "
        "that error in this share of the trials: {shares:.2f} (n = {shares.n}).",
        answers=("W4(a)", "W4(e)", "W7"),
        mended=Mended(
            "fails",
            ONE_DEFAULT,
        ),
    ),
    Claim(
        "e14.blind",
        "No correction without an oracle removes half of the error of log kappa.",
        "R W4",
        measures={"gains": {name: gain(name, LOG_KAPPA) for name in BLIND}},
        expect={"gains": Below(50)},
        explain="Per cent of log kappa's error taken away (negative: added), medians over paired "
        "trials (n = {gains.n}), each correction tuned for it among three choices: "
        "{gains.names_first:.0f}.",
        answers=("W4(b)", "W4(d)", "W4(e)"),
        mended=Mended(
            "undecided",
            ONE_DEFAULT,
        ),
    ),
    Claim(
        "e14.better-matrix",
        "A better kappa makes a better matrix: with the oracle's penalty the overall error falls.",
        "R W4(a); P 4.4",
        measures={
            "penalty_matrix": gain("penalty", OVERALL, informed=True, aim=LOG_KAPPA),
            "penalty_kappa": gain("penalty", LOG_KAPPA, informed=True),
            "projection_kappa": gain("re-projection", LOG_KAPPA, informed=True),
            "projection_matrix": gain("re-projection", OVERALL, informed=True),
        },
        expect={"penalty_matrix": Above(1)},
        explain="The penalty takes away {penalty_kappa:.0f} % of log kappa's error and "
        "{penalty_matrix:.2f} % of the matrix's. Re-projection on the target's spectrum "
        "takes away {projection_kappa:.0f} % and {projection_matrix:.1f} % (n = "
        "{penalty_matrix.n}).",
        answers=("W4(a)",),
        mended=Mended(
            "fails",
            ONE_DEFAULT,
        ),
    ),
    Claim(
        "e14.harmless",
        "No correction without an oracle makes the matrix worse by more than 5 %.",
        "R W4",
        measures={"gains": {name: gain(name, OVERALL) for name in BLIND}},
        expect={"gains": Above(-5)},
        explain="Per cent of the overall error taken away (negative: added), medians over paired "
        "trials (n = {gains.n}), each correction tuned for it among three choices: "
        "{gains.names_first:.0f}.",
        answers=("W4(b)", "W4(d)", "W9(d)"),
        mended=Mended(
            "fails",
            ONE_DEFAULT,
        ),
    ),
)

PLOT = sheet(
    *(
        strips(LOG_KAPPA, OVERALL, by="choice", strategy=name, oracle=False, title=name)
        for name in ("multipliers", "norm pin", "penalty", "re-projection", "value multipliers")
    ),
    strips(LOG_KAPPA, OVERALL, by="choice", strategy="penalty", oracle=True,
           title="penalty, with an oracle"),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=14,
    title="Corrections",
    section="review W4, Q6",
    question=__doc__,
    grid=grid(size=(SIZE,)),
    trials=trials,
    own=160,
    effort=170.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 8},
)
