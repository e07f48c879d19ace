"""What fewer bits cost a matrix: rounding to int8, and entries too coarse to move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.precision import half_ulps

INT8_LEVELS = 127  # on either side of zero, as symmetric quantizers have them
PANEL_ENTRIES = 2**20  # rounded together: eight megabytes
SAMPLED_ENTRIES = 2**23  # of a larger matrix: the error is a mean over millions


@dataclass(frozen=True)
class Int8Errors:
    """Relative errors of the entries off the outlying lines, by how scales are shared.

    ``row_scale`` is the error with a scale for every row, ``tensor_scale`` that with one for all.
    Those called ``apart`` are the errors with the outlying lines kept in more bits, so that no
    scale has to reach so far.
    """

    row_scale: float
    row_scale_apart: float
    tensor_scale: float
    tensor_scale_apart: float

    @property
    def bits_lost_by_rows(self) -> float:
        """The bits of eight that outlying columns take from the others, with a scale a row.

        >>> Int8Errors(0.04, 0.01, 0.04, 0.01).bits_lost_by_rows
        2.0
        """
        return _bits(self.row_scale, self.row_scale_apart)

    @property
    def bits_lost_by_tensor(self) -> float:
        """The bits of eight that outlying lines take from the others, with one scale."""
        return _bits(self.tensor_scale, self.tensor_scale_apart)


def _bits(error: float, apart: float) -> float:
    return math.log2(error / apart) if error > apart > 0 else 0.0


def int8_errors(
    matrix: Tensor, rows_apart: Bool[Tensor, " out"], columns_apart: Bool[Tensor, " in"]
) -> Int8Errors | None:
    """Round a matrix to int8 and measure the error; None where nothing is left to be measured.

    >>> weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> none = torch.zeros(64, dtype=torch.bool)
    >>> int8_errors(weight, none, none).row_scale < 0.01
    True
    """
    rows, columns = ~rows_apart, ~columns_apart
    if not rows.any() or not columns.any():
        return None
    sample, exponent = spectra.scaled_to_one(_sampled(matrix[rows] if rows_apart.any() else matrix))
    kept = sample[:, columns] if columns_apart.any() else sample
    if not kept.any():
        return None
    comparable = matrix.bfloat16() if matrix.dtype.itemsize == 1 else matrix  # exactly
    ends = torch.stack(torch.aminmax(comparable)).double()
    whole, rest = spectra.ldexp(ends, -int(exponent)).abs().max(), kept.abs().max()
    squares = torch.zeros(4, dtype=torch.float64)
    height = max(1, PANEL_ENTRIES // sample.shape[1])
    for top in range(0, len(sample), height):
        panel = kept[top : top + height]
        by_row = sample[top : top + height].abs().amax(1, keepdim=True)
        scales = by_row, panel.abs().amax(1, keepdim=True), whole, rest
        squares += torch.stack([_squared_error(panel, scale) for scale in scales])
    return Int8Errors(*(squares.sqrt() / torch.linalg.vector_norm(kept)).tolist())


def _sampled(matrix: Tensor) -> Tensor:
    """Return rows at equal distances, so many that a copy of them in float64 is small."""
    return matrix[:: max(1, -(-matrix.numel() // SAMPLED_ENTRIES))]


def _squared_error(panel: Tensor, largest: Tensor) -> Tensor:
    step = largest / INT8_LEVELS
    codes = (panel / step).round()  # NaN in a row of zeros, which has no error
    return (panel - codes * step).nan_to_num_(nan=0.0).square().sum()


NODES = 64  # quantiles of a normal step: the share is asked for to two digits
SCALED_ENTRIES = 2**16  # that tell the share which a scaling leaves, to two digits
HALVINGS = 60  # of the logarithm of the step's size, which lies within float64's range


def unchanged_share(
    before: Tensor, after: Tensor, dtype: torch.dtype
) -> tuple[float, float] | None:
    """Return which share of entries is the same to the bit, and which one a step would leave.

    The step is normal with one deviation for all entries, or a scaling of all by one factor, of
    which the one is taken that predicts better; it is fitted to the size of the change as it is
    stored. Both matrices are roundings to ``dtype``: a step of x spacings leaves an entry where
    it was with probability 1 - x, for it may have lain anywhere between two numbers. Entries that
    are zero in both do not count. None where nothing changed or nothing is left to be counted.

    >>> random = torch.Generator().manual_seed(0)
    >>> before = torch.randn(200, 200, generator=random)
    >>> after = before + 0.003 * torch.randn(200, 200, generator=random)
    >>> found, expected = unchanged_share(before.bfloat16(), after.bfloat16(), torch.bfloat16)
    >>> abs(found - expected) < 0.02
    True
    """
    if before.shape != after.shape:
        return None
    old, new = _sampled(before).double().flatten(), _sampled(after).double().flatten()
    counted = (old != 0) | (new != 0)
    old, new = old[counted], new[counted]
    if not len(old):
        return None
    power = int(spectra.scaled_to_one(torch.stack([old, new]))[1])
    old, new = (spectra.ldexp(values, -power) for values in (old, new))
    largest = torch.maximum(old.abs(), new.abs())
    spacing = 2 * half_ulps(largest, dtype, power)
    change = (new - old).abs()
    size = float(change.square().mean())
    if not size > 0:
        return None
    sizes, shares = np.unique(spacing.numpy(force=True), return_counts=True)
    weights, nodes = shares / shares.sum(), ndtri((np.arange(NODES) + 0.5 + NODES) / (2 * NODES))

    some = slice(None, None, max(1, len(old) // SCALED_ENTRIES))
    ulps = spacing[some].numpy(force=True)
    lengths = largest[some].numpy(force=True) / ulps
    spread = nodes[None, :] / sizes[:, None]

    def normal(deviation: float) -> tuple[float, float]:
        """Return the mean square of the stored change, and the share of entries that stay."""
        squares, stay = _stored_steps(deviation * spread)
        return float(weights @ (squares.mean(1) * sizes**2)), float(weights @ stay.mean(1))

    def scaled(factor: float) -> tuple[float, float]:
        """Return the same for all entries scaled by one plus a factor."""
        squares, stay = _stored_steps(factor * lengths)
        return float((squares * ulps**2).mean()), float(stay.mean())

    widest = 2 * math.sqrt(size) + float(sizes[-1])
    predicted = _fitted(normal, size, widest), _fitted(scaled, size, high=1.0)
    share = float((old == new).double().mean())
    return share, min(predicted, key=lambda one: abs(one - share))


def _stored_steps(steps: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean squares of steps once stored, in spacings, and the shares that do not move."""
    whole = np.floor(steps)
    part = steps - whole
    return (1 - part) * whole**2 + part * (whole + 1) ** 2, np.clip(1 - steps, 0, None)


def _fitted(model: Callable[[float], tuple[float, float]], size: float, high: float) -> float:
    """Return the share that stays under the step whose stored change has this mean square."""
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if model(middle)[0] < size else (low, middle)
    return model((low + high) / 2)[1]
