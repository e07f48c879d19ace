"""The error of the condition number: its law in closed form, and a proven bound.

The law. Kappa does not see a common factor, so W_t = (1-p) (W* + Q), p = (1-h)^t, has the kappa of
W* + Q. Q is what is left of the start and the label noise, nearly independent normal entries. To
first order it moves the smallest singular value by u' Q v, a normal number of the deviation tau of
Q's entries, and a singular value has no sign:

    sigma_min -> |sigma_min + tau g|,    sigma_min = y s / d,    P(y < x) = 1 - exp(-x - x^2 / 2)

(Edelman 1988; s is the target's `hard_edge_scale`). Only r = tau d / s, the `disturbance`, is left:

    kappa / kappa* = 1 / |1 + r g / y|.

The bound. By Weyl's inequality no singular value moves by more than the norm of the disturbance.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.theory.relaxation import Relaxation

Array = NDArray[np.float64]


def hard_edge_scale(row_deviations: ArrayLike) -> float:
    """Return s of sigma_min = y s / d for diag(a) Z / sqrt(d), Z normal: s^2 = 1 / mean(1 / a^2).

    The density of singular values at 0 is d / (pi s), from the Dyson equation of these variances.

    >>> hard_edge_scale([1.0, 1.0])
    1.0
    >>> z = np.random.default_rng(0).standard_normal(100_000)
    >>> round(hard_edge_scale(2**0.5 * np.exp(0.5 * z)), 2)  # the paper's targets
    1.1
    """
    return float(np.mean(np.asarray(row_deviations, dtype=float) ** -2.0) ** -0.5)


HETEROGENEOUS = math.sqrt(2) * math.exp(-1 / 4)  # hard_edge_scale of the paper's targets


def smallest_value_quantile(probability: ArrayLike) -> Array:
    """Return the y = sigma_min d / s of a large square random matrix: sqrt(1 - 2 log(1 - P)) - 1.

    Its density is 1 at y = 0: nothing keeps a singular value away from zero.

    >>> round(float(smallest_value_quantile(0.5)), 4)
    0.5448
    """
    return np.asarray(np.sqrt(1 - 2 * np.log1p(-np.asarray(probability, dtype=float))) - 1)


def disturbance(
    relaxation: Relaxation, step: float, start: float = 0.1, scale: float = HETEROGENEOUS
) -> float:
    """Return the r = tau d / s, tau^2 = ((2/d) start^2 q^t + noise variance) / (1 - p)^2.

    The start's part grows as sqrt(d), the noise's as d.

    >>> [round(disturbance(Relaxation(d), step=200), 3) for d in (32, 128, 512)]
    [0.113, 0.23, 0.49]
    >>> [round(disturbance(Relaxation(d), step=5000), 5) for d in (32, 128, 512)]  # the noise floor
    [0.00258, 0.01035, 0.04205]
    """
    d = relaxation.size
    rest = 2 / d * start**2 * relaxation.mean_square(step) + relaxation.noise_variance(step)
    return math.sqrt(rest) / (1 - relaxation.mean(step)) * d / scale


def kappa_error_cdf(error: ArrayLike, disturbance: float) -> Array:
    """P(|kappa / kappa* - 1| < x) = P(1 / (1+x) < |1 + r g / y| < 1 / (1-x)).

    Good for r up to about 1. Beyond, the other singular values matter: the formula goes on to 1,
    while two unrelated random matrices differ by about 0.7.

    >>> round(float(kappa_error_cdf(0.14, disturbance=0.113)), 2)
    0.51
    """
    x = np.asarray(error, dtype=float)[..., None]
    with np.errstate(divide="ignore"):
        near, far = 1 / (1 + x), np.where(x < 1, 1 / np.abs(1 - x), np.inf)
    ends = [ndtr((end - 1) * _smallest_values() / disturbance) for end in (near, far, -near, -far)]
    return np.asarray((ends[1] - ends[0] + ends[2] - ends[3]).mean(-1))


def kappa_error_quantile(probability: float, disturbance: float) -> float:
    """Return the error of kappa that is not exceeded with this probability.

    Its median is 1.23 r for small r, whatever the reason for r.

    >>> round(kappa_error_quantile(0.5, disturbance=1e-3) / 1e-3, 2)
    1.23
    >>> r = disturbance(Relaxation(32), step=200)
    >>> round(kappa_error_quantile(0.5, r), 2)  # measured: 0.13; the paper's mean of 15: 0.27
    0.14
    """
    low, high = -40.0, 40.0  # in logs: from nothing to anything
    for _ in range(60):
        middle = (low + high) / 2
        below = kappa_error_cdf(math.exp(middle), disturbance) < probability
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)


def kappa_error_tail(disturbance: float) -> float:
    """Return the c of P(error > x) -> c / x, 2 E[phi(y/r) y/r]: a tail index of 1, and no mean.

    The learned sigma_min has a positive density at 0, and kappa is its reciprocal.

    >>> round(kappa_error_tail(0.113), 3)  # d = 32 at step 200
    0.088
    >>> round(float(1 - kappa_error_cdf(1e3, 0.113)) * 1e3, 3)
    0.088
    """
    z = _smallest_values() / disturbance
    return float(np.mean(2 * z * np.exp(-(z**2) / 2)) / math.sqrt(2 * math.pi))


@cache
def _smallest_values() -> Array:
    """Equally likely values of y; 4000 give medians to three digits."""
    return smallest_value_quantile((np.arange(4000) + 0.5) / 4000)


def floor_ratio(size: int, row_deviations: ArrayLike | None = None) -> float:
    """Return kappa's median error over the norms' at the noise floor: 1.23 d sqrt(m(a^2) m(a^-2)).

    There every entry is off by about the same f, whatever noise, rate and batch make of it. Then
    row (and column) norms as a vector are off by f sqrt(d) / |W*|_F = f / sqrt(m(a^2)), m a mean
    over rows of deviation a_i / sqrt(d), and kappa by 1.23 f d / s, s^2 = 1 / m(a^-2). For the
    paper's targets, which have log-normal a_i, the root is e^(1/2).

    >>> [round(floor_ratio(d)) for d in (32, 64, 128)]  # the paper prints 250 for d = 128
    [65, 130, 260]
    >>> round(floor_ratio(100, row_deviations=[1.0, 1.0]))
    123
    """
    if row_deviations is None:
        spread = math.exp(1 / 2)  # sqrt(E exp(z) E exp(-z)) of normal z
    else:
        squares = np.asarray(row_deviations, dtype=float) ** 2
        spread = math.sqrt(float(np.mean(squares) * np.mean(1 / squares)))
    small = 1e-6  # of a disturbance so small that the median is proportional to it
    return kappa_error_quantile(0.5, small) / small * size * spread


def weyl_bound(
    disturbance: Tensor | float, largest: Tensor | float, smallest: Tensor | float
) -> Float[Tensor, "*stack"]:
    """|log kappa - log kappa*| <= log((1 + e / sigma_1) / (1 - e / sigma_min)), if e < sigma_min.

    For any W = c (W* + D), c > 0, with the norm e of D: every singular value of W* + D lies within
    e of that of W* (Weyl). Infinite for a larger e: then W may be singular.

    >>> weyl_bound(0.1, largest=2.0, smallest=0.5)
    tensor(0.2719)
    """
    e, first, last = (torch.as_tensor(value) for value in (disturbance, largest, smallest))
    room = (1 - e / last).clamp(min=0)
    return torch.log1p(e / first) - room.log()


def log_kappa_bound(
    relaxation: Relaxation,
    target: Float[Tensor, "*stack out in"],
    start: Float[Tensor, "*stack out in"],
    step: float,
    risk: float = 0.05,
) -> Float[Tensor, "*stack"]:
    """Bound |log kappa_t - log kappa*|, which exceeds it with probability ``risk`` at most.

    `weyl_bound` with e = (p |W_0| + sqrt(2 (q^t - p^2) / risk) |W_0 - W*|_F + n) / (1 - p), where
    n = noise sqrt(h / (B (2 - h s))) (sqrt(out) + sqrt(in) + sqrt(2 log(4 / risk))) and
    s = (1 + sqrt(in / B) + sqrt(2 log(4 t / risk) / B))^2; docs/theory.md has the proof. The first
    two terms fall geometrically, by sqrt(q) a step; the last one is the floor.

    >>> target, start = torch.eye(16) * 2, torch.zeros(16, 16)
    >>> bounds = [log_kappa_bound(Relaxation(16), target, start, t) for t in (200, 400, 2000)]
    >>> [round(float(bound), 4) for bound in bounds]
    [0.5952, 0.0976, 0.001]
    """
    r, p = relaxation, relaxation.mean(step)
    spread = math.sqrt(2 * (r.mean_square(step) - p**2) / risk)
    left = torch.linalg.matrix_norm(start - target)
    first = spectra.singular_values(start)[..., 0]
    s = spectra.singular_values(target)
    e = (p * first + spread * left + _noise_norm(r, target.shape, step, risk)) / (1 - p)
    return weyl_bound(e, s[..., 0], s[..., -1])


def direction_bound(
    relaxation: Relaxation,
    target: Float[Tensor, "*stack out in"],
    start: Float[Tensor, "*stack out in"],
    step: float,
    risk: float = 0.05,
) -> Float[Tensor, "*stack"]:
    """Bound u' (W_t / (1-p) - W*) v / sigma_min: what sigma_min is off by, to first order.

    u and v are the target's last singular vectors. With a = (W_0 - W*)' u the form has the mean
    p u' W_0 v / (1-p) and, times (1-p)^2, exactly the variance

        V = (q^t - r^t) |a|^2 / d + (r^t - p^2) (a' v)^2 + E N_ij^2,    r = (1-h)^2 + h^2 / B;

    by Chebyshev's inequality it exceeds (p |u' W_0 v| + sqrt(V / risk)) / (1-p) in magnitude with
    probability ``risk`` at most. Beyond first order sigma_min moves by about |e|^2 / sigma_(d-1)
    more, e being the rest of W_t / (1-p) - W* along u or v; docs/theory.md says how.

    >>> target, start = torch.eye(16) * 2, torch.zeros(16, 16)
    >>> bounds = [direction_bound(Relaxation(16), target, start, t) for t in (200, 400, 2000)]
    >>> [f"{float(bound):.0e}" for bound in bounds]
    ['2e-02', '3e-03', '2e-04']
    """
    r, p = relaxation, relaxation.mean(step)
    u, s, vt = spectra.decomposition(target)
    last_u, last_v = u[..., :, -1], vt[..., -1, :]
    a = torch.einsum("...oi,...o->...i", (start - target).to(u), last_u)
    along = (a * last_v).sum(-1).square()
    other = ((1 - r.learning_rate) ** 2 + r.learning_rate**2 / r.rows) ** step
    variance = (r.mean_square(step) - other) * a.square().sum(-1) / r.size
    variance = variance + (other - p**2) * along + r.noise_variance(step)
    mean = p * torch.einsum("...o,...oi,...i->...", last_u, start.to(u), last_v).abs()
    return (mean + (variance / risk).sqrt()) / ((1 - p) * s[..., -1])


def _noise_norm(relaxation: Relaxation, shape: tuple[int, ...], step: float, risk: float) -> float:
    """Bound the norm of N, which exceeds it with a probability of half the risk at most."""
    (out, inputs), h, rows = shape[-2:], relaxation.learning_rate, relaxation.rows
    largest = 1 + math.sqrt(inputs / rows) + math.sqrt(2 * math.log(4 * step / risk) / rows)
    room = 2 - h * largest**2
    if room <= 0:
        return math.inf
    entry = relaxation.noise * math.sqrt(h / (rows * room))
    return entry * (math.sqrt(out) + math.sqrt(inputs) + math.sqrt(2 * math.log(4 / risk)))
