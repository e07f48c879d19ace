"""What a weight matrix consists of, and how far a learned one is from its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import spectra


class component(cached_property[Tensor]):  # noqa: N801 - reads as the decorator it is
    """Make a method of :class:`Components` one of its components."""

    def __init__(self, method: Callable[[Components], Tensor]) -> None:
        super().__init__(method)

    def __set_name__(self, owner: type[Components], name: str) -> None:
        super().__set_name__(owner, name)
        owner.names = (*owner.names, name)


@dataclass(frozen=True, eq=False)
class Components:
    """The components of one weight matrix or of each matrix of a stack.

    Each is computed when first asked for, in float64, from at most one factorization.

    >>> Components(torch.diag(torch.tensor([4.0, 2.0, 1.0]))).condition_number
    tensor(4., dtype=torch.float64)
    """

    matrix: Float[Tensor, "*stack out in"]
    threshold: float = 0.01

    names: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def _matrix(self) -> Float[Tensor, "*stack out in"]:
        return self.matrix.detach().double()

    @component
    def row_norms(self) -> Float[Tensor, "*stack out"]:
        """Euclidean norm of every row."""
        return torch.linalg.vector_norm(self._matrix, dim=-1)

    @component
    def column_norms(self) -> Float[Tensor, "*stack in"]:
        """Euclidean norm of every column."""
        return torch.linalg.vector_norm(self._matrix, dim=-2)

    @component
    def singular_values(self) -> Float[Tensor, "*stack rank"]:
        """Singular values, largest first."""
        return spectra.singular_values(self._matrix)

    @component
    def condition_number(self) -> Float[Tensor, "*stack"]:
        """Largest singular value over the smallest; infinite where that one is rounding."""
        s = self.singular_values
        floor = max(self.matrix.shape[-2:]) * torch.finfo(s.dtype).eps * s[..., 0]
        return torch.where(s[..., -1] > floor, s[..., 0] / s[..., -1], torch.inf)

    @component
    def effective_rank(self) -> Float[Tensor, "*stack"]:
        """How many singular values exceed ``threshold`` times the largest."""
        s = self.singular_values
        return (s > self.threshold * s[..., :1]).sum(-1).to(s.dtype)

    @component
    def spectral_gap(self) -> Float[Tensor, "*stack"]:
        """Relative distance of the second singular value from the first."""
        s = self.singular_values
        return (s[..., 0] - s[..., 1]) / s[..., 0]

    @component
    def frobenius_norm(self) -> Float[Tensor, "*stack"]:
        """Root of the sum of squared entries."""
        return torch.linalg.matrix_norm(self._matrix)


def errors(learned: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Relative error of every component of ``learned`` against ``target`` (being written)."""
    ours, theirs = Components(learned), Components(target)
    found = {}
    for name in Components.names:
        a, b = getattr(ours, name), getattr(theirs, name)
        if name in ("row_norms", "column_norms", "singular_values"):
            norm = torch.linalg.vector_norm
            found[name] = norm(a - b, dim=-1) / norm(b, dim=-1)
        else:
            found[name] = (a - b).abs() / b.abs()
    norm = torch.linalg.matrix_norm
    found["overall_matrix"] = norm(learned.double() - target.double()) / norm(target.double())
    k, kstar = ours.condition_number, theirs.condition_number
    found["log_condition_number"] = (k.log() - kstar.log()).abs()
    return found
