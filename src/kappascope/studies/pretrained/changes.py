"""Changes of trained weights: singular values removed, noise added, entries rounded.

Every change is a function of a matrix. The energy of a change is the squared Frobenius norm of the
difference; different changes can be compared at equal energy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.lab.tasks import generator
from kappascope.matrix.spectra import decomposition
from kappascope.studies.quantization import quantized

DECILE = 0.1  # the share of singular values that most changes remove
SINGLE = "int8 by row"  # the change of one matrix at a time
EQUAL = "at equal energy"  # as the smallest of that share have


@dataclass(frozen=True, eq=False)
class Factors:
    """A matrix with its singular value decomposition, which was computed in float64."""

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
        """Lower singular values by so much, with the same directions."""
        moved = by.nonzero().ravel()  # a part is taken away: the rest is as exact as it was
        return self.matrix - (self.u[:, moved] * by[moved].float()) @ self.vt[moved]


def smallest(s: Tensor, share: float) -> Tensor:
    """Remove the smallest values: by how much each falls."""
    return _window(s, share, 1.0)


def bulk(s: Tensor, share: float) -> Tensor:
    """Remove as many values about the median one."""
    return _window(s, share, 0.5)


def largest(s: Tensor, share: float) -> Tensor:
    """Remove as many of the largest values."""
    return _window(s, share, 0.0)


def bulk_equally(s: Tensor, share: float) -> Tensor:
    """Remove values about the median one, the last in part, with the energy of the smallest."""
    order = (torch.arange(len(s)) - (len(s) - 1) / 2).abs().argsort(stable=True)
    return _spent(s, order, smallest(s, share).square().sum())


def largest_equally(s: Tensor, share: float) -> Tensor:
    """Remove the largest value, or a part of it, with the energy of the smallest."""
    return _spent(s, torch.arange(len(s)), smallest(s, share).square().sum())


def _window(s: Tensor, share: float, place: float) -> Tensor:
    """Take a share of the values as one window, at a place from 0 (the largest) to 1."""
    count = max(1, round(share * len(s)))
    first = int(place * (len(s) - count))
    by = torch.zeros_like(s)
    by[first : first + count] = s[first : first + count]
    return by


def _spent(s: Tensor, order: Tensor, energy: Tensor) -> Tensor:
    """Lower values in this order until the energy is used up."""
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
    """Add Gaussian noise that has the energy of the smallest values."""
    random = generator("pretrained noise", factors.name, seed)
    drawn = torch.randn(factors.matrix.shape, generator=random)
    size = smallest(factors.s, share).norm()
    return factors.matrix + drawn * (size / drawn.norm()).float()


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda matrix: matrix.bfloat16().to(matrix.dtype),
    "int8": partial(quantized, bits=8),
    "int8 by row": partial(quantized, bits=8, dim=1),
    "int4 by row": partial(quantized, bits=4, dim=1),
}


@dataclass(frozen=True)
class Change:
    """A change: what is done, with which share of the values, to matrices of which scope."""

    what: str
    share: float = 0.0
    scope: str = "all"  # all matrices, those of a kind, or one by its name

    def __call__(self, factors: Factors, seed: int) -> Tensor:
        """Change one matrix of the scope."""
        if self.what in FORMATS:
            return FORMATS[self.what](factors.matrix)
        if self.what == NOISE:
            return noise(factors, self.share, seed)
        return factors.lowered(REMOVALS[self.what](factors.s, self.share))
