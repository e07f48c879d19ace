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
        height = UNCOPIED // (len(x) * VECTORS)
        if not _for_openblas(x) or x.shape[1] > VECTORS or height < NARROW:
            return torch.linalg.lu_solve(self.factors, self.pivots, x, adjoint=transposed)
        solve = self._solve_transposed if transposed else self._solve
        return torch.from_numpy(solve(x.contiguous().numpy()))

    def _solve(self, x: NDArray[Any]) -> NDArray[Any]:
        y, rows = x[self._order], self._rows
        for block, lower, _ in self._blocks:
            y[block] = lower @ y[block]
            y[block.stop :] -= rows[block, block.stop :].T @ y[block]
        for block, _, upper in reversed(self._blocks):
            y[block] = upper @ y[block]
            y[: block.start] -= rows[block, : block.start].T @ y[block]
        return y

    def _solve_transposed(self, x: NDArray[Any]) -> NDArray[Any]:
        y, rows = x.copy(), self._rows
        for block, _, upper in self._blocks:
            y[block] = upper.T @ (y[block] - rows[block, : block.start] @ y[: block.start])
        for block, lower, _ in reversed(self._blocks):
            y[block] = lower.T @ (y[block] - rows[block, block.stop :] @ y[block.stop :])
        result = np.empty_like(y)
        result[self._order] = y
        return result

    @property
    def _rows(self) -> NDArray[Any]:
        """The transpose of both factors, its rows in one piece: that of U below that of L."""
        return self.factors.mT.numpy()

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """Where the rows of ``A`` went, one swap after the other."""
        order = np.arange(len(self.factors))
        for i, j in enumerate(self.pivots.numpy() - 1):
            order[i], order[j] = order[j], order[i]
        return order

    @cached_property
    def _blocks(self) -> list[tuple[slice, NDArray[Any], NDArray[Any]]]:
        """Of rows along the diagonal, with the inverses of L and of U there."""
        both = self.factors.numpy()
        height = UNCOPIED // (len(both) * VECTORS)
        blocks = [slice(i, min(i + height, len(both))) for i in range(0, len(both), height)]
        return [(block, *_inverses(both[block, block])) for block in blocks]


def _inverses(block: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of a lower triangle with ones on its diagonal, and of the upper one beside it."""
    trtri = _lapack("trtri", block.dtype)
    lower = np.tril(trtri(block, lower=1, unitdiag=1)[0], -1)
    np.fill_diagonal(lower, 1)
    return lower, np.triu(trtri(block, lower=0)[0])


def _lapack(name: str, dtype: object) -> Callable[..., Any]:
    """OpenBLAS's routine of this name for a type of float."""
    return getattr(scipy.linalg.lapack, ("s" if str(dtype).endswith("float32") else "d") + name)


def cholesky(a: Float[Tensor, "p p"]) -> tuple[Float[Tensor, "p p"], int]:
    """The lower factor, with anything above it, and whether there is none.

    >>> cholesky(torch.tensor([[4.0]]))
    (tensor([[2.]]), 0)
    """
    # scipy's LAPACK and not torch's: twice as fast on Intel's processors too
    factor, info = _lapack("potrf", a.dtype)(a.numpy(force=True), lower=1, clean=0)
    return torch.as_tensor(factor, device=a.device), int(info)


def bunch_kaufman(lower: Float[Tensor, "p p"]) -> tuple[Float[Tensor, "p p"], Tensor, int]:
    """LDL' of a symmetric matrix, its lower triangle, in its place; pivots; whether one is zero.

    >>> bunch_kaufman(torch.tensor([[-4.0]]))
    (tensor([[-4.]]), tensor([1], dtype=torch.int32), 0)
    """
    # scipy's LAPACK and not torch's: half as fast again on Intel's processors too
    work = int(_lapack("sytrf_lwork", lower.dtype)(len(lower), lower=1)[0])
    factor, swaps, info = _lapack("sytrf", lower.dtype)(
        lower.numpy(force=True), lower=1, lwork=work, overwrite_a=1
    )
    place = lower.device
    return torch.as_tensor(factor, device=place), torch.as_tensor(swaps, device=place), int(info)


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
