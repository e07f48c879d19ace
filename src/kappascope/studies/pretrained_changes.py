"""What is done to trained weights to see what they are good for: values removed, entries rounded.

Every change is a function of a matrix; how much of it was taken is its energy, the squared
Frobenius norm of the difference, so that different changes can be compared at equal energy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.spectra import decomposition
from kappascope.tasks import generator

EQUAL = "at equal energy"  # as the smallest of that share have


@dataclass(frozen=True, eq=False)
class Factors:
    """A matrix beside its singular value decomposition, which was taken in float64."""

    name: str
    matrix: Float[Tensor, "out in"]
    u: Tensor
    s: Tensor
    vt: Tensor

    @classmethod
    def of(cls, name: str, matrix: Tensor) -> Factors:
        """Decompose a matrix of any precision."""
        u, s, vt = decomposition(matrix.double())
        return cls(name, matrix.float(), u.float(), s, vt.float())

    def lowered(self, by: Float[Tensor, " rank"]) -> Tensor:
        """The matrix whose singular values are smaller by so much, with the same directions."""
        moved = by.nonzero().ravel()  # a part is taken away: the rest is as exact as it was
        return self.matrix - (self.u[:, moved] * by[moved].float()) @ self.vt[moved]


def smallest(s: Tensor, share: float) -> Tensor:
    """By how much the values fall if the smallest are removed."""
    return _from(s, len(s) - _count(s, share), _count(s, share))


def bulk(s: Tensor, share: float) -> Tensor:
    """As many values about the median one."""
    return _from(s, (len(s) - _count(s, share)) // 2, _count(s, share))


def largest(s: Tensor, share: float) -> Tensor:
    """As many of the largest."""
    return _from(s, 0, _count(s, share))


def bulk_equally(s: Tensor, share: float) -> Tensor:
    """Values about the median one, the last in part, with the energy of the smallest."""
    order = (torch.arange(len(s)) - (len(s) - 1) / 2).abs().argsort(stable=True)
    return _spent(s, order, smallest(s, share).square().sum())


def largest_equally(s: Tensor, share: float) -> Tensor:
    """The largest, or a part of it, with the energy of the smallest."""
    return _spent(s, torch.arange(len(s)), smallest(s, share).square().sum())


def _count(s: Tensor, share: float) -> int:
    return max(1, round(share * len(s)))


def _from(s: Tensor, first: int, count: int) -> Tensor:
    by = torch.zeros_like(s)
    by[first : first + count] = s[first : first + count]
    return by


def _spent(s: Tensor, order: Tensor, energy: Tensor) -> Tensor:
    """Values lowered in this order until the energy is used up."""
    costs = s[order].square()
    left = (energy - (costs.cumsum(0) - costs)).clamp(min=0)
    by = torch.zeros_like(s)
    by[order] = torch.minimum(left, costs).sqrt()
    return by


REMOVALS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "smallest": smallest,
    "bulk": bulk,
    "largest": largest,
    f"bulk {EQUAL}": bulk_equally,
    f"largest {EQUAL}": largest_equally,
}
NOISE = f"noise {EQUAL}"


def noise(factors: Factors, share: float, seed: int) -> Tensor:
    """The matrix with Gaussian noise of the energy of its smallest values added."""
    random = generator("pretrained noise", factors.name, seed)
    drawn = torch.randn(factors.matrix.shape, generator=random)
    size = smallest(factors.s, share).norm()
    return factors.matrix + drawn * (size / drawn.norm()).float()


def rounded(matrix: Tensor, bits: int, dim: int | None) -> Tensor:
    """Entries as whole multiples of a step, of ``bits`` with sign; one step for all, or each row.

    The step is the largest magnitude over the largest integer: symmetric, nothing is clipped.
    """
    top = 2 ** (bits - 1) - 1
    largest = matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)
    step = torch.where(largest > 0, largest, 1.0) / top
    return (matrix / step).round() * step


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda matrix: matrix.bfloat16().to(matrix.dtype),
    "int8": partial(rounded, bits=8, dim=None),
    "int8 by row": partial(rounded, bits=8, dim=1),
    "int4 by row": partial(rounded, bits=4, dim=1),
}


@dataclass(frozen=True)
class Change:
    """One thing that is done: what, with which share of the values, to matrices of which scope."""

    what: str
    share: float = 0.0
    scope: str = "all"  # all matrices, those of a kind, or one by its name

    def __call__(self, factors: Factors, seed: int) -> Tensor:
        """The changed matrix."""
        if self.what in FORMATS:
            return FORMATS[self.what](factors.matrix)
        if self.what == NOISE:
            return noise(factors, self.share, seed)
        return factors.lowered(REMOVALS[self.what](factors.s, self.share))
