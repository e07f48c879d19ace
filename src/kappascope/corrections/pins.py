"""Corrections that pin norms: of a weight, of each of its rows, or of each of its columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._treatments import OptimizerStep, Rescaled, Rewrite, State, Treatment
from kappascope.corrections.correction import Correction, pure_form, why_not_written
from kappascope.model.weights import LiveWeight

WHOLE, ROWS, COLUMNS = (-1, -2), (-1,), (-2,)  # the dimensions that a norm sums over


def with_norms(weight: Tensor, norms: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Scale a matrix, or each row or column of it, to these norms; what is zero stays so.

    >>> with_norms(torch.diag(torch.tensor([4.0, 0.0])), torch.tensor(2.0), ROWS)
    tensor([[2., 0.],
            [0., 0.]])
    """
    return weight * _factor(norms_of(weight, sides), norms, sides).to(weight)


def _factor(now: Tensor, wanted: Tensor, sides: tuple[int, ...]) -> Tensor:
    """What a matrix, or each row or column of it, is multiplied by to have the norms wanted."""
    wanted = wanted.to(now)
    factor = torch.where((now > 0) & (wanted > 0), wanted / torch.where(now > 0, now, 1.0), 1.0)
    for side in sides:
        factor = factor.unsqueeze(side)
    return factor


def norms_of(weight: Tensor, sides: tuple[int, ...]) -> Tensor:
    """The norms over these dimensions, in float64.

    >>> norms_of(torch.diag(torch.tensor([4.0, 3.0])), WHOLE)
    tensor(5., dtype=torch.float64)
    """
    return torch.linalg.vector_norm(weight, dim=sides, dtype=torch.float64)


@dataclass(frozen=True)
class _Pin:
    """How norms over some dimensions of one weight are held: a rule for :class:`Rewrite`."""

    sides: tuple[int, ...]

    def __call__(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Rescaled:
        now = norms_of(matrix, self.sides)
        return Rescaled(_factor(now, memory["norm"], self.sides), torch.isfinite(now).all())

    def objection(self, weight: LiveWeight, norm: float | None) -> str | None:
        if norm is not None and norm > torch.finfo(torch.float32).max:
            return f"no weight of float32 can have a norm of {norm!r}"
        if norm is None and not bool(weight.matrix().any()):
            return "it is zero at first: there is no norm to hold it at; pass one"
        return why_not_written(weight)

    def treatment(self, kind: type, weight: LiveWeight, norm: float | None) -> Treatment:
        norms = norms_of(weight.matrix(), self.sides)
        norms = norms if norm is None else torch.full_like(norms, norm)
        return Rewrite(kind, weight, self, {"norm": norms}, acts_on_direction=True)

    def corrected(self, weight: Tensor, norm: float | None) -> Tensor:
        if norm is None:
            return weight
        wanted = torch.tensor(norm, dtype=torch.float64, device=weight.device)
        return with_norms(weight, wanted, self.sides)


@final
@dataclass(frozen=True)
class NormPin(Correction):
    """Hold the Frobenius norm at its initial value, or at ``norm``: no scale is learned.

    The remedy opposite to :class:`Multipliers`. A zero matrix has no norm to be held at: it is left
    out (within a stack of matrices, left free). In 16 bits nothing changes before the norm is off
    by half of a last place: 0.4 % in bfloat16.

    >>> NormPin(norm=2.0).corrected(torch.eye(4) * 3)[0]
    tensor([1., 0., 0., 0.])
    """

    norm: float | None = None

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight with that norm; without a norm, as it is."""
        return _Pin(WHOLE).corrected(weight, self.norm)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten or has no norm, if that is so."""
        return _Pin(WHOLE).objection(weight, self.norm)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight with the norm it has now, or the one that was given."""
        yield _Pin(WHOLE).treatment(NormPin, weight, self.norm)


@final
@dataclass(frozen=True)
class RowNormPin(Correction):
    """Hold the Euclidean norm of every row at its initial value, or at ``norm``.

    A row of ``y = W x`` makes one output: its direction is learned and its size is not, as in the
    direction part of weight normalization (Salimans and Kingma 2016). Rows that are zero at first
    stay free; of a convolution a row is an output channel.

    >>> RowNormPin(norm=2.0).corrected(torch.diag(torch.tensor([4.0, 1.0])))
    tensor([[2., 0.],
            [0., 2.]])
    """

    norm: float | None = None

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight with rows of that norm; without a norm, as it is."""
        return _Pin(ROWS).corrected(weight, self.norm)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten or has no norm, if that is so."""
        return _Pin(ROWS).objection(weight, self.norm)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight with the row norms it has now, or the one that was given."""
        yield _Pin(ROWS).treatment(RowNormPin, weight, self.norm)


@final
@dataclass(frozen=True)
class ColumnNormPin(Correction):
    """Hold the Euclidean norm of every column at its initial value, or at ``norm``.

    A column of ``y = W x`` is what one input writes. Columns that are zero at first stay free.

    >>> ColumnNormPin(norm=1.0).corrected(torch.tensor([[3.0, 0.0], [4.0, 2.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 1.0000]])
    """

    norm: float | None = None

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight with columns of that norm; without a norm, as it is."""
        return _Pin(COLUMNS).corrected(weight, self.norm)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten or has no norm, if that is so."""
        return _Pin(COLUMNS).objection(weight, self.norm)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight with the column norms it has now, or the one that was given."""
        yield _Pin(COLUMNS).treatment(ColumnNormPin, weight, self.norm)
