"""What chance alone gives: closed forms, one function an equation.

A square random matrix is ill-conditioned and a wide one is not, so a condition number means
something only beside what a random matrix of its shape has. With m >= n the two sizes, each less
one half (Ma 2012), the extreme singular values of a Gaussian matrix follow

- the largest: Tracy and Widom's law about sqrt(m) + sqrt(n);
- the smallest: the law of the Bessel hard edge, of order 2 (mn)^(1/4) (sqrt(m) - sqrt(n)). That is
  the difference of the sizes of a nearly square matrix; for a rectangular one it is large, and the
  law has become Tracy and Widom's about sqrt(m) - sqrt(n). One formula serves every shape.

Both laws are Fredholm determinants, nothing is simulated. They are limits, carried to small shapes
by two choices that simulation decided, both said in `_largest`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import airy, jv

Array = NDArray[np.float64]
Values = Array | np.float64  # what NumPy's arithmetic makes of an array without axes

# 24 Gauss-Legendre points on (0, 1) give both determinants to 1e-7: 80 points agree that far.
_POINTS, _WEIGHTS = (np.polynomial.legendre.leggauss(24) + np.array([[1.0], [0.0]])) / 2


def square_limit_cdf(ratio: ArrayLike) -> Array:
    """P(kappa / n < x) of a large square n x n Gaussian matrix: exp(-2/x - 2/x^2), Edelman 1988.

    Its density falls as 2/x^2, so kappa has no mean; log kappa has one, log n + 1.537.

    >>> float(square_limit_cdf(1.0))  # kappa below n is rare
    0.0183...
    """
    x = np.asarray(ratio, dtype=float)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(x <= 0, 0.0, np.exp(-2 / x - 2 / x**2))


def square_limit_quantile(probability: ArrayLike) -> Array:
    """Return the kappa / n that a large square Gaussian matrix stays below with this probability.

    >>> float(square_limit_quantile(0.5))  # the median
    3.671...
    """
    with np.errstate(divide="ignore"):
        root = np.sqrt(1 - 2 * np.log(np.asarray(probability, dtype=float)))
        return np.asarray(2 / (root - 1))


def tail_bounds(condition_number: ArrayLike, rows: int, columns: int) -> tuple[Array, Array]:
    """Bound P(kappa > x), as is proven, from x = max(rows, columns) on; 0 and 1 below.

    Chen & Dongarra 2005: (c d / x)^k / sqrt(2 pi) with k = |rows - columns| + 1, d = max(rows,
    columns) / k and c = 0.245 or 6.414, for two rows and columns or more.

    >>> low, high = tail_bounds(1e6, 100, 100)
    >>> f"{low:.1e} {high:.1e}"
    '9.8e-06 2.6e-04'
    """
    long, short = _long_and_short(rows, columns)
    k = long - short + 1
    x = np.asarray(condition_number, dtype=float)
    reach = long / k / np.maximum(x, long)
    low, high = ((c * reach) ** k / np.sqrt(2 * np.pi) for c in (0.245, 6.414))
    return np.where(x < long, 0.0, low), np.where(x < long, 1.0, np.minimum(high, 1.0))


def tracy_widom_cdf(value: ArrayLike) -> Array:
    """P(TW1 < s) = det(I - K) on (s, oo), K(x, y) = Ai((x + y) / 2) / 2; Ferrari & Spohn 2005.

    The law of the largest eigenvalue of a large real random matrix.

    >>> round(float(tracy_widom_cdf(0.9793)), 4)  # a tabulated quantile
    0.95
    """
    s = np.asarray(value, dtype=float)[..., None]
    length = np.maximum(16.0 - s, 4.0)  # Ai(16) is 4e-20
    x = s + length * _POINTS
    kernel = airy((x[..., :, None] + x[..., None, :]) / 2)[0] / 2
    return np.asarray(np.exp(_log_determinant(kernel, length * _WEIGHTS)))


def hard_edge_log_cdf(value: ArrayLike, order: float) -> Array:
    """Return the log of P(R < r) = 1 - det(I - K) on (0, 1), K(x, y) = r J_order(r sqrt(xy)) / 2.

    R is 2 sqrt(n) sigma_min of a large n x (n + order) Gaussian matrix (Forrester 2006, Bornemann
    2010); order 0 is Edelman's 1 - exp(-r/2 - r^2/8). P goes as r^(order + 1), hence the log.

    >>> round(float(np.exp(hard_edge_log_cdf(2.0, order=0)) + np.exp(-2 / 2 - 4 / 8)), 12)
    1.0
    """
    r = np.asarray(value, dtype=float)[..., None]
    # J_order is nothing 9 order^(1/3) to the left of its turning point: no nodes are spent there
    start = (np.maximum(np.minimum(r, order) - 9 * np.cbrt(order), 0.0) / r) ** 2
    x = start + (1 - start) * _POINTS
    bessel = jv(order, r[..., None] * np.sqrt(x[..., :, None] * x[..., None, :]))
    kernel = r[..., None] / 2 * bessel
    return np.asarray(np.log(-np.expm1(_log_determinant(kernel, (1 - start) * _WEIGHTS))))


def _log_determinant(kernel: Array, weights: Array) -> Array:
    """Return the log of det(I - kernel) by quadrature, Bornemann 2010."""
    root = np.sqrt(weights)
    # from eigenvalues, because log1p keeps the digits of a tiny kernel that I - K would round away
    k = np.linalg.eigvalsh(root[..., :, None] * kernel * root[..., None, :])
    return np.asarray(np.log1p(-np.minimum(k, 1 - np.finfo(float).epsneg)).sum(-1))


@dataclass(frozen=True)
class GaussianNull:
    """The condition number of a random matrix of this shape with independent normal entries.

    Exact for one or two rows (or columns). For more, simulation finds the mean of log kappa within
    0.015 and 0.1 of its spread, and that within 5 %; from eight on within 0.01, 0.05 and 2 %. Far
    out, with three or four rows and many columns, z is too small by up to 0.2 and a tail of 1 %
    too large by a quarter, which accuses nobody. The law depends on the shape alone; it is worked
    out once, in about 0.1 s, and remembered.

    >>> null = GaussianNull(4096, 11008)
    >>> round(null.log_condition_number, 3), round(null.spread, 4)
    (1.414, 0.003)
    >>> round(float(null.z(4.2)))
    7
    >>> round(float(GaussianNull(512, 512).tail(1e6)), 5)  # square: falls only as 2 n / kappa
    0.00102
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        _long_and_short(self.rows, self.columns)

    @property
    def log_condition_number(self) -> float:
        """The expected value of log kappa."""
        return _moments(*_long_and_short(self.rows, self.columns))[0]

    @property
    def spread(self) -> float:
        """Standard deviation of log kappa."""
        return _moments(*_long_and_short(self.rows, self.columns))[1]

    def z(self, condition_number: ArrayLike) -> Array:
        """Count the spreads by which log kappa lies above its expectation.

        Not normal: near-square shapes have a long right tail. `tail` gives the probability.

        >>> float(GaussianNull(1, 9).z(1.0))  # a single row always has kappa 1
        0.0
        """
        excess = np.log(np.asarray(condition_number, dtype=float)) - self.log_condition_number
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(excess == 0, 0.0, excess / self.spread)

    def tail(self, condition_number: ArrayLike) -> Array:
        """P(kappa > x), in the end a power: x^-(|rows - columns| + 1), Chen & Dongarra 2005.

        >>> float(GaussianNull(2, 3).tail(2.0))  # 2 rows: (2x / (1 + x^2))^2
        0.64...
        """
        tail = _tail(*_long_and_short(self.rows, self.columns))
        return np.asarray(tail(np.log(np.asarray(condition_number, dtype=float))))

    def quantile(self, probability: ArrayLike) -> Array:
        """Return the kappa that a random matrix stays below with this probability, less than 1.

        >>> round(float(GaussianNull(5000, 5000).quantile(0.5)) / 5000, 2)  # square_limit_quantile
        3.67
        """
        tail = _tail(*_long_and_short(self.rows, self.columns))
        log_kappa = _solve(tail, 1 - np.asarray(probability, dtype=float), high=700.0)
        return np.asarray(np.exp(log_kappa))


def _long_and_short(rows: int, columns: int) -> tuple[int, int]:
    if min(rows, columns) < 1:
        raise ValueError(f"expected one row and one column at least, got {rows} x {columns}")
    return max(rows, columns), min(rows, columns)


@cache
def _tail(long: int, short: int) -> Callable[[Values], Values]:
    """P(log kappa > x) as a function of x."""
    if short == 1:
        return lambda x: np.where(np.isnan(x), np.nan, np.where(x < 0, 1.0, 0.0))
    if short == 2:  # Edelman 1988: (2 kappa / (1 + kappa^2))^(long - 1), exactly
        return lambda x: (2 / (1 + np.exp(-2 * x.clip(0))) * np.exp(-x.clip(0))) ** (long - 1)
    log_largest, weight = _largest(long - 0.5, short - 0.5)
    log_smallest_cdf = _smallest(long - 0.5, short - 0.5, exponent=long - short + 1)

    def tail(x: Values) -> Array:
        above = np.exp(log_smallest_cdf(log_largest - np.expand_dims(x, -1))) @ weight
        return np.where(x < 0, 1.0, np.minimum(above, 1.0))

    return tail


def _largest(m: float, n: float) -> tuple[Array, Array]:
    """Return the law of log sigma_max as points and weights; m, n are the sizes less one half."""
    s, weight = _tracy_widom()
    edge = np.sqrt(m) + np.sqrt(n)
    scale = np.cbrt(1 / np.sqrt(m) + 1 / np.sqrt(n)) / edge  # of sigma_max^2 / edge^2
    # The cube root of sigma_max^2 is taken as Tracy-Widom, as it makes chi-square normal (Wilson &
    # Hilferty 1931). Of the powers 0 (log), 1/4, 1/3, 1/2 and 1 tried in simulation it did best
    # overall: the spread of sigma_max within 4 % from three rows on, where 1 is 6 % off at 24.
    log_sigma = np.log(edge) + 1.5 * np.log1p(scale * s / 3)
    mean = weight @ log_sigma
    variance = weight @ (log_sigma - mean) ** 2
    # The smallest moves along: log sigma_max and log sigma_min have the covariance 1 / (8 m n)
    # (the Gaussian field of a one-cut ensemble, at its two edges), taken out of the largest here.
    # To leading order the sizes could be whole; less one half they serve three rows better.
    shrink = np.sqrt(1 - 2 / (8 * m * n) / variance)
    return mean + shrink * (log_sigma - mean), weight


@cache
def _tracy_widom() -> tuple[Array, Array]:
    s = np.linspace(-7, 8, 151)  # 1e-7 lies outside
    weight = np.diff(tracy_widom_cdf(s))
    return (s[1:] + s[:-1]) / 2, weight / weight.sum()


def _smallest(m: float, n: float, exponent: int) -> Callable[[Array], Array]:
    """Return log P(log sigma_min < x) as a function of x; m, n are the sizes less one half."""
    unit = 2 * (m * n) ** 0.25
    order = unit * (np.sqrt(m) - np.sqrt(n))
    # from P = 1e-6 for order 0, a pure power below, or 1e-20 for a large order, to 1 - P = 1e-14
    first = np.log(order + 1) - 12.5 * (order + 1) ** (-2 / 3)
    last = np.log(order + 15 + 8 * np.cbrt(order / 2))
    y = np.linspace(first, last, 100)
    log_cdf = PchipInterpolator(y, hard_edge_log_cdf(np.exp(y), order))

    def log_smallest_cdf(x: Array) -> Array:
        y = x + np.log(unit)
        return np.asarray(log_cdf(np.clip(y, first, last)) + exponent * np.minimum(y - first, 0.0))

    return log_smallest_cdf


@cache
def _moments(long: int, short: int) -> tuple[float, float]:
    """Integrate the tail of log kappa: its mean and standard deviation."""
    tail = _tail(long, short)
    low, high = _solve(tail, np.array([1 - 1e-10, 1e-10]), high=700.0)
    x = np.linspace(0.0, high - low, 1000)
    above = tail(low + x)
    mean = np.trapezoid(above, x)
    return float(low + mean), float(np.sqrt(2 * np.trapezoid(x * above, x) - mean**2))


def _solve(falling: Callable[[Values], Values], value: Values, high: float) -> Array:
    """Find where in (0, high) a falling function crosses each value, by bisection."""
    low, top = np.zeros_like(value), np.full_like(value, high)
    for _ in range(64):  # halvings: to the last digit
        middle = (low + top) / 2
        above = falling(middle) > value
        low, top = np.where(above, middle, low), np.where(above, top, middle)
    return np.where(np.isnan(value), np.nan, low)


@dataclass(frozen=True)
class MarchenkoPastur:
    """The singular values of a large random matrix; entries of mean 0 and this deviation.

    Marchenko & Pastur 1967, in x = sigma. Arrays in, arrays out.

    >>> MarchenkoPastur(400, 100).edges
    (10.0, 30.0)
    """

    rows: int
    columns: int
    deviation: float = 1.0

    def __post_init__(self) -> None:
        _long_and_short(self.rows, self.columns)
        if not self.deviation > 0:
            raise ValueError(f"expected a deviation above 0, got {self.deviation}")

    @property
    def edges(self) -> tuple[float, float]:
        """The smallest and largest singular value: a, b = s (sqrt(m) -+ sqrt(n))."""
        m, n = np.sqrt(_long_and_short(self.rows, self.columns))
        return float(self.deviation * (m - n)), float(self.deviation * (m + n))

    def density(self, singular_value: ArrayLike) -> Array:
        """Count singular values per unit, in shares: sqrt((b^2 - x^2) (x^2 - a^2)) / (pi n s^2 x).

        >>> round(float(MarchenkoPastur(25, 25).density(6.0)) * np.pi, 2)  # a quarter circle
        0.32
        """
        a, b = self.edges
        value = np.asarray(singular_value, dtype=float)
        x = np.clip(value, a, b)
        r = a / x if a > 0 else 0.0  # a square matrix has a density at 0
        height = np.sqrt((b - x) * (b + x) * (1 - r) * (1 + r))
        n = min(self.rows, self.columns)
        return np.where(value < 0, 0.0, height / (np.pi * n * self.deviation**2))

    def cdf(self, singular_value: ArrayLike) -> Array:
        """Return the share of singular values below x.

        >>> MarchenkoPastur(400, 100).cdf([10, 20, 30]).round(3)
        array([0.   , 0.553, 1.   ])
        """
        a, b = self.edges
        x = np.clip(np.asarray(singular_value, dtype=float), a, b)
        return self._share(2 * np.arctan2(np.sqrt((x - a) * (x + a)), np.sqrt((b - x) * (b + x))))

    def quantile(self, probability: ArrayLike) -> Array:
        """Return the x below which this share of singular values lies.

        >>> round(float(MarchenkoPastur(400, 100).quantile(0.553)), 1)
        20.0
        """
        share = np.asarray(probability, dtype=float)
        half = (np.pi - _solve(lambda t: self._share(np.pi - t), share, high=np.pi)) / 2
        a, b = self.edges
        return np.asarray(np.hypot(a * np.cos(half), b * np.sin(half)))

    def _share(self, angle: Values) -> Array:
        """Return the density's integral up to x^2 = s^2 (m + n - 2 sqrt(mn) cos(angle))."""
        m, n = _long_and_short(self.rows, self.columns)
        p, q, half = np.sqrt(m), np.sqrt(n), angle / 2
        turn = np.arctan2((p + q) * np.sin(half), (p - q) * np.cos(half))
        sum_ = (m + n) * angle + 2 * p * q * np.sin(angle) - 2 * (m - n) * turn
        return np.asarray(sum_ / (2 * np.pi * n))
