"""How plain SGD relaxes towards a matrix, for inputs x ~ N(0, I) and labels y = W* x + noise e.

Exactly, with S_k = X_k' X_k / B of batch k (B rows) and learning rate h,

    W_t - W* = (W_0 - W*) P + N,    P = (I - h S_1) (I - h S_2) ... (I - h S_t),

where P is shared by all rows of W and N is what label noise has left. S_k is a Wishart matrix, so

    E[P' A P] = L^t(A),    L(A) = (1-h)^2 A + h^2 (A' + tr(A) I) / B        (any matrix A).

The tractable model of P. A step of the form F = (1-h) I + h H / sqrt(B), with H symmetric and
Gaussian, variance 1 off the diagonal and 2 on it, has the same L; so a product of them has the
first and second moments of P at every step. Such a product tends to a diffusion that a few coarse
factors of the same form follow as well as a thousand fine ones. Their number depends on
h^2 t d / B, the size of P's fluctuations, and not on t: `Relaxation.factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

Normal = Callable[..., Tensor]
"""Draws independent standard normal numbers, ``normal(*shape)``, with a leading axis of trials."""


class WeightModel(Protocol):
    """What a walk asks of a model of the batches.

    >>> model: WeightModel = Relaxation(size=32)
    >>> model.factors(200) > 1
    True
    """

    def factors(self, span: float) -> int:
        """Count the coarse factors that stand for the batches of so many steps."""

    def advance(self, left: Tensor, span: float, normal: Normal) -> Tensor:
        """Advance the error by one factor, with the label noise that joins meanwhile."""


COARSE = 0.1  # the growth of E|P|^2 / |E P|^2 that one factor may carry; halving it changes nothing
FEWEST = 4  # factors between two looks, also where P hardly fluctuates: they carry the label noise


@dataclass(frozen=True)
class Relaxation:
    """SGD on a matrix with ``size`` inputs: moments in closed form, and draws from the model.

    >>> setting = Relaxation(size=128)
    >>> round(setting.mean(200), 4)  # the "0.13" of every norm's error is unfinished relaxation
    0.134
    >>> round(setting.mean_square(200) ** 0.5, 4)
    0.1368
    """

    size: int
    learning_rate: float = 0.01
    rows: int = 64
    noise: float = 0.01

    def __post_init__(self) -> None:
        if min(self.size, self.rows) < 1 or not self.learning_rate > 0 or self.noise < 0:
            raise ValueError(f"expected size, rows, learning_rate > 0 and noise >= 0, got {self}")

    @property
    def _square(self) -> float:
        """L(I) = ((1-h)^2 + h^2 (d+1) / B) I: what a step leaves of the squared error."""
        h = self.learning_rate
        return (1 - h) ** 2 + h**2 * (self.size + 1) / self.rows

    @property
    def converges(self) -> bool:
        """Whether the mean square falls: h (1 + (d+1) / B) < 2.

        >>> [Relaxation(512, learning_rate=h).converges for h in (0.2, 0.3)]
        [True, False]
        """
        return self._square < 1

    @property
    def reach(self) -> float:
        """The largest eigenvalue of h S_k, h (1 + sqrt(d/B))^2: how far one batch can carry.

        The moments hold for any; the Gaussian model needs it below one. Beyond, the batches' third
        moments matter: at 1.25 the model's early kappa errors are a third of the true ones.

        >>> round(Relaxation(512).reach, 2), round(Relaxation(16, 0.05, rows=1).reach, 2)
        (0.15, 1.25)
        """
        return self.learning_rate * (1 + math.sqrt(self.size / self.rows)) ** 2

    def mean(self, step: float) -> float:
        """E[P] = (1-h)^t I: the share of the initial error that is left on average.

        >>> round(Relaxation(64).mean(1000), 6)
        4.3e-05
        """
        return (1 - self.learning_rate) ** step

    def mean_square(self, step: float) -> float:
        """E[P P'] = q^t I with q = (1-h)^2 + h^2 (d+1) / B; it exceeds the mean's square.

        >>> round(Relaxation(512).mean_square(1000) / Relaxation(512).mean(1000) ** 2, 2)
        2.26
        """
        return self._square**step

    def spread(self, step: float) -> tuple[float, float]:
        """Return the deviations of the entries of P off the diagonal and on it.

        L multiplies I by q and the other symmetric matrices by r = (1-h)^2 + h^2 / B, hence

            Var P_ij = (q^t - r^t) / d,    Var P_ii = (q^t - r^t) / d + r^t - (1-h)^(2t).

        >>> off, on = Relaxation(64).spread(1)  # one step: h / sqrt(B), and sqrt(2) times that
        >>> round(off, 8), round(on, 8)
        (0.00125, 0.00176777)
        """
        mean = self.mean(step) ** 2
        other = (self.mean(1) ** 2 + self.learning_rate**2 / self.rows) ** step
        off = (self.mean_square(step) - other) / self.size
        return math.sqrt(off), math.sqrt(off + other - mean)

    def noise_variance(self, step: float) -> float:
        """Return the mean square of an entry of N: h^2 noise^2 / B times (1 - q^t) / (1 - q).

        >>> f"{Relaxation(64).noise_variance(200) ** 0.5:.2e}"
        '8.80e-05'
        """
        each, q = (self.learning_rate * self.noise) ** 2 / self.rows, self._square
        return each * (step if q == 1 else (1 - q**step) / (1 - q))

    @property
    def noise_floor(self) -> float:
        """What an entry's error ends at: about noise sqrt(h / (2 B)); infinite without convergence.

        >>> f"{Relaxation(64).noise_floor:.2e}"
        '8.88e-05'
        """
        each, q = (self.learning_rate * self.noise) ** 2 / self.rows, self._square
        return math.sqrt(each / (1 - q)) if self.converges else math.inf

    def overall_error(
        self,
        target: Float[Tensor, "*stack out in"],
        start: Float[Tensor, "*stack out in"],
        step: float,
    ) -> Float[Tensor, "*stack"]:
        """Take the root of E|W_t - W*|^2 / |W*|^2: q^t |W_0 - W*|^2 plus the noise's entries.

        >>> eye = torch.eye(64, dtype=torch.float64)
        >>> Relaxation(64).overall_error(eye, 0 * eye, step=200)
        tensor(0.1354, dtype=torch.float64)
        """
        noise = self.noise_variance(step) * target.shape[-1] * target.shape[-2]
        square = self.mean_square(step) * (start - target).square().sum((-2, -1)) + noise
        return (square / target.square().sum((-2, -1))).sqrt()

    def factors(self, span: float) -> int:
        """Count the coarse factors that stand for the batches of so many steps.

        >>> Relaxation(32).factors(500), Relaxation(512).factors(500), Relaxation(2048).factors(500)
        (4, 5, 17)
        """
        growth = math.log(self._square / self.mean(1) ** 2)
        return max(FEWEST, math.ceil(span * growth / COARSE))

    def factor(self, span: float, normal: Normal) -> Float[Tensor, "*trials size size"]:
        """Draw one coarse factor F = a (I + s H) for so many steps, a = (1-h)^span.

        s is such that E[F F'] = q^span I; H = (Z + Z') / sqrt(2) with normal entries Z.

        >>> draw = torch.Generator().manual_seed(0)
        >>> f = Relaxation(3).factor(20, lambda *shape: torch.randn(1, *shape, generator=draw))
        >>> f.round(decimals=3)
        tensor([[[ 0.8280,  0.0010, -0.0060],
                 [ 0.0010,  0.8110, -0.0020],
                 [-0.0060, -0.0020,  0.8130]]])
        """
        z = normal(self.size, self.size)
        a = self.mean(span)
        s = math.sqrt((self.mean_square(span) / a**2 - 1) / (self.size + 1))
        factor = (z + z.mT).mul_(a * s / math.sqrt(2))
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor

    def advance(self, left: Tensor, span: float, normal: Normal) -> Tensor:
        """Advance the error by one factor, with the label noise that joins meanwhile."""
        left = left @ self.factor(span, normal)
        deviation = math.sqrt(self.noise_variance(span))
        return torch.add(left, normal(*left.shape[-2:]), alpha=deviation) if deviation else left


def walk(
    model: WeightModel, left: Float[Tensor, "trials out in"], steps: Sequence[float], normal: Normal
) -> Iterator[Float[Tensor, "trials out in"]]:
    """Draw W_t - W* at rising ``steps``, from ``left`` = W_0 - W*.

    A few matrix products instead of hundreds of batches.

    >>> quiet = Relaxation(2, learning_rate=0.5, rows=10**9, noise=0.0)  # full gradients
    >>> path = walk(quiet, torch.eye(2)[None], [1, 2, 4], normal=torch.zeros)
    >>> [round(float(left[0, 0, 0]), 4) for left in path]
    [0.5, 0.25, 0.0625]
    """
    for before, after in pairwise((0.0, *steps)):
        count = model.factors(after - before)
        span = (after - before) / count
        for _ in range(count):
            left = model.advance(left, span, normal)
        yield left


def predicted_weights(
    target: Float[Tensor, "trials out in"],
    start: Float[Tensor, "trials out in"],
    steps: Sequence[float],
    normal: Normal,
    model: WeightModel | None = None,
) -> Iterator[Float[Tensor, "trials out in"]]:
    """Draw what SGD makes of ``start`` by each of the steps: no batch is seen.

    ``model`` is the paper's :class:`Relaxation` unless given. ``kappascope.errors`` of the draws
    predicts the error of every component, ``statistics.summary`` of those its median and quartiles.

    >>> from kappascope import errors
    >>> from kappascope.lab.tasks import Own, heterogeneous, start
    >>> random = Own(range(400), key="an example").random()
    >>> target, begin = heterogeneous(random, 32), start(random, 32)
    >>> weight, = predicted_weights(target, begin, [200], random.normal)
    >>> found = errors(weight, target)
    >>> found["row_norms"].median(), found["condition_number"].median()  # paper: 0.13 and 0.27
    (tensor(0.13..., dtype=torch.float64), tensor(0.1..., dtype=torch.float64))
    """
    model = model or Relaxation(target.shape[-1])
    return (target + left for left in walk(model, start - target, steps, normal))
