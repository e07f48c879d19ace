"""Corrections that cap singular values: the largest, or all of them to an interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._treatments import OptimizerStep, Rewrite, State, Treatment
from kappascope.corrections.correction import (
    Allowed,
    Correction,
    has_zero_matrix,
    pure_form,
    why_not_written,
)
from kappascope.matrix import spectra, tracking
from kappascope.matrix.orthogonal import softly_capped
from kappascope.model.weights import LiveWeight, precise


@final
@dataclass(frozen=True)
class SpectralCap(Correction):
    """Keep the largest singular value at most ``cap``, or at what it is when attached if ``None``.

    With ``by_shape`` the limit is ``cap * sqrt(out / in)``, at which unit inputs (by root mean
    square) have outputs of about that size whatever the widths (Yang et al. 2023). The hard cap
    replaces every singular value above it by the limit, which gives the nearest matrix within it.
    Of a large weight a Cholesky factorization proves that nothing has to be done; where it fails,
    eigenvectors of the Gram matrix are taken. So that it does not fail at every step, values are
    taken a little (``slack``) inside.

    The ``soft`` cap applies an odd polynomial to the singular values by products of matrices alone,
    as Newton and Schulz's iteration does (Newhouse et al. 2025): the largest comes down to the
    limit (to a thousandth), those near it a little and small ones not at all. Of a large weight
    that takes no factorization, which pays on a GPU.

    >>> SpectralCap(2.0).corrected(torch.diag(torch.tensor([4.0, 1.0])))
    tensor([[2., 0.],
            [0., 1.]])
    """

    allowed: ClassVar[Allowed] = {
        **Correction.allowed,
        "cap": Correction.allowed["norm"],
    }

    cap: float | None = None
    by_shape: bool = False
    soft: bool = False
    slack: float = 0.02

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight within the cap; without one, as it is."""
        if self.cap is None:
            return weight
        limit = torch.full_like(weight[..., 0, 0], self._limit(self.cap, weight))
        if self.soft:
            return softly_capped(weight, limit)
        return tracking.lowered(weight, limit)

    def _limit(self, cap: float, weight: Tensor) -> float:
        rows, columns = weight.shape[-2:]
        return cap * (rows / columns) ** 0.5 if self.by_shape else cap

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten or has no value to be held at, if that is so."""
        if self.cap is None and has_zero_matrix(weight):
            return "it is zero at first: there is no singular value to cap it at; pass one"
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight whenever it is beyond the cap."""
        matrix = precise(weight.matrix())
        if self.cap is None:
            limit = tracking.largest_triplet(matrix)[1]
        else:
            limit = torch.full_like(matrix[..., 0, 0], self._limit(self.cap, matrix))
        yield Rewrite(SpectralCap, weight, self._rewritten, {"limit": limit.double()})

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        wide, limit = precise(matrix), memory["limit"]
        if matrix.ndim == 2 and tracking.lies_between(wide, 0.0, float(limit)):
            return None
        if self.soft:
            return softly_capped(wide, limit.to(wide))
        inner = limit / (1 + self.slack)
        if matrix.ndim == 2 and min(matrix.shape) > tracking.SVD_UP_TO:
            return tracking.lowered(wide, inner)  # nothing else was proven above
        beyond = torch.where(_is_beyond(wide, limit), inner, torch.inf)  # others are left alone
        return tracking.lowered(wide, beyond) if bool(beyond.isfinite().any()) else None


def _is_beyond(weight: Tensor, limit: Tensor) -> Tensor:
    return tracking.largest_triplet(weight)[1] > limit


def _clamped(weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The nearest matrix whose singular values all lie between two values."""
    u, s, vt = spectra.decomposition(weight)
    change = torch.minimum(torch.maximum(s, low.to(s)[..., None]), high.to(s)[..., None]) - s
    return weight + (u * change[..., None, :]) @ vt  # added: what stays is not rounded


@final
@dataclass(frozen=True)
class SingularValueBand(Correction):
    """Clip all singular values to the interval from ``low`` to ``high``, every so many steps.

    Singular value bounding (Jia et al. 2017) keeps every value of a weight near one, between
    ``1 / (1 + e)`` and ``1 + e``: an isometry nearly, trained by plain steps and a projection now
    and then. Unlike :class:`SingularValueBound`, which bounds the ratio of the outermost values at
    whatever scale, this fixes the scale too. The nearest matrix within the interval is taken. Of a
    large weight two Cholesky factorizations prove that nothing has to be done.

    >>> SingularValueBand(0.5, 2.0).corrected(torch.diag(torch.tensor([4.0, 1.0, 0.0])))
    tensor([[2.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.5000]])
    """

    allowed: ClassVar[Allowed] = {
        **Correction.allowed,
        "low": Correction.allowed["strength"],
        "high": (Correction.allowed["clip"][0], "a number above 0, at least low"),
    }

    low: float = 0.5
    high: float = 2.0
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            expected = f"SingularValueBand expected high to be at least low, {self.low!r}"
            raise ValueError(f"{expected}; got {self.high!r}")

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The nearest weight within the interval."""
        return self._within(weight)

    def _within(self, weight: Tensor) -> Tensor:
        ends = (torch.full_like(weight[..., 0, 0], end) for end in (self.low, self.high))
        return _clamped(weight, *ends)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten, if that is so."""
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight every so many steps, if it is outside of the interval."""
        yield Rewrite(SingularValueBand, weight, self._rewritten, {})

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        wide = precise(matrix)
        if step.index % self.every or tracking.lies_between(wide, self.low, self.high):
            return None
        return self._within(wide)
