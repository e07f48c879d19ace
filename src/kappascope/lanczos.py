"""Leading eigenvalues of symmetric operators: block Lanczos, and bounds on what it has found.

For :mod:`kappascope.krylov`, which asks for those of ``A'A``, whose roots are the largest singular
values, and of its inverse, which tell the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from kappascope import kernels
from kappascope.panels import Dense

TOLERANCE = 1e-8  # relative error at which a value is accepted
BLUNT = 10 * TOLERANCE  # what the error of sigma_1 does to a squared threshold, and then some
BLOCK = 16  # vectors per Krylov block: as fast to multiply as 8 of them, fewer steps than 8


class Unresolved(ArithmeticError):  # noqa: N818 - an outcome, not an error
    """A method could not verify its own answer; the next one is tried.

    ``crowded``: the values are too dense for a Krylov space, or too small for an inverse in
    float64, and more precision will not help.
    ``blurred``: so many are so small that the Gram matrix, which blurs them, is no way either.

    >>> Unresolved("the smallest values are crowded", crowded=True).blurred
    False
    """

    def __init__(self, reason: str, *, crowded: bool = False, blurred: bool = False) -> None:
        super().__init__(reason)
        self.crowded, self.blurred = crowded, blurred


@dataclass(frozen=True)
class Ritz:
    """Leading approximate eigenvalues of a symmetric operator, their residuals and vectors.

    >>> found = Ritz([2.0, 1.0], [1e-3, 1e-3])
    >>> found.uncertainty(1) < 1e-6, found.count(1.5)
    (True, 1)
    """

    values: list[float]
    residuals: list[float]
    basis: Tensor | None = None
    coefficients: Tensor | None = None

    def uncertainty(self, wanted: int) -> float:
        """Relative error bound of the first ``wanted`` values.

        A value is within its residual of an eigenvalue, or much nearer in a group that a gap
        separates from the rest. What lies below a value that has not converged is no gap: more of
        the group may still come up there.
        """
        values, residuals = np.array(self.values), np.array(self.residuals)
        size = abs(float(values[wanted - 1]))
        if not size > 0:
            return math.inf
        alone = math.sqrt((residuals[:wanted] ** 2).sum())
        groups = range(wanted, len(values))
        return min([alone, *(self._in_group(group, wanted) for group in groups)]) / size

    def _in_group(self, group: int, wanted: int) -> float:
        """Error bound of the first ``wanted`` values in a ``group``, if all others lie below it.

        As seen from the group (Schur's complement at a wanted value), the rest adds a form of at
        most ``(sum of |x_k| r_k)^2`` over the distance between them, and so no more than a diagonal
        matrix, whatever weights the members have (Cauchy and Schwarz). One value in a group of one
        is within ``r^2`` over the gap (Kato and Temple).
        """
        values, squares = np.array(self.values[:group]), np.array(self.residuals[:group]) ** 2
        rest = self.values[group] + self.residuals[group]
        gap = values[-1] - rest
        distance = values[wanted - 1] - rest - squares.sum() / gap if gap > 0 else 0.0
        if distance <= 0:
            return math.inf
        weights = np.where(np.arange(group) < wanted, 1, 1 / (8 * group))
        most = np.sort(values + squares * weights.sum() / weights / distance)[::-1]
        return float((most - values)[:wanted].max())

    def count(self, cut: float) -> int | None:
        """How many values exceed ``cut``, if the residuals place each one clearly.

        Alone in a gap, a value is known to the square of its residual over the gap.
        """
        values, residuals = np.array(self.values), np.array(self.residuals)
        k = int((values > cut).sum())
        steps = values[:-1] - values[1:] - residuals[:-1] - residuals[1:]
        gaps = np.minimum(np.r_[math.inf, steps], np.r_[steps, 0.0])  # below the last, who knows
        alone = gaps > 2 * residuals
        errors = np.where(alone, residuals**2 / np.where(alone, gaps, 1.0), residuals)
        clear = np.abs(values - cut) > 2 * errors + BLUNT * abs(cut)
        return k if k < len(values) and clear[: k + 1].all() else None

    @property
    def steps(self) -> int:
        """How many blocks the Krylov space has."""
        assert self.basis is not None
        return self.basis.shape[1] // BLOCK

    def vectors(self, count: int) -> Tensor:
        """The first ``count`` approximate eigenvectors."""
        assert self.basis is not None and self.coefficients is not None
        return self.basis @ self.coefficients[:, :count].to(self.basis)


class Space:
    """A Krylov space of a symmetric operator: block Lanczos, fully reorthogonalised.

    The operator acts on blocks of columns as long as ``like`` has columns, in its precision. The
    projection is formed explicitly, so the basis may be continued by any block orthogonal to it
    when the space becomes invariant. It begins with random columns, or with the span of ``start``.

    >>> a = torch.diag(torch.arange(64.0).double())
    >>> space = Space(lambda x: a @ x, a, most=4)
    >>> space.grow(4)
    >>> round(space.ritz(1).values[0], 6)
    63.0
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        like: Tensor,
        most: int,
        start: Tensor | None = None,
    ) -> None:
        self.apply, self.like, self.start = apply, like, start
        self.steps, self.most = 0, min(most, like.shape[1] // BLOCK)
        width = self.most * BLOCK
        self._basis = torch.empty(width, like.shape[1], dtype=like.dtype, device=like.device).mT
        self._projection = np.zeros((width, width))
        self._rest = torch.empty(0)

    def until(self, progress: Callable[[Ritz], float], keep: int) -> Ritz:
        """Leading eigenpairs once ``progress`` says that all digits, a share of one, are there."""
        due = max(2, self.steps)
        while True:
            self.grow(due)
            ritz = self.ritz(keep)
            done = progress(ritz)
            if done >= 1:
                return ritz
            if self.steps == self.most:
                rounding = 64 * torch.finfo(self.like.dtype).eps * ritz.values[0]
                slow = ritz.residuals[0] > rounding  # more precision will not hasten it
                raise Unresolved("Krylov space exhausted", crowded=slow)
            # A look at a large space is dear: wait until the rest of the digits may be there, which
            # come three times faster than the first ones.
            due += math.ceil(due * min(1.0, (1 / max(done, 0.1) - 1) / 3))

    def grow(self, steps: int) -> None:
        """Have so many blocks, or as many as there can be."""
        while self.steps < min(steps, self.most):
            self._step()

    def _step(self) -> None:
        old, new = self.steps * BLOCK, (self.steps + 1) * BLOCK
        self._basis[:, old:new] = block = self._next()
        known = self._basis[:, :new]
        rest = self.apply(block)
        column = kernels.times(known.mT, rest)
        rest = rest - kernels.times(known, column)
        again = kernels.times(known.mT, rest)
        self._rest = rest - kernels.times(known, again)
        projection = self._projection
        projection[:new, old:new] = (column + again).numpy(force=True)
        projection[old:new, :new] = projection[:new, old:new].T
        if not np.isfinite(projection[:new, old:new]).all():
            raise Unresolved("overflow")
        self.steps += 1

    def _next(self) -> Tensor:
        if not self.steps:
            if self.start is None:
                return random_block(self.like)
            return torch.linalg.qr(self.start.to(self.like))[0]
        known = self._basis[:, : self.steps * BLOCK]
        block = torch.linalg.qr(self._rest)[0]
        return torch.linalg.qr(block - kernels.times(known, kernels.times(known.mT, block)))[0]

    def ritz(self, keep: int) -> Ritz:
        """What is known of the leading eigenpairs."""
        n = self.steps * BLOCK
        projection, keep = self._projection[:n, :n], min(n, keep)
        theta, c = scipy.linalg.eigh(
            (projection + projection.T) / 2, subset_by_index=[n - keep, n - 1], check_finite=False
        )
        vectors = torch.from_numpy(c[:, ::-1].copy())
        residuals = torch.linalg.vector_norm(self._rest @ vectors[-BLOCK:].to(self._rest), dim=0)
        return Ritz(theta[::-1].tolist(), residuals.tolist(), self._basis[:, :n], vectors)


def share(uncertainty: float, tolerance: float) -> float:
    """Which share of the digits that ``tolerance`` asks for are there: all of them from one on.

    >>> round(share(1e-4, tolerance=1e-8), 6)
    0.5
    """
    return math.log(max(uncertainty, 1e-300)) / math.log(tolerance)


def norm(apply: Callable[[Tensor], Tensor], a: Dense, turns: int = 6) -> float:
    """Norm of a symmetric operator, to a few per cent, by block power iteration.

    >>> a = torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0]))
    >>> round(norm(lambda x: a @ x, a), 4)
    4.0
    """
    x = random_block(a)[:, :4]
    for _ in range(turns):
        x, r = torch.linalg.qr(apply(x))
    return float(torch.linalg.matrix_norm(r, 2))


def random_block(like: Dense, width: int = BLOCK) -> Tensor:
    """Orthonormal random columns from a generator of our own: the caller's is not touched.

    >>> random_block(torch.empty(0, 40)).shape
    torch.Size([40, 16])
    """
    generator = torch.Generator().manual_seed(0)
    size = like.shape[1], width
    block = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(block.to(like.device, like.dtype))[0]
