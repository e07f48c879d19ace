"""``A'A`` by row blocks: products, inverses, and how many eigenvalues lie below a value.

A matrix is here, or it comes in :class:`Panels`, blocks of rows that stand for a float64 copy
which would be too large beside the stored matrix. :class:`Gram` is ``A'A`` in float32 or float64
with its inverse, the operator of :mod:`kappascope.matrix._krylov`; there matrices are tall (or
square), finite, non-zero and scaled. :mod:`kappascope.matrix.tracking` uses the same Gram matrix
and the same factorizations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kappascope.matrix import _blas

EPS = torch.finfo(torch.float64).eps
TOLERANCE = 1e-8  # relative error at which a singular value is accepted
ACCEPTED_ERROR = 10 * TOLERANCE  # what that does to a squared threshold, and a margin
BLOCK_SIZE = 16  # vectors of a Krylov block: as fast to multiply as 8 of them, fewer steps than 8
POLISHED_VECTORS = 8  # the wanted ones, and a few more that separate them from the rest

L2_CACHE_ENTRIES = 2**16  # of a panel that is used several times: half a megabyte of float64
PANEL_ROWS = 256  # of a panel for a product with a few vectors
SYRK_ROWS = 2048  # of a panel for a product with itself: enough for BLAS to reach its speed
SYRK_BUFFER_ROWS = 1024  # of such a panel that is copied to be multiplied
QR_ROWS = 512  # of a panel that is reflected into a triangle, and copied for that
FLUSHED_BELOW = 1e-30  # of the largest entry: what is smaller may be subnormal in float32, and slow
NULL_SPACE_ITERATIONS = 2  # each takes all the digits that there are
INVERSE_ITERATIONS = 4  # towards the eigenvalues nearest to the threshold

Factors = TypeVar("Factors", _blas.Cholesky, _blas.LDL)


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


# --- a matrix by row blocks -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix kept as stored; its rows come scaled by ``2**-exponent`` and in float64.

    >>> a = Panels(torch.tensor([[8.0], [4.0]], dtype=torch.float16), exponent=3)
    >>> times(a, torch.ones(1, 1, dtype=torch.float64))
    tensor([[1.0000],
            [0.5000]], dtype=torch.float64)
    """

    stored: Shaped[Tensor, "q p"]
    exponent: int
    dtype = torch.float64

    @property
    def shape(self) -> torch.Size:
        """The shape of the stored matrix."""
        return self.stored.shape

    @property
    def device(self) -> torch.device:
        """The device of the stored matrix."""
        return self.stored.device

    @property
    def mT(self) -> Panels:  # noqa: N802 - as torch calls it
        """The transpose, without a copy."""
        return Panels(self.stored.mT, self.exponent)

    def split(self, rows: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
        """Yield the panels from the top, each of at most so many rows, all in one buffer.

        A buffer for each would take as long as all that is done with it.
        """
        first = self.stored[:rows]
        column_major = self.stored.stride(0) == 1 != self.stored.stride(1)
        shape = first.mT.shape if column_major else first.shape
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        # in two steps where one power of two would be too large for a float64
        steps = (-self.exponent,) if self.exponent > -1000 else (1000, -self.exponent - 1000)
        scales = [2.0**step for step in steps]
        narrow = self.stored.dtype.itemsize > dtype.itemsize  # and may not hold what is unscaled
        for panel in self.stored.split(rows):
            entries = (buffer.mT if column_major else buffer)[: len(panel)]
            scaled = panel.clone() if narrow else entries.copy_(panel)
            for scale in scales:
                scaled.mul_(scale)
            yield entries.copy_(scaled) if narrow else entries


Matrix: TypeAlias = Float[Tensor, "q p"] | Panels
"""A matrix that is in memory as it is needed, or comes in panels."""


def as_dense(a: Matrix, dtype: torch.dtype) -> Float[Tensor, "q p"]:
    """Return the whole matrix in a precision, without entries that may be subnormal in float32.

    >>> as_dense(torch.tensor([[1.0, 1e-40]], dtype=torch.float64), torch.float32)
    tensor([[1., 0.]])
    """
    if isinstance(a, Tensor) and a.dtype == dtype:
        return a
    copy = _blas.empty_like(a.stored if isinstance(a, Panels) else a, dtype)
    for target, panel in zip(copy.split(PANEL_ROWS), a.split(PANEL_ROWS), strict=True):
        target.copy_(torch.hardshrink(panel.to(dtype), FLUSHED_BELOW))
    return copy


def gram(a: Matrix, dtype: torch.dtype | None = None) -> Float[Tensor, "p p"]:
    """Return the lower triangle of ``A'A``, zeros above it: half the work of the full product.

    >>> gram(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 0.],
            [2., 4.]])
    """
    dtype, total = dtype or a.dtype, None
    for panel in a.split(SYRK_BUFFER_ROWS, dtype) if isinstance(a, Panels) else a.split(SYRK_ROWS):
        entries = panel.to(dtype)
        if dtype == torch.float32 and not (isinstance(a, Tensor) and a.dtype == dtype):
            # as as_dense() does
            torch.hardshrink(entries, FLUSHED_BELOW, out=entries)
        total = _blas.add_gram(total, entries)
    assert total is not None
    return total


def mirror(lower: Float[Tensor, "p p"], tile: int = 256) -> Float[Tensor, "p p"]:
    """Return the symmetric matrix with this lower triangle, in its place.

    Tile by tile: a quarter of a megabyte is read along and written across within the cache.

    >>> mirror(torch.tensor([[1.0, 0.0], [2.0, 4.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    for i in range(0, len(lower), tile):
        rows = lower[i : i + tile]
        corner = rows[:, i : i + tile]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        for j in range(0, i, tile):
            lower[j : j + tile, i : i + tile] = rows[:, j : j + tile].mT
    return lower


def transpose(square: Float[Tensor, "p p"], tile: int = 256) -> Float[Tensor, "p p"]:
    """Return the transpose of a square matrix, in its place and order.

    >>> transpose(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 3.],
            [2., 4.]])
    """
    for i in range(0, len(square), tile):
        for j in range(0, i + 1, tile):
            rows, columns = slice(i, i + tile), slice(j, j + tile)
            below, above = (rows, columns), (columns, rows)
            kept = square[below].clone()
            square[below] = square[above].mT.clone()
            square[above] = kept.mT
    return square


def times(a: Matrix, x: Float[Tensor, "p k"]) -> Float[Tensor, "q k"]:
    """Return the product ``A x`` with a few vectors.

    >>> times(torch.tensor([[1.0, 2.0]]), torch.ones(2, 1))
    tensor([[3.]])
    """
    if isinstance(a, Panels):
        return torch.cat([_blas.multiply(panel, x) for panel in a.split(PANEL_ROWS)])
    return _blas.multiply(a, x)


def transposed_times(a: Matrix, y: Float[Tensor, "q k"]) -> Float[Tensor, "p k"]:
    """Return the product ``A'y`` with a few vectors.

    >>> transposed_times(torch.tensor([[1.0, 2.0]]), torch.ones(1, 1))
    tensor([[1.],
            [2.]])
    """
    if not isinstance(a, Panels):
        return _blas.multiply(a.mT, y)
    result = y.new_zeros(a.shape[1], y.shape[1])
    for part, panel in zip(y.split(PANEL_ROWS), a.split(PANEL_ROWS), strict=True):
        result += _blas.multiply(panel.mT, part)
    return result


def triangle(a: Matrix) -> Float[Tensor, "r p"]:
    """Return the ``R`` of a QR factorization of a tall matrix, which has its singular values.

    >>> triangle(torch.tensor([[3.0], [4.0]])).abs()
    tensor([[5.]])
    """
    if isinstance(a, Panels):
        return _blas.triangle_of_rows(a.split(QR_ROWS), a.shape[1]).to(a.device)
    r = torch.empty(0, a.shape[1], dtype=a.dtype, device=a.device)
    for panel in a.split(max(SYRK_ROWS, a.shape[1])):
        r = torch.linalg.qr(torch.cat([r, panel]), mode="r")[1]
    return r


def random_block(like: Matrix, width: int = BLOCK_SIZE) -> Tensor:
    """Return orthonormal random columns from a generator of our own: the caller's is not touched.

    >>> random_block(torch.empty(0, 40)).shape
    torch.Size([40, 16])
    """
    generator = torch.Generator().manual_seed(0)
    size = like.shape[1], width
    block = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(block.to(like.device, like.dtype))[0]


# --- the square of a matrix, and its inverse ------------------------------------------------------


@dataclass(frozen=True)
class Gram:
    """``A'A`` and its inverse in some precision, acting on blocks of columns.

    The inverse comes from an LU factorization of a square ``A`` and from a Cholesky factorization
    of the Gram matrix of a tall one. Of a matrix in panels, which is one that hardly fits into
    memory, nothing in float64 is held twice: factors take the place of what is factorized, and
    products read the panels again.

    >>> square = Gram(torch.diag(torch.tensor([2.0, 1.0])).double(), torch.float32)
    >>> square.inverse(torch.ones(2, 1)).flatten(), str(square)
    (tensor([0.2500, 1.0000]), 'LU float32')
    """

    matrix: Matrix
    dtype: torch.dtype
    by_triangle: bool = False  # the R of a tall matrix in panels is factorized, not what is squared

    @property
    def eps(self) -> float:
        """The unit roundoff of the precision."""
        return torch.finfo(self.dtype).eps

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def tall(self) -> bool:
        """Whether ``A`` has more rows than columns, and its Gram matrix is factorized."""
        return self.matrix.shape[0] > self.matrix.shape[1] and not self.by_triangle

    @property
    def in_panels(self) -> bool:
        """Whether the matrix is so large that it comes in panels."""
        return isinstance(self.matrix, Panels)

    @property
    def like(self) -> Float[Tensor, "0 p"]:
        """A tensor without rows that tells columns, precision and device."""
        return torch.empty(0, self.matrix.shape[1], dtype=self.dtype, device=self.matrix.device)

    def release(self) -> None:
        """Free all that was computed of a matrix in panels; what is asked for again is redone."""
        if self.in_panels:
            for name in ("lower", "operand", "factor", "_cholesky", "_lu"):
                vars(self).pop(name, None)

    @cached_property
    def lower(self) -> Float[Tensor, "p p"]:
        """The lower triangle of the Gram matrix."""
        direct = self.tall or self.in_panels or self.dtype == self.matrix.dtype
        return gram(self.matrix if direct else self.operand, self.dtype)

    @property
    def trace(self) -> float:
        """The sum of the squares of all singular values."""
        return float(self.lower.diagonal().sum(dtype=torch.float64))

    def factorized(self, kind: type[Factors], shift: float = 0.0) -> Factors:
        """Return factors of the Gram matrix less a shift; from panels, in its place."""
        if not self.tall:
            self.release()  # the matrix and its factors: room for the Gram matrix
        lower = self.lower
        self.release()
        return kind.of(lower, shift, overwrite=self.in_panels)

    @cached_property
    def operand(self) -> Float[Tensor, "q p"]:
        """``A`` in the precision, or the Gram matrix if that is smaller: what is multiplied by."""
        return mirror(self.lower) if self.tall else as_dense(self.matrix, self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        """Return the product ``A'A x`` in the precision."""
        if self.in_panels and self.dtype == torch.float64:
            total = torch.zeros_like(x)
            for panel in self.matrix.split(PANEL_ROWS):
                total += _blas.multiply_gram(panel, x)
            return total
        # a Gram matrix is its own transpose, which is row-major: twice as fast
        if self.tall:
            return _blas.multiply(self.operand.mT, x)
        return _blas.multiply_gram(self.operand, x)

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
            # a tall matrix was squared already: what is lost here, its Gram matrix in float64 has
            blurred = not self.tall or tiny > POLISHED_VECTORS
            raise Unresolved(f"singular in {self.dtype}", blurred=blurred)
        return factor

    @cached_property
    def _cholesky(self) -> _blas.Cholesky:
        if self.in_panels and self.dtype == torch.float64:
            return self.factorized(_blas.Cholesky)
        return _blas.Cholesky.of(self.lower)

    @cached_property
    def _lu(self) -> _blas.LU:
        """The factors of the transpose, which is column-major."""
        if self.in_panels and self.dtype == torch.float64:
            if self.by_triangle:
                return _blas.LU.of(transpose(triangle(self.matrix)), overwrite=True)
            return _blas.LU.of(as_dense(self.matrix, self.dtype).mT, overwrite=True)
        return _blas.LU.of(self.operand.mT)

    def inverse(self, x: Tensor) -> Tensor:
        """Return the product ``(A'A)^-1 x`` in the precision."""
        _ = self.factor  # raises where there is no inverse
        if self.tall:
            return self._cholesky.solve(x)
        return self._lu.solve(self._lu.solve(x), transposed=True)

    def shifted_inverse(self, shift: float) -> Callable[[Tensor], Tensor]:
        """``(A'A - shift)^-1`` for a shift that is less than the smallest eigenvalue."""
        shifted = self.factorized(_blas.Cholesky, shift)
        if shifted.indefinite:
            raise Unresolved(f"not definite in {self.dtype}")
        return shifted.solve

    def near_null(self, x: Tensor) -> Tensor:
        """Return vectors near the null space of a square matrix that float64 cannot invert."""
        lu = self._lu.regularised()
        for _ in range(NULL_SPACE_ITERATIONS):
            x = lu.solve(torch.linalg.qr(lu.solve(x))[0], transposed=True)
            x = torch.linalg.qr(x)[0]
        return x

    def scaled_inverse(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """Return the product ``(A'A)^-1 x`` in float64, to as many digits as the precision allows.

        Each column is scaled first, so that none is too small or too large for float32.
        """
        size = torch.linalg.vector_norm(x, dim=0).clamp(min=1e-300)
        return self.inverse((x / size).to(self.dtype)).double() * size

    def __str__(self) -> str:
        return f"{'Cholesky' if self.tall else 'LU'} {self.precision}"


def norm(apply: Callable[[Tensor], Tensor], a: Matrix, turns: int = 6) -> float:
    """Return the norm of a symmetric operator, to a few per cent, by block power iteration.

    >>> a = torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0]))
    >>> round(norm(lambda x: a @ x, a), 4)
    4.0
    """
    x = random_block(a)[:, :4]
    for _ in range(turns):
        x, r = torch.linalg.qr(apply(x))
    return float(torch.linalg.matrix_norm(r, 2))


# --- inertia --------------------------------------------------------------------------------------


def count_below(square: Gram, cut: float) -> int:
    """Count the singular values up to ``cut`` by the inertia of ``A'A - cut^2`` (Sylvester).

    The factorization is exact for a matrix within rounding of that one; its inverse tells how
    far the nearest eigenvalue is from zero, so a count that rounding could change is refused.

    >>> count_below(Gram(torch.diag(torch.arange(1.0, 33.0)).double(), torch.float64), 5.5)
    5
    """
    rounding = math.sqrt(square.matrix.shape[0]) * EPS * square.trace
    shifted = _shifted(square, cut)
    nearest = 1 / norm(shifted.solve, square.matrix, turns=4)
    if nearest < max(16 * rounding, ACCEPTED_ERROR * cut * cut):
        raise Unresolved("a singular value sits within rounding of the threshold")
    return shifted.negative


def count_below_in_float32(square: Gram, cut: float) -> int | None:
    """Return the same count from a factorization in float32, if float64 confirms it.

    That factorization is exact for a matrix some 1e-7 of the norm away. Only eigenvalues near zero
    can have another sign there. They are found through the factorization and measured in float64:
    the residual of the last of them is so much less than itself that none beyond it can have
    crossed zero, and the others have moved by less than half of what they are.

    >>> square = Gram(torch.diag(torch.arange(1.0, 33.0)).double(), torch.float32)
    >>> count_below_in_float32(square, 5.5)
    5
    """
    try:
        shifted = _shifted(square, cut)
    except Unresolved:
        return None
    x = random_block(square.like)
    for _ in range(INVERSE_ITERATIONS):
        x, _ = torch.linalg.qr(shifted.solve(x))
    theta, c = torch.linalg.eigh((x.mT @ shifted.solve(x)).double())
    nearest = theta.abs().argsort(descending=True)[: BLOCK_SIZE // 4]
    theirs, v = 1 / theta[nearest], torch.linalg.qr(x.double() @ c[:, nearest])[0]
    image = transposed_times(square.matrix, times(square.matrix, v)) - cut * cut * v
    ours = (v * image).sum(0)
    rest = torch.linalg.vector_norm(image - v * ours, dim=0)
    farthest = theirs[-1].abs()
    slack = 2 * ((theirs - ours).abs() + rest**2 / farthest) + ACCEPTED_ERROR * cut * cut
    clear = bool((ours.abs() > slack).all() and 4 * rest.max() < farthest)
    return shifted.negative if clear else None


def _shifted(square: Gram, cut: float) -> _blas.LDL:
    """Return the factors of ``A'A - cut^2``."""
    factors = square.factorized(_blas.LDL, cut * cut)
    if factors.singular:
        raise Unresolved("a singular value sits at the threshold")
    return factors
