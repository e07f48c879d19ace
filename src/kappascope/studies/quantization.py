"""Rounding to few bits, as the studies of digits and of pretrained checkpoints do it."""

from __future__ import annotations

import torch
from torch import Tensor


def quantized(matrix: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """Round entries to whole multiples of a step, with ``bits`` bits and a sign.

    There is one step for the matrix, or one along ``dim``. It is the largest magnitude over the
    largest integer: symmetric, nothing is clipped.

    >>> quantized(torch.tensor([[-1.0, 0.4, 0.6]]), bits=2)
    tensor([[-1.,  0.,  1.]])
    """
    top = 2 ** (bits - 1) - 1
    largest = matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)
    step = torch.where(largest > 0, largest, 1.0) / top
    return (matrix / step).round() * step
