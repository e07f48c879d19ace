"""``A'A`` in float32 or float64: products, inverses, and how many eigenvalues lie below a value.

The factorizations behind :mod:`kappascope.krylov`. Matrices here are tall (or square), finite,
non-zero and scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import kernels
from kappascope.lanczos import BLOCK, BLUNT, Space, Unresolved, norm, random_block
from kappascope.panels import Dense, dense, gram, mirror, times, transposed_times

EPS = torch.finfo(torch.float64).eps
GUARD = 8  # vectors polished together: the wanted ones and a few to separate them from the rest
NEARING = 4  # turns of an iteration for the values that are nearest to the threshold


@dataclass(frozen=True)
class Square:
    """``A'A`` and its inverse in some precision, acting on blocks of columns.

    The inverse comes from an LU factorization of a square ``A`` and from a Cholesky factorization
    of the Gram matrix of a tall one.

    >>> square = Square(torch.diag(torch.tensor([2.0, 1.0])).double(), torch.float32)
    >>> square.inverse(torch.ones(2, 1)).flatten(), str(square)
    (tensor([0.2500, 1.0000]), 'LU float32')
    """

    matrix: Dense
    dtype: torch.dtype

    @property
    def eps(self) -> float:
        """Unit of the precision."""
        return torch.finfo(self.dtype).eps

    @property
    def precision(self) -> str:
        """Its name."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def tall(self) -> bool:
        """Whether ``A`` has more rows than columns."""
        return self.matrix.shape[0] > self.matrix.shape[1]

    @cached_property
    def gram(self) -> Float[Tensor, "p p"]:
        """The Gram matrix, its lower triangle."""
        kept = self.matrix if self.tall or self.dtype == self.matrix.dtype else self.rough
        return gram(kept, self.dtype)

    @cached_property
    def rough(self) -> Float[Tensor, "q p"]:
        """``A`` in the precision; the Gram matrix in its place if that is smaller."""
        return mirror(self.gram) if self.tall else dense(self.matrix, self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        """``A'A x``."""
        # the transpose, which is the same, has its rows in one piece: twice as fast
        if self.tall:
            return kernels.times(self.rough.mT, x)
        return kernels.square_times(self.rough, x)

    @cached_property
    def factor(self) -> Tensor:
        """Cholesky's lower factor of the Gram matrix, or both of an LU factorization."""
        if self.tall:
            factor, info = self._cholesky.factor, self._cholesky.indefinite
            # The diagonal spreads no more than kappa does; squared, it must leave digits.
            smallest = 16 * math.sqrt(self.eps)
        else:
            factor, info, smallest = self._lu.factors, self._lu.singular, self.eps / 16
        diagonal = factor.diagonal().abs()
        tiny = int((~(diagonal > smallest * diagonal.max())).sum())
        if info or tiny:
            # of a tall matrix squared already: what is lost here, the Gram matrix in float64 has
            raise Unresolved(f"singular in {self.dtype}", blurred=not self.tall or tiny > GUARD)
        return factor

    @cached_property
    def _cholesky(self) -> kernels.Cholesky:
        return kernels.Cholesky.of(self.gram)

    @cached_property
    def _lu(self) -> kernels.LU:
        """Of the transpose, whose columns are in one piece."""
        return kernels.LU.of(self.rough.mT)

    def lower(self) -> Space:
        """A Krylov space of the inverse, whose largest eigenvalues are the bottom's."""
        # not kept: it knows this square, and what knows itself is freed late
        return Space(self.inverse, self.factor, 32)

    def inverse(self, x: Tensor) -> Tensor:
        """``(A'A)^-1 x``."""
        _ = self.factor  # which may tell that there is none
        if self.tall:
            return self._cholesky.solve(x)
        return self._lu.solve(self._lu.solve(x), transposed=True)

    def inverse_beyond(self, shift: float) -> Callable[[Tensor], Tensor]:
        """``(A'A - shift)^-1`` for a shift that is less than the smallest eigenvalue."""
        found = kernels.Cholesky.of(self.gram, shift)
        if found.indefinite:
            raise Unresolved(f"not definite in {self.dtype}")
        return found.solve

    def rough_inverse(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """As many digits of ``(A'A)^-1 x`` as the precision allows, whatever the size of x."""
        size = torch.linalg.vector_norm(x, dim=0).clamp(min=1e-300)
        return self.inverse((x / size).to(self.dtype)).double() * size

    def __str__(self) -> str:
        return f"{'Cholesky' if self.tall else 'LU'} {self.precision}"


def count_below(square: Square, cut: float) -> int:
    """Number of singular values up to ``cut``: the inertia of ``A'A - cut^2`` (Sylvester).

    The factorization is exact for a matrix within rounding of that one; its inverse tells how
    far the nearest eigenvalue is from zero, so a count that rounding could change is refused.

    >>> count_below(Square(torch.diag(torch.arange(1.0, 33.0)).double(), torch.float64), 5.5)
    5
    """
    shifted = _shifted(square, cut)
    nearest = 1 / norm(shifted.solve, square.matrix, turns=4)
    trace = float(square.gram.diagonal().sum(dtype=torch.float64))
    rounding = math.sqrt(square.matrix.shape[0]) * EPS * trace
    if nearest < max(16 * rounding, BLUNT * cut * cut):
        raise Unresolved("a singular value sits within rounding of the threshold")
    return shifted.negative


def count_roughly(square: Square, cut: float) -> int | None:
    """As :func:`count_below`, from a factorization in float32, if float64 bears it out.

    That one is exact for a matrix some 1e-7 of the norm away. Only eigenvalues near zero can have
    another sign there. They are found through the factorization and measured in float64: what the
    last of them leaves is so much less than itself that none beyond it can have crossed zero, and
    the others have moved by less than half of what they are.

    >>> count_roughly(Square(torch.diag(torch.arange(1.0, 33.0)).double(), torch.float32), 5.5)
    5
    """
    try:
        shifted = _shifted(square, cut)
    except Unresolved:
        return None
    x = random_block(square.gram)
    for _ in range(NEARING):
        x, _ = torch.linalg.qr(shifted.solve(x))
    theta, c = torch.linalg.eigh((x.mT @ shifted.solve(x)).double())
    nearest = theta.abs().argsort(descending=True)[: BLOCK // 4]
    theirs, v = 1 / theta[nearest], torch.linalg.qr(x.double() @ c[:, nearest])[0]
    image = transposed_times(square.matrix, times(square.matrix, v)) - cut * cut * v
    ours = (v * image).sum(0)
    rest = torch.linalg.vector_norm(image - v * ours, dim=0)
    farthest = theirs[-1].abs()
    slack = 2 * ((theirs - ours).abs() + rest**2 / farthest) + BLUNT * cut * cut
    clear = bool((ours.abs() > slack).all() and 4 * rest.max() < farthest)
    return shifted.negative if clear else None


def _shifted(square: Square, cut: float) -> kernels.LDL:
    """``A'A - cut^2`` in factors."""
    factors = kernels.LDL.of(square.gram, cut * cut)
    if factors.singular:
        raise Unresolved("a singular value sits at the threshold")
    return factors
