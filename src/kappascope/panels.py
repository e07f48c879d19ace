"""Matrices a panel of rows at a time: what fits in cache is fast, what is not copied is small.

A :class:`Panels` stands for the float64 copy of a matrix that would be too large beside the
stored one. It can multiply blocks of vectors from both sides, which is all that most methods need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import scipy.linalg
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kappascope import kernels

CACHED = 2**16  # entries of a panel that is used several times: half a megabyte, the second cache
ROWS = 2048  # of a panel for a product with itself: enough for BLAS to reach its speed
FEW = 256  # of one for a product with some vectors
SHRUNK = 1e-30  # of the largest entry
COPIED = 2**28  # bytes of a float64 copy from which there is none


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

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the panels."""
        return torch.float64

    @property
    def device(self) -> torch.device:
        """Of the panels."""
        return self.stored.device

    @property
    def mT(self) -> Panels:  # noqa: N802 - as torch calls it
        """Transposed, without a copy."""
        return Panels(self.stored.mT, self.exponent)

    def split(self, rows: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
        """The panels, top down, each of so many rows at most, and each in the place of the last.

        New memory for each would take as long as all that is done with it.
        """
        first = self.stored[:rows]
        across = self.stored.stride(0) == 1 != self.stored.stride(1)
        shape = first.mT.shape if across else first.shape
        place = torch.empty(shape, dtype=dtype, device=self.device)
        # in two steps where one power of two would be too large for a float64
        steps = (-self.exponent,) if self.exponent > -1000 else (1000, -self.exponent - 1000)
        scales = [2.0**step for step in steps]
        narrow = self.stored.dtype.itemsize > dtype.itemsize  # and may not hold what is unscaled
        for panel in self.stored.split(rows):
            entries = (place.mT if across else place)[: len(panel)]
            scaled = panel.clone() if narrow else entries.copy_(panel)
            for scale in scales:
                scaled.mul_(scale)
            yield entries.copy_(scaled) if narrow else entries


Dense: TypeAlias = Float[Tensor, "q p"] | Panels
"""A matrix that is there, or comes in panels."""


def dense(a: Dense, dtype: torch.dtype) -> Float[Tensor, "q p"]:
    """All of it in a precision, without entries that are too small for float32 to be quick with.

    >>> dense(torch.tensor([[1.0, 1e-40]], dtype=torch.float64), torch.float32)
    tensor([[1., 0.]])
    """
    if isinstance(a, Tensor) and a.dtype == dtype:
        return a
    stored = a.stored if isinstance(a, Panels) else a
    copy = kernels.memory(stored, dtype)
    for target, panel in zip(copy.split(FEW), a.split(FEW), strict=True):
        target.copy_(torch.hardshrink(panel.to(dtype), SHRUNK))
    return copy


def gram(a: Dense, dtype: torch.dtype | None = None) -> Float[Tensor, "p p"]:
    """Lower triangle of ``A'A``, zeros above it: half the work of the full product.

    >>> gram(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 0.],
            [2., 4.]])
    """
    dtype = dtype or a.dtype
    syrk = scipy.linalg.blas.ssyrk if dtype == torch.float32 else scipy.linalg.blas.dsyrk
    total = None
    for panel in a.split(ROWS, dtype) if isinstance(a, Panels) else a.split(ROWS):
        entries = panel.to(dtype)
        if dtype == torch.float32 != panel.dtype:  # as dense() does
            entries = torch.hardshrink(entries, SHRUNK)
        x = entries.numpy(force=True)
        # BLAS reads columns: rows are the columns of the transpose, which needs no copy.
        flat = x.flags.c_contiguous
        more: dict[str, Any] = {} if total is None else {"beta": 1, "c": total, "overwrite_c": 1}
        total = syrk(1, x.T if flat else x, trans=0 if flat else 1, lower=1, **more)
    return torch.as_tensor(total, device=a.device)


def mirror(lower: Float[Tensor, "p p"], tile: int = 256) -> Float[Tensor, "p p"]:
    """The symmetric matrix with this lower triangle, in its place.

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


def times(a: Dense, x: Float[Tensor, "p k"]) -> Float[Tensor, "q k"]:
    """``A x``.

    >>> times(torch.tensor([[1.0, 2.0]]), torch.ones(2, 1))
    tensor([[3.]])
    """
    if isinstance(a, Panels):
        return torch.cat([kernels.times(panel, x) for panel in a.split(FEW)])
    return kernels.times(a, x)


def transposed_times(a: Dense, y: Float[Tensor, "q k"]) -> Float[Tensor, "p k"]:
    """``A'y``.

    >>> transposed_times(torch.tensor([[1.0, 2.0]]), torch.ones(1, 1))
    tensor([[1.],
            [2.]])
    """
    if not isinstance(a, Panels):
        return kernels.times(a.mT, y)
    result = y.new_zeros(a.shape[1], y.shape[1])
    for part, panel in zip(y.split(FEW), a.split(FEW), strict=True):
        result += kernels.times(panel.mT, part)
    return result


def triangle(a: Dense) -> Float[Tensor, "r p"]:
    """The ``R`` of a QR factorization of a tall matrix, which has its singular values.

    >>> triangle(torch.tensor([[3.0], [4.0]])).abs()
    tensor([[5.]])
    """
    r = torch.empty(0, a.shape[1], dtype=a.dtype, device=a.device)
    for panel in a.split(max(ROWS, a.shape[1])):
        r = torch.linalg.qr(torch.cat([r, panel]), mode="r")[1]
    return r
