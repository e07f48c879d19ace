"""The calls that take the time: products, factorizations and singular values of one dense matrix.

On the CPU they are numpy's and scipy's (OpenBLAS), on every other device torch's. Products with a
few vectors go a strip of rows at a time: OpenBLAS packs the factors of a large product into
buffers of its own first, which for a few vectors takes longer than to multiply them. Triangular
factors that solve again and again for a block of vectors go by blocks of rows for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

UNPACKED_MULTIPLICATIONS = 10**6  # of a product up to which OpenBLAS packs nothing
MIN_STRIP_ROWS = 12  # with fewer, a strip's call costs more than packing would
PACKED_STRIP_ROWS = 256  # of a strip that OpenBLAS packs
REFLECTORS = 64  # that a QR factorization of a panel applies together
TRIDIAGONAL_COLUMNS = 16  # reduced together to tridiagonal form: 6 % faster than LAPACK's own 32
BLOCKED_VECTORS = range(8, 17)  # to solve for by blocks of rows; a Krylov block has sixteen

# as silent as torch: whoever asks looks at the result
_without_warnings = np.errstate(all="ignore")


def _on_cpu(a: Tensor) -> bool:
    """Tell whether numpy and scipy do the work, and not torch."""
    return a.device.type == "cpu"


def _strips(matrix: NDArray[Any], vectors: NDArray[Any]) -> Iterator[slice]:
    """Return the rows of a matrix in strips that OpenBLAS, if it can, does not pack."""
    height = UNPACKED_MULTIPLICATIONS // max(matrix.shape[1] * vectors.shape[1], 1)
    height = height if height >= MIN_STRIP_ROWS else PACKED_STRIP_ROWS
    return (slice(i, i + height) for i in range(0, len(matrix), height))


def _lapack(name: str, dtype: object) -> Callable[..., Any]:
    """Return the routine of scipy's LAPACK with this name, for float32 or float64."""
    return getattr(scipy.linalg.lapack, ("s" if str(dtype).endswith("float32") else "d") + name)


def empty_like(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of this shape, column-major where ``like`` is.

    On the CPU numpy allocates it, in large pages where it is large. Page faults of small ones take
    longer than filling them: a copy of 2048 columns takes three times as long.

    >>> empty_like(torch.empty(3, 2).mT, torch.float32).stride()
    (1, 2)
    """
    if like.ndim >= 2 and like.stride(-2) == 1 != like.stride(-1):
        return empty_like(like.mT, dtype).mT
    if not _on_cpu(like):
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    return torch.from_numpy(np.empty(like.shape, str(dtype).removeprefix("torch.")))


@_without_warnings
def multiply(a: Float[Tensor, "q p"], x: Float[Tensor, "p k"]) -> Float[Tensor, "q k"]:
    """Return the product ``A x`` of a large matrix and a few vectors.

    >>> multiply(torch.eye(2), torch.ones(2, 1))
    tensor([[1.],
            [1.]])
    """
    if not _on_cpu(a):
        return a @ x
    matrix, vectors = a.numpy(), x.contiguous().numpy()
    if a.stride(1) == 1:
        strips = _strips(matrix, vectors)
        return torch.from_numpy(np.concatenate([matrix[strip] @ vectors for strip in strips]))
    result = np.zeros((len(matrix), vectors.shape[1]), vectors.dtype)
    for strip in _strips(matrix.T, vectors):
        result += matrix[:, strip] @ vectors[strip]
    return torch.from_numpy(result)


@_without_warnings
def multiply_gram(a: Float[Tensor, "q p"], x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
    """Return the product ``A'A x``, each strip of ``A`` used twice while it is in cache.

    >>> multiply_gram(2 * torch.eye(2), torch.ones(2, 1))
    tensor([[4.],
            [4.]])
    """
    if not _on_cpu(a):
        return a.mT @ (a @ x)
    if a.stride(1) != 1:
        return multiply(a.mT, multiply(a, x))
    matrix, vectors = a.numpy(), x.contiguous().numpy()
    total = np.zeros_like(vectors)
    for rows in _strips(matrix, vectors):
        total += matrix[rows].T @ (matrix[rows] @ vectors)
    return torch.from_numpy(total)


def add_gram(total: Float[Tensor, "p p"] | None, a: Float[Tensor, "q p"]) -> Float[Tensor, "p p"]:
    """Add the lower triangle of ``A'A`` to a ``total``, in its place, or begin one with it.

    >>> add_gram(None, torch.tensor([[1.0, 2.0]]))
    tensor([[1., 0.],
            [2., 4.]])
    """
    if not _on_cpu(a):
        product = (a.mT @ a).tril()
        return product if total is None else total.add_(product)
    # syrk computes one triangle: half the work of the full product
    syrk = scipy.linalg.blas.ssyrk if a.dtype == torch.float32 else scipy.linalg.blas.dsyrk
    x = a.numpy(force=True)
    # BLAS is column-major: a row-major matrix is read as its transpose, without a copy
    row_major = x.flags.c_contiguous
    more = {} if total is None else {"beta": 1, "c": total.numpy(), "overwrite_c": 1}
    result = syrk(1, x.T if row_major else x, trans=0 if row_major else 1, lower=1, **more)
    return torch.from_numpy(result)


@dataclass(frozen=True, eq=False)
class LU:
    """``A = P L U``: both factors in one matrix, pivots counted from one, whether one is zero.

    >>> LU.of(torch.diag(torch.tensor([2.0, 4.0]))).solve(torch.ones(2, 1))
    tensor([[0.5000],
            [0.2500]])
    """

    factors: Float[Tensor, "p p"]
    pivots: Tensor
    singular: bool

    @classmethod
    def of(cls, a: Float[Tensor, "p p"], overwrite: bool = False) -> LU:
        """Factorize a matrix, in its place if it is column-major and may be overwritten."""
        if not _on_cpu(a):
            factors, pivots, info = torch.linalg.lu_factor_ex(a)
            return cls(factors, pivots, bool(info))
        lu, swaps, info = _lapack("getrf", a.dtype)(a.numpy(), overwrite_a=overwrite)
        return cls(torch.from_numpy(lu), torch.from_numpy(swaps + 1), info != 0)

    def regularised(self) -> LU:
        """Raise pivots that are lost in rounding to its size, in place."""
        diagonal = self.factors.diagonal()
        least = torch.finfo(diagonal.dtype).eps * diagonal.abs().max()
        diagonal[~(diagonal.abs() > least)] = least
        return LU(self.factors, self.pivots, singular=False)

    @_without_warnings
    def solve(self, x: Float[Tensor, "p k"], transposed: bool = False) -> Float[Tensor, "p k"]:
        """Return the solution y of ``A y = x``, or of ``A'y = x``."""
        if not _on_cpu(x):
            return torch.linalg.lu_solve(self.factors, self.pivots, x, adjoint=transposed)
        if not _in_blocks(x):
            getrs = _lapack("getrs", x.dtype)
            y, _ = getrs(self.factors.numpy(), self.pivots.numpy() - 1, x.numpy(), trans=transposed)
            return torch.from_numpy(y)
        if not transposed:
            y = x.numpy()[self._order]
            self._lower.solve(y)
            self._upper.solve(y)
            return torch.from_numpy(y)
        y, result = x.numpy().copy(), np.empty(x.shape, x.numpy().dtype)
        self._upper.solve_transposed(y)
        self._lower.solve_transposed(y)
        result[self._order] = y
        return torch.from_numpy(result)

    @cached_property
    def _lower(self) -> _Triangle:
        return _Triangle(self.factors.numpy(), lower=True, unit_diagonal=True)

    @cached_property
    def _upper(self) -> _Triangle:
        return _Triangle(self.factors.numpy(), lower=False)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """The rows of ``A`` in the order to which the pivots' swaps bring them."""
        order = np.arange(len(self.factors))
        for i, j in enumerate(self.pivots.numpy() - 1):
            order[i], order[j] = order[j], order[i]
        return order


@dataclass(frozen=True, eq=False)
class Cholesky:
    """``A = L L'``: the factor L, with any numbers above its diagonal, and whether there is none.

    >>> Cholesky.of(torch.tensor([[5.0]]), shift=1.0).solve(torch.ones(1, 1))
    tensor([[0.2500]])
    """

    factor: Float[Tensor, "p p"]
    indefinite: bool

    @classmethod
    def of(
        cls, lower: Float[Tensor, "p p"], shift: float = 0.0, overwrite: bool = False
    ) -> Cholesky:
        """Factorize ``A - shift``, given the lower triangle of ``A``."""
        if not _on_cpu(lower):
            shifted = lower.clone()
            shifted.diagonal().sub_(shift)
            factor, info = torch.linalg.cholesky_ex(shifted)
            return cls(factor, bool(info))
        potrf = _lapack("potrf", lower.dtype)
        symmetric = _shifted(lower, shift, overwrite)
        factor, info = potrf(symmetric, lower=1, clean=0, overwrite_a=1)
        return cls(torch.from_numpy(factor), info != 0)

    @_without_warnings
    def solve(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """Return the solution y of ``A y = x``."""
        if not _on_cpu(x):
            # torch.cholesky_solve copies the factor, which takes four times as long as this
            half = torch.linalg.solve_triangular(self.factor, x, upper=False)
            return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)
        if not _in_blocks(x):
            y, _ = _lapack("potrs", x.dtype)(self.factor.numpy(), x.numpy(), lower=1)
            return torch.from_numpy(y)
        y = np.array(x.numpy(), order="C")
        self._lower.solve(y)
        self._lower.solve_transposed(y)
        return torch.from_numpy(y)

    @cached_property
    def _lower(self) -> _Triangle:
        return _Triangle(self.factor.numpy(), lower=True)


def _block_rows(size: int) -> int:
    """Return the rows of a block whose products with a block of vectors OpenBLAS does not pack."""
    return UNPACKED_MULTIPLICATIONS // (size * BLOCKED_VECTORS[-1])


def _in_blocks(x: Float[Tensor, "p k"]) -> bool:
    """Tell whether to solve for these vectors by blocks of rows."""
    return x.shape[1] in BLOCKED_VECTORS and _block_rows(len(x)) >= MIN_STRIP_ROWS


class _Triangle:
    """One triangle of a column-major matrix, to solve with by blocks of rows.

    Blocks are in the order of substitution, each with the rows after it and its own inverse.
    """

    def __init__(self, matrix: NDArray[Any], lower: bool, unit_diagonal: bool = False) -> None:
        size, height = len(matrix), _block_rows(len(matrix))
        trtri = _lapack("trtri", matrix.dtype)
        self.rows = matrix.T
        self.blocks = []
        for i in range(0, size, height):
            block = slice(i, min(i + height, size))
            after = slice(block.stop, size) if lower else slice(0, i)
            inverse = trtri(matrix[block, block], lower=lower, unitdiag=unit_diagonal)[0]
            inverse = np.tril(inverse) if lower else np.triu(inverse)
            if unit_diagonal:
                np.fill_diagonal(inverse, 1)
            self.blocks.append((block, after, inverse))
        if not lower:
            self.blocks.reverse()

    def solve(self, y: NDArray[Any]) -> None:
        """Replace y by ``T^-1 y``."""
        for block, after, inverse in self.blocks:
            y[block] = inverse @ y[block]
            y[after] -= self.rows[block, after].T @ y[block]

    def solve_transposed(self, y: NDArray[Any]) -> None:
        """Replace y by ``T'^-1 y``."""
        for block, after, inverse in reversed(self.blocks):
            y[block] = inverse.T @ (y[block] - self.rows[block, after] @ y[after])


@dataclass(frozen=True, eq=False)
class LDL:
    """Bunch and Kaufman's factors ``L D L'`` of a symmetric matrix, with LAPACK's pivots.

    They are scipy's on every device: torch counts no eigenvalues.

    >>> shifted = LDL.of(torch.diag(torch.tensor([3.0, 5.0])), shift=4.0)
    >>> shifted.negative, shifted.solve(torch.ones(2, 1)).flatten()
    (1, tensor([-1.,  1.]))
    """

    factors: NDArray[Any]
    pivots: NDArray[np.int32]
    singular: bool

    @classmethod
    def of(cls, lower: Float[Tensor, "p p"], shift: float = 0.0, overwrite: bool = False) -> LDL:
        """Factorize ``A - shift``, given the lower triangle of ``A``."""
        work = int(_lapack("sytrf_lwork", lower.dtype)(len(lower), lower=1)[0])
        factors, pivots, info = _lapack("sytrf", lower.dtype)(
            _shifted(lower, shift, overwrite), lower=1, lwork=work, overwrite_a=1
        )
        return cls(factors, pivots, info != 0)

    def solve(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """Return the solution y of ``A y = x``."""
        sytrs = _lapack("sytrs", x.dtype)
        y, _ = sytrs(self.factors, self.pivots, x.numpy(force=True), lower=1)
        return torch.as_tensor(y, device=x.device)

    @property
    def negative(self) -> int:
        """The number of negative eigenvalues: a block of two pivots has one of either sign."""
        single = self.pivots > 0
        return int(((self.factors.diagonal() < 0) & single).sum()) + int((~single).sum()) // 2


def _shifted(lower: Float[Tensor, "p p"], shift: float, overwrite: bool) -> NDArray[Any]:
    """Return a symmetric matrix less a shift, in the lower triangle of a column-major one.

    It is a copy, unless the matrix given is column-major and may be overwritten.
    """
    array = lower.numpy(force=True)
    shifted = np.asfortranarray(array) if overwrite else np.array(array, order="F")
    np.einsum("ii->i", shifted)[:] -= shift
    return shifted


def svdvals(a: Float[Tensor, "q p"], overwrite: bool = False) -> Float[Tensor, " p"]:
    """Return singular values, largest first.

    Raises an error of torch's or of numpy's if there are none.

    >>> svdvals(torch.diag(torch.tensor([1.0, 2.0])))
    tensor([2., 1.])
    """
    if not _on_cpu(a):
        return torch.linalg.svdvals(a)
    # the transpose of a row-major matrix has the same values, and is column-major
    columns = a.numpy() if a.stride(0) == 1 else a.mT.numpy()
    return torch.from_numpy(
        scipy.linalg.svdvals(columns, overwrite_a=overwrite, check_finite=False)
    )


def triangle_of_rows(panels: Iterable[Float[Tensor, "rows p"]], columns: int) -> Tensor:
    """Return the ``R`` of a QR factorization of all rows, which takes no more room than itself.

    A panel is reflected into the triangle of those before it (LAPACK's tpqrt): as many operations
    as a QR factorization of all rows at once.

    >>> triangle_of_rows([torch.tensor([[3.0]]), torch.tensor([[4.0]])], columns=1).abs()
    tensor([[5.]], dtype=torch.float64)
    """
    r, block = np.zeros((columns, columns), order="F"), min(REFLECTORS, columns)
    for panel in panels:
        rows = np.array(panel.numpy(force=True), dtype=np.float64, order="F")
        r = scipy.linalg.lapack.dtpqrt(0, block, r, rows, overwrite_a=1, overwrite_b=1)[0]
    return torch.from_numpy(r)


def tridiagonal(
    lower: Float[Tensor, "p p"],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the diagonal and subdiagonal of a tridiagonal matrix with the eigenvalues of this one.

    It is scipy's on every device: torch has none.

    >>> tridiagonal(torch.tensor([[1.0, 0.0], [3.0, 2.0]]).double().mT.contiguous().mT)
    (array([1., 2.]), array([3.]))
    """
    work = int(scipy.linalg.lapack.dsytrd_lwork(len(lower), lower=1)[0])
    gram = lower.numpy(force=True)
    _, diagonal, beside, _, _ = scipy.linalg.lapack.dsytrd(gram, lower=1, lwork=work, overwrite_a=1)
    return diagonal, beside


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """``A = Q T Q'`` of a symmetric matrix: the tridiagonal T, and Q as Householder's reflectors.

    It is scipy's on every device, in float32 or float64.

    >>> form = Tridiagonal.of(torch.diag(torch.tensor([3.0, 1.0, 5.0])))
    >>> form.count_up_to(4.0), form.ends(1)[0]
    (2, array([1., 5.], dtype=float32))
    """

    diagonal: NDArray[Any]
    beside: NDArray[Any]
    reflectors: NDArray[Any]
    scales: NDArray[Any]

    @classmethod
    def of(cls, lower: Float[Tensor, "p p"]) -> Tridiagonal:
        """Reduce a matrix of three columns or more, given its lower triangle."""
        array = lower.numpy(force=True)
        packed, diagonal, beside, scales, _ = _lapack("sytrd", array.dtype)(
            array, lower=1, lwork=TRIDIAGONAL_COLUMNS * len(array)
        )
        return cls(diagonal, beside, packed[1:, :-1], scales)

    def count_up_to(self, limit: float) -> int:
        """Count the eigenvalues of T up to a limit by Sturm's sequence, in float64."""
        d, e = (part.astype(np.float64) for part in (self.diagonal, self.beside))
        width = float(np.abs(d).max() + 2 * np.abs(e).max())  # beyond which there are none
        inside = min(max(limit, -2 * width), 2 * width)
        by_value, order = 1, b"E"
        count, *_ = scipy.linalg.lapack.dstebz(
            d, e, by_value, -3 * width, inside, 0, 0, width, order
        )
        return int(count)

    def ends(self, count: int) -> tuple[NDArray[Any], Tensor]:
        """Return so many of the smallest eigenvalues and then of the largest, each ascending.

        Vectors of A come with them: by bisection and inverse iteration, all turned back by Q at
        once, which reads Q only once.
        """
        size = len(self.diagonal)
        ends = [self._between(1, count), self._between(size - count + 1, size)]
        values, vectors = (np.concatenate(parts, -1) for parts in zip(*ends, strict=True))
        vectors = np.asfortranarray(vectors)
        # Q leaves the first entry as it is: it is that of a QR factorization of all others
        turned, *_ = _lapack("ormqr", vectors.dtype)(
            b"L", b"N", self.reflectors, self.scales, vectors[1:], REFLECTORS * 2 * count
        )
        vectors[1:] = turned
        return values, torch.from_numpy(vectors)

    def _between(self, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return eigenvalues of T by bisection and its vectors by inverse iteration, ascending."""
        by_index, by_block = 2, b"B"
        dtype = self.diagonal.dtype
        count, values, block, split, _ = _lapack("stebz", dtype)(
            self.diagonal, self.beside, by_index, 0, 0, first, last, 0, by_block
        )
        vectors, _ = _lapack("stein", dtype)(
            self.diagonal, self.beside, values[:count], block, split
        )
        order = np.argsort(values[:count])
        return values[order], vectors[:, order]
