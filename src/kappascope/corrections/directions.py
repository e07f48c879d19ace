"""Corrections that part a weight into a direction of pinned size and a scale that is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._factors import RowColumnFactors, TrainedFactors
from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._treatments import OptimizerStep, Rewrite, State, Treatment
from kappascope.corrections.correction import (
    Allowed,
    Correction,
    has_zero_matrix,
    pure_form,
    why_not_merged,
    why_not_written,
)
from kappascope.corrections.gauge import FreeSides
from kappascope.corrections.multipliers import Multipliers
from kappascope.corrections.pins import ColumnNormPin, NormPin, RowNormPin
from kappascope.matrix import tracking
from kappascope.model.weights import LiveWeight, precise


@final
@dataclass(frozen=True)
class MagnitudeDirection(Correction):
    """Learn row and column factors of a direction whose norm is pinned: ``diag(r) V diag(c)``.

    The direction V keeps the norm it has when attached (``pin``), so steps turn it and their size
    relative to it is the learning rate's alone; all scale is in the factors (``multipliers``).
    Magnitude-direction decoupling (arXiv 2606.25971) found this to lower the loss of language
    models, and others have repeated that. Weights whose factors are best left alone, such as a
    language model's head, are left out. A pin with a ``norm`` of its own changes the function: the
    first step takes the direction there, and factors do not make up for it.

    >>> two = MagnitudeDirection(pin=NormPin(norm=2.0))
    >>> two.corrected(torch.ones(2, 2) * 5, rows=torch.tensor([1.0, 3.0]))
    tensor([[1., 1.],
            [3., 3.]])
    """

    allowed: ClassVar[Allowed] = {
        "multipliers": (lambda part: isinstance(part, Multipliers), "Multipliers(...)"),
        "pin": (
            lambda part: isinstance(part, NormPin | RowNormPin | ColumnNormPin),
            "NormPin(...), RowNormPin(...) or ColumnNormPin(...)",
        ),
    }

    multipliers: Multipliers = Multipliers()  # noqa: RUF009  # frozen: one for all will do
    pin: NormPin | RowNormPin | ColumnNormPin = NormPin()  # noqa: RUF009  # frozen

    @pure_form
    def corrected(
        self, weight: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
    ) -> Float[Tensor, "*stack out in"]:
        """The direction with its norm, times factors; those not given are one."""
        return self.multipliers.corrected(self.pin.corrected(weight), rows, columns)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot have factors or a pinned direction, if that is so."""
        return self.multipliers.objection(weight, model) or self.pin.objection(weight, model)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Train factors, and pin what they multiply."""
        yield from self.multipliers.treatments(weight, model)
        yield from self.pin.treatments(weight, model)


@final
@dataclass(frozen=True)
class SpectralNormalization(Correction):
    """Part a weight into a gain and a matrix of constant spectral norm: ``W = g V``.

    Spectral normalization (Miyato et al. 2018) divides a weight by its largest singular value,
    found by power iteration, so that the layer is 1-Lipschitz. Here the gain times that norm starts
    at the largest singular value that the weight has, so attaching changes no output, and V is
    scaled back to that norm after every step instead of inside ``forward``. The gain is learned at
    ``rate`` times the learning rate (as Zhai et al. 2023 learn theirs in attention); with a rate of
    zero it is held, and so is the norm.

    >>> SpectralNormalization().corrected(torch.diag(torch.tensor([4.0, 1.0])), gain=2.0)
    tensor([[2.0000, 0.0000],
            [0.0000, 0.5000]])
    """

    rate: float = 1.0
    weight_decay: float = 0.0

    @pure_form
    def corrected(
        self, weight: Tensor, gain: Tensor | float | None = None
    ) -> Float[Tensor, "*stack out in"]:
        """The weight with the gain as its largest singular value; without one, as it is."""
        if gain is None:
            return weight
        return _with_largest(weight, torch.as_tensor(gain).to(weight), None)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot have a gain, if that is so."""
        if has_zero_matrix(weight):
            return "it is zero at first: there is no spectral norm to hold it at"
        return why_not_merged(weight) if self.rate else why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Train the gain unless it is held, and scale what it multiplies back after every step."""
        if self.rate:
            make = partial(
                RowColumnFactors,
                layout=weight.layout,
                sides=FreeSides(columns=False),
                scalar=True,
            )
            kind = SpectralNormalization
            yield TrainedFactors(kind, weight, make, self.rate, self.weight_decay)
        _, largest, _ = tracking.largest_triplet(precise(weight.matrix()))
        yield Rewrite(
            SpectralNormalization,
            weight,
            self._rewritten,
            {"largest": largest},
            _grown,
            acts_on_direction=True,
        )

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor:
        warm = memory.get("warm", {})
        new = _with_largest(precise(matrix), memory["largest"], warm)
        memory |= {"warm": warm, "calls": memory.get("calls", 0) + 1}
        return new


def _with_largest(weight: Tensor, largest: Tensor, memory: State | None) -> Tensor:
    """Scale a weight to this spectral norm; a zero matrix stays one."""
    _, now, _ = tracking.largest_triplet(weight, memory)
    factor = torch.where(now > 0, largest / torch.where(now > 0, now, 1.0), 1.0)
    return weight * factor[..., None, None]


def _grown(matrix: Tensor) -> State:
    """The form of what is remembered of a matrix that was looked at."""
    return {"warm": tracking.largest_form(matrix), "calls": 0}
