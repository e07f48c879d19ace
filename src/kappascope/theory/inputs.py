"""How plain SGD relaxes when inputs are not white: x ~ N(0, C), a rate for every direction.

In the basis of C's eigenvectors, with eigenvalues c_j and D = W_t - W*,

    E[D] = (W_0 - W*) diag(1 - h c_j)^t,
    m_j <- ((1 - h c_j)^2 + h^2 c_j^2 / B) m_j + h^2 c_j (sum_k c_k m_k + out noise^2) / B

for m_j = E|D v_j|^2, both exact. Directions with a small c_j stay as they started:
these components really are unlearned, for 1 / (h c_j) steps, whatever the size of the matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from kappascope.theory.relaxation import COARSE, FEWEST, Normal

Array = NDArray[np.float64]


def steps_to_learn(
    eigenvalues: ArrayLike, share: float = 0.01, learning_rate: float = 0.01
) -> Array:
    """Count steps until ``share`` of a direction's error is left: log(share) / log|1 - h c_j|.

    >>> steps_to_learn([1.0, 0.1, 0.01]).round()
    array([   458.,   4603.,  46049.])
    """
    gain = learning_rate * np.asarray(eigenvalues, dtype=float)
    with np.errstate(divide="ignore"):
        # beyond a gain of 1 every step overshoots, and from 2 on it ends as far away, or farther
        rate = np.log1p(-np.minimum(gain, 2 - gain))
        return np.asarray(np.where(rate < 0, math.log(share) / rate, math.inf))


@dataclass(frozen=True, eq=False)
class Directions:
    """SGD on a matrix whose inputs have this covariance; moments exact, draws from the model.

    It is a :class:`kappascope.theory.relaxation.WeightModel`: ``predicted_weights(..., model=...)``
    draws what SGD makes of a start, and ``kappascope.errors`` of it predicts the error of every
    component.

    >>> two = Directions(torch.diag(torch.tensor([1.0, 0.01])))
    >>> two.mean_weight(torch.eye(2), torch.zeros(2, 2), step=200).diagonal()
    tensor([0.8660, 0.0198], dtype=torch.float64)
    >>> two.eigenvalues
    tensor([0.0100, 1.0000], dtype=torch.float64)
    """

    covariance: Float[Tensor, "in in"]
    learning_rate: float = 0.01
    rows: int = 64
    noise: float = 0.01

    def __post_init__(self) -> None:
        c = self.covariance
        if c.ndim != 2 or c.shape[0] != c.shape[1] or not torch.allclose(c, c.mT):
            raise ValueError(f"expected a symmetric covariance, got shape {tuple(c.shape)}")
        if self.eigenvalues[0] < -1e-6 * self.eigenvalues[-1]:
            least = float(self.eigenvalues[0])
            raise ValueError(f"a covariance has no negative eigenvalue, but this one has {least:g}")

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.covariance.double())
        return values, vectors

    @property
    def eigenvalues(self) -> Float[Tensor, " in"]:
        """The c_j, smallest first."""
        return self._basis[0]

    def mean_weight(
        self, target: Tensor, start: Tensor, step: float
    ) -> Float[Tensor, "*stack out in"]:
        """E[W_t] = W* + (W_0 - W*) (I - h C)^t."""
        c, v = self._basis
        left = (start - target).double() @ v * (1 - self.learning_rate * c) ** step
        return target + left @ v.mT

    def squares(self, target: Tensor, start: Tensor, step: int) -> Float[Tensor, "*stack in"]:
        """Return the m_j = E|(W_t - W*) v_j|^2 of every direction, by their recursion.

        >>> one = Directions(torch.eye(1), noise=0.0)  # (1-h)^2 + 2 h^2 / B a step, as `Relaxation`
        >>> one.squares(torch.ones(1, 1), torch.zeros(1, 1), step=1)
        tensor([0.9801], dtype=torch.float64)
        """
        (c, v), h = self._basis, self.learning_rate
        m = ((start - target).double() @ v).square().sum(-2)
        noise = target.shape[-2] * self.noise**2
        keep = (1 - h * c) ** 2 + (h * c) ** 2 / self.rows
        for _ in range(step):
            common = ((c * m).sum(-1, keepdim=True) + noise) / self.rows
            m = keep * m + h**2 * c * common
        return m

    def overall_error(self, target: Tensor, start: Tensor, step: int) -> Float[Tensor, "*stack"]:
        """Return the root of E|W_t - W*|^2 / |W*|^2, exactly."""
        square = self.squares(target, start, step).sum(-1)
        return (square / target.double().square().sum((-2, -1))).sqrt()

    def factors(self, span: float) -> int:
        """Count factors in which the batches' noise, h^2 c_max tr(C) / B a step, stays small.

        >>> Directions(torch.eye(512)).factors(1000)
        8
        """
        c, h = self.eigenvalues, self.learning_rate
        growth = h**2 * float(c[-1] * c.sum()) / self.rows
        return max(FEWEST, math.ceil(span * growth / COARSE))

    def factor(self, span: float, normal: Normal) -> Float[Tensor, "*trials in in"]:
        """Draw one coarse factor: its mean, and its fluctuation to first order in the batches'.

        With a_i = 1 - h c_i, entry (i, j) has in the eigenbasis the variance
        (h^2 c_i c_j / B) (a_i^2k - a_j^2k) / (a_i^2 - a_j^2) over k steps, and the covariance
        (h^2 c_i c_j / B) k (a_i a_j)^(k-1) with entry (j, i).
        """
        c, v = self._basis
        a = 1 - self.learning_rate * c
        each = self.learning_rate**2 / self.rows * torch.outer(c, c)
        both = each * span * torch.outer(a, a) ** (span - 1)
        variance = each * _divided_difference(a.square(), span)
        z = normal(len(c), len(c))
        even = ((variance + both).clamp(min=0) / 4).sqrt() * (z + z.mT)
        odd = ((variance - both).clamp(min=0) / 4).sqrt() * (z - z.mT)
        return v @ (torch.diag(a**span) + even + odd) @ v.mT

    def advance(self, left: Tensor, span: float, normal: Normal) -> Tensor:
        """Return the error after one factor, and the label noise that joins meanwhile."""
        (c, v), h = self._basis, self.learning_rate
        left = left.double() @ self.factor(span, normal)
        keep = (1 - h * c) ** 2
        variance = (h * self.noise) ** 2 * c / self.rows * _geometric(keep, span)
        return left + (variance.sqrt() * normal(*left.shape[-2:])) @ v.mT


def _divided_difference(x: Float[Tensor, " n"], power: float) -> Float[Tensor, "n n"]:
    """(x_i^k - x_j^k) / (x_i - x_j), and k x^(k-1) where the two are (nearly) one."""
    gap = x[:, None] - x
    near = gap.abs() <= 1e-7 * torch.maximum(x[:, None], x)
    middle = (x[:, None] + x) / 2
    exact = (x[:, None] ** power - x**power) / torch.where(near, 1.0, gap)
    return torch.where(near, power * middle ** (power - 1), exact)


def _geometric(x: Float[Tensor, " n"], power: float) -> Float[Tensor, " n"]:
    """1 + x + ... + x^(k-1)."""
    return torch.where(x == 1, power, (1 - x**power) / torch.where(x == 1, 1.0, 1 - x))
