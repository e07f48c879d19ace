"""Experiment 14: corrections, with and without an oracle.

Which correction helps kappa, and which only because it is told the answer? Every correction of the
package, torch's spectral normalization and a full re-projection every 20 steps; where one can be
told the target's spectrum it runs with it and without. The same target, start and batches for all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD

from kappascope import corrections as c
from kappascope.lab.claims import Above, Below, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import sheet, spectrum_lines, strips
from kappascope.lab.measures import LOG_KAPPA, ROW_NORMS, improvement, paired
from kappascope.lab.optimizers import Descent
from kappascope.lab.statistics import wins
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, Step, last, outcome, together, train
from kappascope.matrix.components import Components
from kappascope.matrix.spectra import decomposition
from kappascope.paper.e04_strategies import fit

Arm = Callable[[Iterator[LinearBatch]], Iterator[Step]]
SIZE = 32
FREE: dict[str, c.Correction | None] = {
    "standard": None,
    "multipliers": c.Multipliers(),
    "norm pin": c.NormPin(),
    "penalty": c.SpectralPenalty(),  # holds kappa below that of 19 in 20 random matrices
    "orthogonal": c.OrthogonalPenalty(),
    "srip": c.OrthogonalPenalty(spectral=True),
    "svd": c.SVDCorrection(),  # towards the spectrum of the start
    "re-projection": c.SVDCorrection(step=1.0),
    "decay": c.SpectralDecay(),
    "bound": c.SingularValueBound(kappa=20.0 * SIZE),  # a Gaussian matrix exceeds it once in 10
    "value multipliers": c.SingularValueMultipliers(),
    "hybrid": c.Hybrid(),
}


def oracle(spectrum: Tensor) -> dict[str, c.Correction]:
    """Make the corrections that are told the singular values to be learned."""
    target = lambda weight: spectrum  # noqa: E731 - as corrections take it
    penalty = c.PaperPenalty(target=target)
    return {
        "penalty": penalty,
        "svd": c.SVDCorrection(target=target),
        "re-projection": c.SVDCorrection(step=1.0, target=target),
        "hybrid": c.Hybrid(c.Multipliers(), penalty),
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
    """Learn the same target with every correction."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    origin, s = start(random, size), target.singular_values
    arms: dict[tuple[str, bool], Arm] = {
        (name, informed): partial(fit, origin, correction)
        for informed, corrections in ((False, FREE), (True, oracle(s)))
        for name, correction in corrections.items()
    }
    arms["bound", True] = partial(bounded, origin, target.condition_number)
    for informed, norms in ((False, torch.ones_like(s[:, 0])), (True, s[:, 0])):
        arms["spectral norm", informed] = partial(normalized, origin, norms)
    ended = last(together(arms, Regression(target.matrix).batches(random)))
    for (name, informed), step in ended.items():
        yield from outcome(step.weight, target, strategy=name, oracle=informed)


OVERALL = "overall_matrix"
BLIND = (*(name for name in FREE if name != "standard"), "spectral norm")
TOLD = ("penalty", "svd", "re-projection", "bound", "hybrid", "spectral norm")


def gain(strategy: str, component: str, informed: bool = False) -> Measure:
    """Measure by how many per cent an error is below that of plain training, trial by trial."""
    ours = {"strategy": strategy, "oracle": informed}
    return improvement(ours, {"strategy": "standard", "oracle": False}, component=component)


def helped(strategy: str) -> Measure:
    """Measure the share of trials in which the oracle makes the error of log kappa smaller."""
    return paired(wins, {"oracle": True}, {"oracle": False}, strategy=strategy, component=LOG_KAPPA)


CLAIMS = (
    Claim(
        "e14.value-multipliers",
        "Learnable multipliers of the singular values treat what is not learned of the spectrum: "
        "they take half of log kappa's error away.",
        "R Q6, W4(c)",
        measures={
            "values_kappa": gain("value multipliers", LOG_KAPPA),
            "values_rows": gain("value multipliers", ROW_NORMS),
            "values_matrix": gain("value multipliers", OVERALL),
            "rows_kappa": gain("multipliers", LOG_KAPPA),
            "rows_matrix": gain("multipliers", OVERALL),
        },
        expect={"values_kappa": Above(50)},
        explain="Of log kappa's error they take {values_kappa:.0f} % away, trial by trial (n = "
        "{values_kappa.n}), of the row norms' {values_rows:.0f} % and of the matrix's "
        "{values_matrix:.0f} %; row and column multipliers take {rows_kappa:.0f} % of log kappa's "
        "and {rows_matrix:.0f} % of the matrix's.",
        answers=("W4(c)", "Q6"),
        teaches={"multipliers learn the scale": "fails"},
    ),
    Claim(
        "e14.oracle",
        "What a spectral correction does for kappa depends on being told the target's spectrum.",
        "R W4",
        measures={"shares": {f"for {name}": helped(name) for name in TOLD}},
        expect={"shares": Above(0.5)},
        explain="The oracle lowers the error of log kappa in this share of the trials: "
        "{shares:.4g} (n = {shares.n}).",
        answers=("W4(a)", "W4(e)", "W7"),
    ),
    Claim(
        "e14.blind",
        "No correction without an oracle takes half of the error of log kappa away.",
        "R W4",
        measures={"gains": {name: gain(name, LOG_KAPPA) for name in BLIND}},
        expect={"gains": Below(50)},
        explain="Per cent of log kappa's error taken away (negative: added), medians over paired "
        "trials (n = {gains.n}): {gains.names_first:.0f}.",
        answers=("W4(b)", "W4(d)", "W4(e)"),
    ),
    Claim(
        "e14.better-matrix",
        "A better kappa makes a better matrix: with the oracle's penalty the overall error falls.",
        "R W4(a); P 4.4",
        measures={
            "penalty_matrix": gain("penalty", OVERALL, informed=True),
            "penalty_kappa": gain("penalty", LOG_KAPPA, informed=True),
            "projection_kappa": gain("re-projection", LOG_KAPPA, informed=True),
            "projection_matrix": gain("re-projection", OVERALL, informed=True),
        },
        expect={"penalty_matrix": Above(1)},
        explain="The penalty takes {penalty_kappa:.0f} % of log kappa's error away and "
        "{penalty_matrix:.2f} % of the matrix's; re-projection on the target's spectrum takes "
        "{projection_kappa:.0f} % and {projection_matrix:.1f} % (n = {penalty_matrix.n}).",
        answers=("W4(a)",),
        teaches={"kappa is no end in itself": "fails"},
    ),
    Claim(
        "e14.harmless",
        "No correction without an oracle makes the matrix worse by more than 5 %.",
        "R W4",
        measures={"gains": {name: gain(name, OVERALL) for name in BLIND}},
        expect={"gains": Above(-5)},
        explain="Per cent of the overall error taken away (negative: added), medians over paired "
        "trials (n = {gains.n}): {gains.names_first:.0f}.",
        answers=("W4(b)", "W4(d)", "W9(d)"),
        teaches={"kappa is no end in itself": "fails"},
    ),
)

PLOT = sheet(
    strips(LOG_KAPPA, by="strategy", oracle=False, title="Log κ, without an oracle"),
    strips(LOG_KAPPA, by="strategy", oracle=True, title="Log κ, with an oracle"),
    strips("overall_matrix", by="strategy", oracle=False, title="The matrix, without"),
    strips("overall_matrix", by="strategy", oracle=True, title="The matrix, with"),
    spectrum_lines("Singular values, value multipliers", strategy="value multipliers"),
    spectrum_lines("Singular values, penalty with oracle", strategy="penalty", oracle=True),
)

EXPERIMENT = Experiment(
    number=14,
    title="Corrections",
    section="review W4, Q6",
    question=__doc__,
    grid=grid(size=(SIZE,)),
    trials=trials,
    own=192,
    effort=60.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 8},
)
