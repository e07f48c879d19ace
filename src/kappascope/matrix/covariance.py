"""Covariances of rows and columns, and matrices of noise that have them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def covariance_root(covariance: Float[Tensor, "size size"]) -> Float[Tensor, "size size"]:
    """Return the symmetric square root of a covariance, scaled to a mean variance of one.

    >>> covariance_root(torch.diag(torch.tensor([9.0, 1.0]))).diagonal().square()
    tensor([1.8000, 0.2000], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    values = values.clamp(min=0)  # rounding leaves some of them below
    tiny = torch.finfo(torch.float64).tiny
    return (vectors * (values / values.mean().clamp(min=tiny)).sqrt()) @ vectors.mT
