"""The norm of a convolution as a map of signals, beside that of its kernel as a flat matrix.

A convolution without an end multiplies each frequency of a signal by a matrix, the kernel's Fourier
transform there, and its norm is the largest norm of these matrices. With a stride s the s
frequencies that fold into one act together. A finite signal, padded with zeros, is a part of
an endless one: its norm is at most that, and nears it as signals get longer.

Norms are taken at a grid of frequencies. Between them a trigonometric polynomial of degree d, known
at n equidistant points, is at most 1/cos(pi d / n) times its largest value there (Ehlich and
Zeller 1964), which gives the upper end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import spectra

MOST_OPERATIONS = 2e9  # about a second; beyond that the norm is left out
GRIDS = (8, 4, 2)  # points for each tap: the upper end is 1.02, 1.08 or 1.41 times the lower


@dataclass(frozen=True)
class OperatorNorm:
    """The norm of a convolution over endless signals lies between two numbers.

    >>> OperatorNorm(1.0, 1.02, (1,)).stride
    (1,)
    """

    low: float
    high: float
    stride: tuple[int, ...]


def operator_norm(
    kernel: Float[Tensor, "out in *taps"],
    stride: Sequence[int] | int = 1,
    groups: int = 1,
    most_operations: float = MOST_OPERATIONS,
) -> OperatorNorm | None:
    """Bound the norm of a convolution; None if that would take too long.

    >>> blur = torch.ones(1, 1, 3) / 3
    >>> round(operator_norm(blur).low, 6), torch.linalg.matrix_norm(blur.flatten(1), 2).item()
    (1.0, 0.577...)
    """
    taps = tuple(kernel.shape[2:])
    strides = (stride,) * len(taps) if isinstance(stride, int) else tuple(stride)
    outputs, inputs = kernel.shape[0] // groups, kernel.shape[1]
    small, large = sorted((outputs, inputs * math.prod(strides)))
    for points in GRIDS:
        grid = [_points(k, s, points) for k, s in zip(taps, strides, strict=True)]
        folded = math.prod(n // s for n, s in zip(grid, strides, strict=True)) * groups
        if folded * (8 * small * small * large + 30 * small**3) <= most_operations:
            break
    else:
        return None
    scaled, exponent = spectra.scaled_to_one(kernel.flatten(1))
    weight = scaled.unflatten(0, (groups, outputs)).unflatten(-1, (inputs, *taps))
    dimensions = tuple(range(-len(taps), 0))
    spectrum = torch.fft.fftn(weight, s=grid, dim=dimensions)  # groups, out, in, *grid
    largest = max(
        _largest_norm(_folded(spectrum[group], strides)) for group in range(groups)
    ) / math.sqrt(math.prod(strides))
    excess = math.prod(
        1 / math.cos(math.pi * (k - 1) / 2 / n) for k, n in zip(taps, grid, strict=True)
    )
    low = spectra.unscaled(largest, int(exponent))
    high = spectra.unscaled(largest * excess * (1 + 1e-12), int(exponent))
    return None if low is None or high is None else OperatorNorm(low, high, strides)


def _points(taps: int, stride: int, points: int) -> int:
    """Return how many frequencies are looked at along a dimension, a multiple of the stride."""
    return -(-max(1, points * (taps - 1)) // stride) * stride


def _folded(spectrum: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the matrices of frequencies that a stride folds together, (frequencies, out, all)."""
    grid = spectrum.shape[2:]
    aliases = []
    for shift in product(*map(range, strides)):
        part = spectrum
        for dimension, (n, s, k) in enumerate(zip(grid, strides, shift, strict=True)):
            part = part.narrow(2 + dimension, k * (n // s), n // s)
        aliases.append(part.flatten(2))
    return torch.cat(aliases, 1).permute(2, 0, 1)


def _largest_norm(matrices: Tensor) -> float:
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.mH
    gram = matrices @ matrices.mH
    return float(torch.linalg.eigvalsh(gram)[:, -1].max().clamp(min=0).sqrt())
