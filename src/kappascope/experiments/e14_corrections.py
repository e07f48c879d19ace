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
from kappascope.components import Components
from kappascope.experiments.e4_strategies import fit
from kappascope.experiments.e14_claims import CLAIMS, LOG
from kappascope.figures import sheet, spectrum, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import Matrix
from kappascope.spectra import decomposition
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.training import Descent, Step, last, outcome, together, train

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
    "re-projection": c.SVDCorrection(rate=1.0),
    "decay": c.SpectralDecay(),
    "bound": c.SingularValueBound(kappa=20.0 * SIZE),  # a Gaussian matrix exceeds it once in 10
    "value multipliers": c.SingularValueMultipliers(),
    "hybrid": c.Hybrid(),
}


def oracle(spectrum: Tensor) -> dict[str, c.Correction]:
    """Corrections that are told the singular values to be learned."""
    target = lambda weight: spectrum  # noqa: E731 - as corrections take it
    penalty = c.SpectralPenalty(target=target, band=0.0)
    return {
        "penalty": penalty,
        "svd": c.SVDCorrection(target=target),
        "re-projection": c.SVDCorrection(rate=1.0, target=target),
        "hybrid": c.Hybrid(c.Multipliers(), penalty),
    }


def _normed(weight: Tensor, u: Tensor, vt: Tensor) -> nn.Linear:
    """A layer under spectral normalization that begins at the true singular vectors.

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
        """The matrices, each with its norm."""
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


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn the same target with every correction."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    origin, s = start(random, size), target.singular_values
    arms: dict[tuple[str, bool], Arm] = {
        (name, told): partial(fit, origin, correction)
        for told, found in ((False, FREE), (True, oracle(s)))
        for name, correction in found.items()
    }
    arms["bound", True] = partial(bounded, origin, target.condition_number)
    for told, norms in ((False, torch.ones_like(s[:, 0])), (True, s[:, 0])):
        arms["spectral norm", told] = partial(normalized, origin, norms)
    ended = last(together(arms, Regression(target.matrix).batches(random)))
    for (name, told), step in ended.items():
        yield from outcome(step.weight, target, strategy=name, oracle=told)


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
    plot=sheet(
        strips(LOG, by="strategy", oracle=False, title="Log κ, without an oracle"),
        strips(LOG, by="strategy", oracle=True, title="Log κ, with an oracle"),
        strips("overall_matrix", by="strategy", oracle=False, title="The matrix, without"),
        strips("overall_matrix", by="strategy", oracle=True, title="The matrix, with"),
        spectrum("Singular values, value multipliers", strategy="value multipliers"),
        spectrum("Singular values, penalty with oracle", strategy="penalty", oracle=True),
    ),
    quick={"own": 8},
)
