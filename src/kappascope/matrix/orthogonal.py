"""Singular values by products alone: Newton and Schulz's iteration, as Muon uses it, and a cap.

One odd polynomial, 3.4445 x - 4.7750 x^3 + 2.0315 x^5 (Jordan 2024, as in ``torch.optim.Muon``),
is applied several times, to matrices or to their singular values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import tracking

Coefficients: TypeAlias = tuple[float, float, float]
MUON: Coefficients = (3.4445, -4.7750, 2.0315)  # the coefficients of x, x^3 and x^5


def orthogonalized(
    stack: Float[Tensor, "*stack out in"], schedule: Sequence[Coefficients] = (MUON,) * 5
) -> Float[Tensor, "*stack out in"]:
    """Nearly the same singular vectors with singular values near one, by products alone.

    A matrix is divided by its Frobenius norm first, so every singular value starts below one; then
    the schedule has the coefficients of every step. :func:`newton_schulz` tells where each value
    goes by Muon's: most end between 0.68 and 1.21.

    >>> near = orthogonalized(torch.diag(torch.tensor([9.0, 3.0, 1.0])))
    >>> bool(((near.diagonal() - 1).abs() < 0.35).all())
    True
    """
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for first, third, fifth in schedule:
        gram = x @ x.mT
        x = first * x + (fifth * gram @ gram + third * gram) @ x
    return x if wide is stack else x.mT


def newton_schulz(values: Tensor, steps: int = 5) -> Tensor:
    """Muon's orthogonal factor, value by value: x <- 3.4445 x - 4.7750 x^3 + 2.0315 x^5.

    From the singular values of G / |G|_F. Five steps bring those above 1/600 to 0.68 ... 1.21; what
    is smaller grows by 3.4445^5 = 485 only and stays behind: Muon's steps are not blind to kappa.

    >>> newton_schulz(torch.tensor([0.5, 0.05, 0.005, 1e-5]))
    tensor([0.7654, 0.7581, 1.1544, 0.0048])
    """
    first, third, fifth = MUON
    for _ in range(steps):
        square = values**2
        values = values * (first + square * (fifth * square + third))
    return values


LEAST_SOFT_PART = 0.8  # of the largest value, left by one soft cap; below 0.766 it is not monotone


def softly_capped(
    stack: Float[Tensor, "*stack out in"], limit: Float[Tensor, "*stack"]
) -> Float[Tensor, "*stack out in"]:
    """Bring the largest singular value down to a limit by products alone, smaller ones hardly.

    Every value goes through ``x - a x^3`` and then ``x + a x^3``, together ``x - 3 a^2 x^5`` and
    higher terms (Newhouse et al. 2025), with the a that takes the largest to the limit, which power
    iteration knows to about a millionth. Far above it that is done several times. What is within
    the limit stays as it is.

    >>> softly_capped(torch.diag(torch.tensor([1.1, 0.1])), torch.tensor(1.0))
    tensor([[1.0000, 0.0000],
            [0.0000, 0.1000]])
    """
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    _, largest, _ = tracking.largest_triplet(wide, {})
    limit = limit.to(largest)
    while bool((largest > limit).any()):
        goal = torch.maximum(limit, LEAST_SOFT_PART * largest)
        strength = _soft_strength((goal / largest).double()) / largest.double().square()
        a = torch.where(largest > limit, strength, 0.0).to(wide)[..., None, None]
        for sign in (-1, 1):
            wide = wide + sign * a * ((wide @ wide.mT) @ wide)
        largest = torch.where(largest > limit, goal, largest)
    return wide if stack.shape[-2] <= stack.shape[-1] else wide.mT


def _soft_strength(part: Float[Tensor, "*stack"]) -> Float[Tensor, "*stack"]:
    """The a at which one goes to ``part`` through ``x - a x^3`` and ``x + a x^3``, by bisection."""
    low, high = torch.zeros_like(part), torch.full_like(part, 1 / 3)
    for _ in range(60):  # halvings: down to float64's rounding
        a = (low + high) / 2
        first = 1 - a
        too_far = first + a * first**3 < part
        low, high = torch.where(too_far, low, a), torch.where(too_far, a, high)
    return low
