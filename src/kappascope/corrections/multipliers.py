"""Corrections that learn factors of a weight's rows and columns, or of its singular values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._factors import RowColumnFactors, SingularValueFactors, TrainedFactors
from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._treatments import Treatment
from kappascope.corrections.correction import Correction, pure_form, why_not_merged
from kappascope.corrections.gauge import FreeSides
from kappascope.matrix import spectra
from kappascope.model.weights import LiveWeight


def scaled(
    weight: Float[Tensor, "*stack out in"],
    rows: Float[Tensor, "*stack out"],
    columns: Float[Tensor, "*stack in"],
) -> Float[Tensor, "*stack out in"]:
    """``diag(rows) W diag(columns)``: learnable multipliers (Velikanov et al. 2026).

    >>> scaled(torch.ones(2, 2), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
    tensor([[ 1., 10.],
            [ 2., 20.]])
    """
    return rows[..., None] * weight * columns[..., None, :]


@final
@dataclass(frozen=True)
class Multipliers(Correction):
    """Learn a factor for every row and column, ``diag(r) W diag(c)``, all one at first.

    Without rows and columns, one factor for the matrix. As published (Velikanov et al. 2026)
    factors enter linearly, not by their logarithm, and have a weight decay of 2e-3 that keeps
    products of them from drifting. They take ``rate`` times the learning rate of their weight; a
    tenth is that of the paper's experiment 4, and the best in ``benchmarks/hybrid.py``. Where
    another parameter undoes a factor it is left out (:mod:`kappascope.corrections.gauge`) unless
    ``gauge``, which takes all. They count in no gradient norm, and ``with handle.unclipped(): ...``
    around a clip of the weights spares them its effect.

    >>> Multipliers().corrected(torch.ones(2, 3), rows=torch.tensor([1.0, 2.0]))
    tensor([[1., 1., 1.],
            [2., 2., 2.]])
    """

    rows: bool = True
    columns: bool = True
    gauge: bool = False
    rate: float = 0.1
    weight_decay: float = 2e-3

    @pure_form
    def corrected(
        self, weight: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
    ) -> Float[Tensor, "*stack out in"]:
        """The weight with factors applied; those not given are one."""
        ones = torch.ones_like(weight)
        rows = ones[..., 0] if rows is None else rows
        return scaled(weight, rows, ones[..., 0, :] if columns is None else columns)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot have factors, if that is so."""
        if (reason := why_not_merged(weight)) is not None:
            return reason
        is_free = self._sides(weight, model) is not None
        return (
            None
            if is_free
            else "other parameters can undo its factors; gauge=True takes it all the same"
        )

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Train factors of the sides that are free, if one is."""
        if (sides := self._sides(weight, model)) is not None:
            scalar = not (self.rows or self.columns)
            make = partial(RowColumnFactors, layout=weight.layout, sides=sides, scalar=scalar)
            yield TrainedFactors(Multipliers, weight, make, self.rate, self.weight_decay)

    def _sides(self, weight: LiveWeight, model: AnalysedModel) -> FreeSides | None:
        """Which sides of the weight get factors, if one does."""
        free = FreeSides() if self.gauge else model.free_sides.get(weight.name, FreeSides())
        has_rows = free.rows and (self.rows or not self.columns)  # with neither, a single factor
        has_columns = free.columns and self.columns
        if not (has_rows or has_columns):
            return None
        return replace(free, rows=has_rows, columns=has_columns)


@final
@dataclass(frozen=True)
class SingularValueMultipliers(Correction):
    """Learn a factor for every singular value: ``U diag(m) U' W``, all one at first.

    U are the left singular vectors (the right ones of a tall weight, from the other side) at the
    time of attaching; ``every`` so many steps the factors are merged, start at one again, and U
    follows the weight. Rate and weight decay as in :class:`Multipliers`.

    >>> weight = torch.diag(torch.tensor([4.0, 1.0]))
    >>> SingularValueMultipliers().corrected(weight, torch.tensor([0.5, 3.0]))
    tensor([[2., 0.],
            [0., 3.]])
    """

    every: int = 100
    rate: float = 1.0
    weight_decay: float = 2e-3

    @pure_form
    def corrected(
        self, weight: Tensor, factors: Tensor | None = None
    ) -> Float[Tensor, "*stack out in"]:
        """The weight with its singular values multiplied, largest first."""
        if factors is None:
            return weight
        u, s, vt = spectra.decomposition(weight)
        return (u * (factors * s)[..., None, :]) @ vt

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot have factors, if that is so."""
        return why_not_merged(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Train factors of the singular values."""
        make = partial(SingularValueFactors, layout=weight.layout, every=self.every)
        kind = SingularValueMultipliers
        yield TrainedFactors(kind, weight, make, self.rate, self.weight_decay)
