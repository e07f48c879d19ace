"""The operations that take the time, by the library that is quicker on this processor.

torch brings Intel's MKL, numpy and scipy bring OpenBLAS. On Intel's processors MKL is at least as
quick at what is done here. On AMD's it takes 1.4 times as long as OpenBLAS for an LU factorization,
1.2 times for an SVD, and up to five times for the product of a large matrix and a few vectors.
Products of up to a million multiplications OpenBLAS makes without copying the factors first, which
for a few vectors would take longer than to multiply: a matrix is cut into strips as small as that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

UNCOPIED = 10**6  # multiplications of a product for which OpenBLAS copies nothing
NARROW = 12  # rows of a strip; of fewer it has too little to do
VECTORS = 16  # of a block to solve for, as a rule
FEW = 256  # of a strip that OpenBLAS will copy
CACHED = 2**18  # entries of a strip that MKL uses twice: a megabyte of float32, the second cache


def _of_amd() -> bool:
    """Whether this processor is AMD's."""
    listed = Path("/proc/cpuinfo")
    if not listed.exists():
        return "AuthenticAMD" in platform.processor()
    with listed.open() as lines:
        return "AuthenticAMD" in next((line for line in lines if line.startswith("vendor_id")), "")


OPENBLAS = torch.backends.mkl.is_available() and _of_amd()
_silently = np.errstate(all="ignore")  # as torch is: who asks looks at the result


def _for_openblas(a: Tensor) -> bool:
    return OPENBLAS and a.device.type == "cpu"


def _strips(matrix: NDArray[Any], vectors: NDArray[Any]) -> Iterator[slice]:
    """Of all rows, as many at a time as OpenBLAS multiplies at its best."""
    height = UNCOPIED // max(matrix.shape[1] * vectors.shape[1], 1)
    height = height if height >= NARROW else FEW
    return (slice(i, i + height) for i in range(0, len(matrix), height))


def memory(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of this shape, and of this order if rows or columns are in one piece.

    On the CPU numpy asks for it, in large pages where it is large. To be given small ones, one
    after the other, takes longer than to fill them: a copy of 2048 columns three times as long.

    >>> memory(torch.empty(3, 2).mT, torch.float32).stride()
    (1, 2)
    """
    if like.ndim >= 2 and like.stride(-2) == 1 != like.stride(-1):
        return memory(like.mT, dtype).mT
    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    return torch.from_numpy(np.empty(like.shape, str(dtype).removeprefix("torch.")))


@_silently
def times(a: Float[Tensor, "q p"], x: Float[Tensor, "p k"]) -> Float[Tensor, "q k"]:
    """``A x``, of a large matrix and a few vectors.

    >>> times(torch.eye(2), torch.ones(2, 1))
    tensor([[1.],
            [1.]])
    """
    if not _for_openblas(a):
        return a @ x
    matrix, vectors = a.numpy(), x.contiguous().numpy()
    if a.stride(1) == 1:
        strips = _strips(matrix, vectors)
        return torch.from_numpy(np.concatenate([matrix[strip] @ vectors for strip in strips]))
    result = np.zeros((len(matrix), vectors.shape[1]), vectors.dtype)
    for strip in _strips(matrix.T, vectors):
        result += matrix[:, strip] @ vectors[strip]
    return torch.from_numpy(result)


@_silently
def square_times(a: Float[Tensor, "q p"], x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
    """``A'A x``, a strip at a time: each is used twice while in cache, where the time goes.

    >>> square_times(2 * torch.eye(2), torch.ones(2, 1))
    tensor([[4.],
            [4.]])
    """
    if not _for_openblas(a):
        result = x.new_zeros(x.shape[1], x.shape[0])
        for strip in a.split(max(64, CACHED // a.shape[1])):
            result.addmm_((strip @ x).mT, strip)
        return result.mT
    if a.stride(1) != 1:
        return times(a.mT, times(a, x))
    matrix, vectors = a.numpy(), x.contiguous().numpy()
    total = np.zeros_like(vectors)
    for rows in _strips(matrix, vectors):
        total += matrix[rows].T @ (matrix[rows] @ vectors)
    return torch.from_numpy(total)


@dataclass(frozen=True, eq=False)
class LU:
    """``A = P L U``: both factors in one place, pivots as torch has them, whether one is zero.

    >>> LU.of(torch.diag(torch.tensor([2.0, 4.0]))).solve(torch.ones(2, 1))
    tensor([[0.5000],
            [0.2500]])
    """

    factors: Float[Tensor, "p p"]
    pivots: Tensor
    singular: bool

    @classmethod
    def of(cls, a: Float[Tensor, "p p"]) -> LU:
        """Of a matrix, quickest if its columns are in one piece."""
        if not _for_openblas(a):
            factors, pivots, info = torch.linalg.lu_factor_ex(a)
            return cls(factors, pivots, bool(info))
        lu, swaps, info = _lapack("getrf", a.dtype)(a.numpy())
        return cls(torch.from_numpy(lu), torch.from_numpy(swaps + 1), info != 0)

    @_silently
    def solve(self, x: Float[Tensor, "p k"], transposed: bool = False) -> Float[Tensor, "p k"]:
        """``A^-1 x``, or that of the transpose."""
        if not _in_blocks(x):
            return torch.linalg.lu_solve(self.factors, self.pivots, x, adjoint=transposed)
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
        return _Triangle(self.factors.numpy(), lower=True, ones=True)

    @cached_property
    def _upper(self) -> _Triangle:
        return _Triangle(self.factors.numpy(), lower=False)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """Where the rows of ``A`` went, one swap after the other."""
        order = np.arange(len(self.factors))
        for i, j in enumerate(self.pivots.numpy() - 1):
            order[i], order[j] = order[j], order[i]
        return order


@dataclass(frozen=True, eq=False)
class Cholesky:
    """``A = L L'``, with anything above L; whether there is no such factor.

    >>> Cholesky.of(torch.tensor([[5.0]]), shift=1.0).solve(torch.ones(1, 1))
    tensor([[0.2500]])
    """

    factor: Float[Tensor, "p p"]
    indefinite: bool

    @classmethod
    def of(cls, lower: Float[Tensor, "p p"], shift: float = 0.0) -> Cholesky:
        """Of ``A - shift``, from the lower triangle of ``A``."""
        # scipy's LAPACK and not torch's: twice as fast on Intel's processors too
        potrf = _lapack("potrf", lower.dtype)
        factor, info = potrf(_shifted(lower, shift), lower=1, clean=0, overwrite_a=1)
        return cls(torch.as_tensor(factor, device=lower.device), info != 0)

    @_silently
    def solve(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """``A^-1 x``."""
        if not _in_blocks(x):
            # torch.cholesky_solve copies the factor, which takes four times as long as this
            half = torch.linalg.solve_triangular(self.factor, x, upper=False)
            return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)
        y = np.array(x.numpy(), order="C")
        self._lower.solve(y)
        self._lower.solve_transposed(y)
        return torch.from_numpy(y)

    @cached_property
    def _lower(self) -> _Triangle:
        return _Triangle(self.factor.numpy(), lower=True)


def _in_blocks(x: Float[Tensor, "p k"]) -> bool:
    """Whether to solve for these in blocks of rows that OpenBLAS need not copy."""
    return _for_openblas(x) and x.shape[1] <= VECTORS and _height(len(x)) >= NARROW


def _height(size: int) -> int:
    return UNCOPIED // (size * VECTORS)


class _Triangle:
    """One triangle of a matrix, its columns in one piece, to solve with in blocks of rows.

    In the order of substitution; with each block go the rows beyond it and its inverse.
    """

    def __init__(self, matrix: NDArray[Any], lower: bool, ones: bool = False) -> None:
        size, height = len(matrix), _height(len(matrix))
        self.rows = matrix.T
        self.blocks = []
        for i in range(0, size, height):
            block = slice(i, min(i + height, size))
            beyond = slice(block.stop, size) if lower else slice(0, i)
            self.blocks.append((block, beyond, _inverse(matrix[block, block], lower, ones)))
        if not lower:
            self.blocks.reverse()

    def solve(self, y: NDArray[Any]) -> None:
        """``T^-1 y`` in its place."""
        for block, beyond, inverse in self.blocks:
            y[block] = inverse @ y[block]
            y[beyond] -= self.rows[block, beyond].T @ y[block]

    def solve_transposed(self, y: NDArray[Any]) -> None:
        """``T'^-1 y`` in its place."""
        for block, beyond, inverse in reversed(self.blocks):
            y[block] = inverse.T @ (y[block] - self.rows[block, beyond] @ y[beyond])


def _inverse(block: NDArray[Any], lower: bool, ones: bool) -> NDArray[Any]:
    """Of one triangle of a matrix, with ones on its diagonal or what is there."""
    inverse = _lapack("trtri", block.dtype)(block, lower=lower, unitdiag=ones)[0]
    inverse = np.tril(inverse) if lower else np.triu(inverse)
    if ones:
        np.fill_diagonal(inverse, 1)
    return inverse


def _lapack(name: str, dtype: object) -> Callable[..., Any]:
    """OpenBLAS's routine of this name for a type of float."""
    return getattr(scipy.linalg.lapack, ("s" if str(dtype).endswith("float32") else "d") + name)


@dataclass(frozen=True, eq=False)
class LDL:
    """Of a symmetric matrix, after Bunch and Kaufman: both factors in one place, LAPACK's pivots.

    >>> found = LDL.of(torch.diag(torch.tensor([3.0, 5.0])), shift=4.0)
    >>> found.negative, found.solve(torch.ones(2, 1)).flatten()
    (1, tensor([-1.,  1.]))
    """

    factors: NDArray[Any]
    pivots: NDArray[np.int32]
    singular: bool

    @classmethod
    def of(cls, lower: Float[Tensor, "p p"], shift: float = 0.0) -> LDL:
        """Of ``A - shift``, from the lower triangle of ``A``."""
        # scipy's LAPACK and not torch's: half as fast again on Intel's processors too
        work = int(_lapack("sytrf_lwork", lower.dtype)(len(lower), lower=1)[0])
        factors, pivots, info = _lapack("sytrf", lower.dtype)(
            _shifted(lower, shift), lower=1, lwork=work, overwrite_a=1
        )
        return cls(factors, pivots, info != 0)

    def solve(self, x: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """``A^-1 x``."""
        sytrs = _lapack("sytrs", x.dtype)
        found, _ = sytrs(self.factors, self.pivots, x.numpy(force=True), lower=1)
        return torch.as_tensor(found, device=x.device)

    @property
    def negative(self) -> int:
        """How many eigenvalues are: one of every pair of columns that has one pivot."""
        single = self.pivots > 0
        return int(((self.factors.diagonal() < 0) & single).sum()) + int((~single).sum()) // 2


def _shifted(lower: Float[Tensor, "p p"], shift: float) -> NDArray[Any]:
    """A copy of a symmetric matrix, its lower triangle, less a shift, columns in one piece."""
    copy = np.array(lower.numpy(force=True), order="F")
    np.einsum("ii->i", copy)[:] -= shift
    return copy


def svdvals(a: Float[Tensor, "q p"]) -> Float[Tensor, " p"]:
    """Singular values, largest first; raises an error of torch's or of numpy's if there are none.

    >>> svdvals(torch.diag(torch.tensor([1.0, 2.0])))
    tensor([2., 1.])
    """
    if not _for_openblas(a):
        return torch.linalg.svdvals(a)
    # of the transpose, which has the same values, and its columns in one piece
    return torch.from_numpy(scipy.linalg.svdvals(a.mT.numpy(), check_finite=False))


def tridiagonal(
    lower: Float[Tensor, "p p"],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Diagonal and subdiagonal of a tridiagonal matrix with the eigenvalues of this one.

    >>> tridiagonal(torch.tensor([[1.0, 0.0], [3.0, 2.0]]).double().mT.contiguous().mT)
    (array([1., 2.]), array([3.]))
    """
    # scipy's LAPACK and not torch's, whose eigenvalues take half as long again at these sizes
    work = int(scipy.linalg.lapack.dsytrd_lwork(len(lower), lower=1)[0])
    gram = lower.numpy(force=True)
    _, diagonal, beside, _, _ = scipy.linalg.lapack.dsytrd(gram, lower=1, lwork=work, overwrite_a=1)
    return diagonal, beside
