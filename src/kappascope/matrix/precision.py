"""How well a stored matrix is known: the rounding of its entries, and what that does to kappa.

A weight in bfloat16 is the rounding of something. By Weyl's theorem every singular value of what
was rounded lies within the spectral norm of the rounding of the stored matrix's, so the smallest
one, and with it the condition number, is known only to that norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

GRIDS = (torch.bfloat16, torch.float16, torch.float32)
EXPONENT_BITS = 0x7FF0_0000_0000_0000  # of a float64: what is left is the power of two below it

SAMPLED_LINES = 32  # rows and columns that tell whether entries repeat
# A number met so many times more often than others near it was not put there by chance: a density
# may change within a power of two, and of a thousand small counts one is large.
REPEATS_FACTOR, MIN_REPEATS = 8, 12

# Over all dtypes, shapes from 1x1 on, and uneven rows, the norm of a random rounding never exceeded
# its estimate (largest ratio 0.997 in the trials of tests/test_precision.py); this is on top.
NORM_MARGIN = 1.25


@dataclass(frozen=True)
class Interval:
    """The condition numbers a stored matrix may have had before it was rounded.

    >>> Interval(90.0, 110.0).resolved, Interval(90.0, math.inf).resolved
    (True, False)
    """

    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether kappa is known to a factor of two."""
        return self.high <= 2 * self.low


@dataclass(frozen=True)
class FloatGrid:
    """The numbers of a floating type: spaced by ``eps`` in parts of a power of two, from ``tiny``.

    >>> FloatGrid.of(torch.bfloat16).eps
    0.0078125
    """

    eps: float
    tiny: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> FloatGrid:
        """Describe the grid as torch does, but for a type whose spacing torch gives as half."""
        info = torch.finfo(dtype)
        eps = 0.25 if dtype == torch.float8_e5m2fnuz else info.eps  # two bits behind the point
        return cls(eps, info.tiny)


def storage_dtype(matrix: Tensor) -> torch.dtype:
    """Return the floating type that holds every entry exactly, the roughest where several do.

    Checkpoints are converted to other types without gaining a digit: what sits on the bfloat16
    grid is as uncertain as bfloat16, whatever its dtype says.

    >>> storage_dtype(torch.randn(8, 8).bfloat16().float())
    torch.bfloat16
    """
    grids = [g for g in GRIDS if _can_be_rougher(g, matrix.dtype) and _on_grid(matrix, g)]
    grids.append(matrix.dtype)
    rough = [g for g in grids if all(_can_be_rougher(g, h) for h in grids if h != g)] or grids
    return rough[0] if len(rough) == 1 else max(rough, key=lambda g: _roughness(matrix, g))


def _roughness(matrix: Tensor, grid: torch.dtype) -> float:
    """Return the norm of the half-ulps, a panel at a time: a copy may not fit."""
    panels = (half_ulps(panel.double(), grid) for panel in matrix.split(1024))
    return math.hypot(*(float(panel.norm()) for panel in panels))


def _can_be_rougher(grid: torch.dtype, than: torch.dtype) -> bool:
    """By its digits, or among small numbers: float16's subnormals are further apart than most."""
    rougher, other = FloatGrid.of(grid), FloatGrid.of(than)
    return rougher.eps > other.eps or rougher.eps * rougher.tiny > other.eps * other.tiny


def _on_grid(matrix: Tensor, grid: torch.dtype) -> bool:
    """Tell whether a round trip through ``grid`` changes nothing; a corner tells as a rule."""
    parts = (matrix[:32, :32], *matrix.split(1024))
    return all(bool((part.to(grid).to(part.dtype) == part).all()) for part in parts)


def half_ulps(
    values: Float[Tensor, "*shape"], dtype: torch.dtype, exponent: int = 0
) -> Float[Tensor, "*shape"]:
    """Return half the grid's spacing at each value: how far rounding may have moved it.

    That is one rounding, of a weight trained in float32: torch takes a float64 number to float16
    by way of float32, which may add the half-ulp of that. The values are the stored ones divided by
    ``2**exponent``, in float64.

    >>> half_ulps(torch.tensor([1.0, 1.9, 2.0], dtype=torch.float64), torch.bfloat16)
    tensor([0.0039, 0.0039, 0.0078], dtype=torch.float64)
    """
    grid = FloatGrid.of(dtype)
    powers = (values.view(torch.int64) & EXPONENT_BITS).view(torch.float64)
    return powers.clamp_(min=math.ldexp(grid.tiny, -exponent)).mul_(grid.eps / 2)


def independent(matrix: Shaped[Tensor, "out in"], dtype: torch.dtype) -> bool:
    """Tell whether entries repeat no more often than chance makes them on the grid of ``dtype``.

    Equal entries were rounded alike: then the errors add up, and no estimate holds that takes them
    for random. Chance fills, of the M numbers that the grid has between two powers of two, with c
    entries M (1 - (1 - 1/M)^c) on average, each c/M times. Zeros, which pruning makes, do not
    count.

    >>> independent(torch.randn(64, 64).bfloat16(), torch.bfloat16)
    True
    >>> independent(torch.eye(64) - 1 / 64, torch.float32)
    False
    """
    sample = _sample(matrix).abs().numpy(force=True)
    values, counts = np.unique(sample[sample > 0], return_counts=True)
    if len(values) == sample.size:
        return True
    powers, binades = np.unique(np.frexp(values)[1], return_inverse=True)
    grid = FloatGrid.of(dtype)
    above = np.clip(powers - 1 - math.log2(grid.tiny), None, 0)  # fewer among the subnormals
    size = np.exp2(np.maximum(above - math.log2(grid.eps), 0))
    shares = np.bincount(binades, counts)
    if (counts > MIN_REPEATS + REPEATS_FACTOR * (shares / size)[binades]).any():
        return False
    with np.errstate(divide="ignore"):  # of the last number before zero there is one
        expected = -size * np.expm1(shares * np.log1p(-1 / size))
    return len(values) >= 0.5 * float(expected.sum())


def _sample(matrix: Shaped[Tensor, "out in"]) -> Tensor:
    """Return rows and columns at equal distances, or entries where these meet little but zeros."""
    rows, columns = (math.ceil(n / SAMPLED_LINES) for n in matrix.shape)
    sample = matrix[::rows, ::columns].double()
    if 4 * int(sample.count_nonzero()) >= sample.numel():
        return sample
    entries = matrix[matrix.bool()]
    return entries[:: math.ceil(len(entries) / SAMPLED_LINES**2) or 1].double()


def rounding_bound(panels: Iterable[Tensor], dtype: torch.dtype, exponent: int = 0) -> float:
    """Return what no rounding exceeds: the smaller of two norms of the half-ulps.

    That of Frobenius, and the root of the largest row sum times the largest column sum.

    >>> rounding_bound([torch.eye(4, dtype=torch.float64)], torch.bfloat16)
    0.00390625
    """
    rows, columns, squares = 0.0, torch.zeros((), device="cpu"), 0.0
    for panel in panels:
        ulps = half_ulps(panel, dtype, exponent)
        rows = max(rows, float(ulps.sum(1).max()))
        columns = columns.to(ulps) + ulps.sum(0)
        squares += float(ulps.square().sum())
    return min(math.sqrt(squares), math.sqrt(rows * float(columns.max())))


def rounding_norm(rows: Float[Tensor, " out"], columns: Float[Tensor, " in"]) -> float:
    """Estimated spectral norm of a rounding whose half-ulps have these row and column norms.

    Rounding errors are uniform within a half-ulp, independent and centred: standard deviation
    half-ulp/sqrt(3). The norm of such a matrix is at most about its largest row plus its largest
    column of deviations (Bandeira and van Handel 2016), and never more than its Frobenius norm.

    >>> ulps = torch.full((4,), 1e-7, dtype=torch.float64)
    >>> rounding_norm(ulps, ulps)
    1.44...e-07
    """
    estimate = NORM_MARGIN * float(rows.max() + columns.max()) / math.sqrt(3)
    return min(estimate, float(torch.linalg.vector_norm(rows)))


@dataclass(frozen=True, eq=False)
class Rounding:
    """How far rounding to a code that is no floating type may have moved each entry of a matrix.

    >>> steps = torch.full((4, 4), 0.5)
    >>> Rounding("Q4_0", steps).norm() < float(torch.linalg.matrix_norm(steps, 2))
    True
    """

    code: str
    half_steps: Float[Tensor, "out in"]

    def norm(self) -> float:
        """Estimate the spectral norm of such a rounding, as `rounding_norm` does."""
        columns = torch.zeros(self.half_steps.shape[1], dtype=torch.float64)
        rows = []
        for panel in self.half_steps.split(1024):  # a copy of all in float64 may not fit
            squares = panel.double().square()
            rows.append(squares.sum(1))
            columns += squares.sum(0)
        return rounding_norm(torch.cat(rows).sqrt(), columns.sqrt())


def condition_interval(
    sigma_max: float, sigma_min: float, uncertainty: float, computed: float = 0.0
) -> Interval:
    """Return all condition numbers within ``uncertainty`` (a spectral norm) of the given extremes.

    The ratio of these may be wrong by a share of ``computed`` itself.

    >>> condition_interval(10.0, 1.0, 0.5)
    Interval(low=6.33..., high=21.0)
    """
    low = max(1.0, (sigma_max - uncertainty) / (sigma_min + uncertainty) * (1 - computed))
    if uncertainty >= sigma_min:
        return Interval(low, math.inf)
    return Interval(low, (sigma_max + uncertainty) / (sigma_min - uncertainty) * (1 + computed))
