"""The nearest orthogonal matrix by products alone: Newton and Schulz's iteration, as Muon uses it.

One odd polynomial, 3.4445 x - 4.7750 x^3 + 2.0315 x^5 (Jordan 2024, as in ``torch.optim.Muon``),
is applied several times, to matrices or to their singular values.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

FIRST, THIRD, FIFTH = 3.4445, -4.7750, 2.0315  # the coefficients of x, x^3 and x^5


def orthogonalized(
    stack: Float[Tensor, "*stack out in"], steps: int = 5
) -> Float[Tensor, "*stack out in"]:
    """Nearly the same singular vectors with singular values near one, by products alone.

    A matrix is divided by its Frobenius norm first, so every singular value starts below one.
    :func:`newton_schulz` tells where each one goes: most end between 0.68 and 1.21.

    >>> near = orthogonalized(torch.diag(torch.tensor([9.0, 3.0, 1.0])))
    >>> bool(((near.diagonal() - 1).abs() < 0.35).all())
    True
    """
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = FIRST * x + (FIFTH * gram @ gram + THIRD * gram) @ x
    return x if wide is stack else x.mT


def newton_schulz(values: Tensor, steps: int = 5) -> Tensor:
    """Muon's orthogonal factor, value by value: x <- 3.4445 x - 4.7750 x^3 + 2.0315 x^5.

    From the singular values of G / |G|_F. Five steps bring those above 1/600 to 0.68 ... 1.21; what
    is smaller grows by 3.4445^5 = 485 only and stays behind: Muon's steps are not blind to kappa.

    >>> newton_schulz(torch.tensor([0.5, 0.05, 0.005, 1e-5]))
    tensor([0.7654, 0.7581, 1.1544, 0.0048])
    """
    for _ in range(steps):
        square = values**2
        values = values * (FIRST + square * (FIFTH * square + THIRD))
    return values
