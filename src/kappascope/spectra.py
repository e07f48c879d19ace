"""Singular values and extremes of a dense matrix (being written)."""

import torch
from torch import Tensor


def singular_values(matrix: Tensor) -> Tensor:
    """All singular values of each matrix of a stack, largest first, in float64."""
    return torch.linalg.svdvals(matrix.double())
