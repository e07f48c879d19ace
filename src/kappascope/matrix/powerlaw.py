"""The heavy tail of a spectrum: its exponent, and how well a power law fits.

Martin and Mahoney (2021) read the quality of a layer from the eigenvalues of W'W: above some xmin
their density falls as x^-alpha. The exponent is Clauset, Shalizi and Newman's (2009): the most
likely one for every possible xmin, and of those the one whose law is closest to the tail in
Kolmogorov's distance. The choices they leave open are those of WeightWatcher 0.7.7, so that alpha
can be compared with published ones; each is said where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

MIN_TAIL = 8  # below, WeightWatcher leaves a layer out; a standard error would exceed a third
UNCORRECTED_FROM = (
    20  # below, WeightWatcher corrects the exponent's bias and allows no tail of less than MIN_TAIL
)
EIGENVALUE_FLOOR = 1e-5  # WeightWatcher's: no tail begins at a smaller eigenvalue
PROBED_POINTS = 64  # points of a tail that bound its distance from below


@dataclass(frozen=True)
class PowerLaw:
    """A tail whose density falls as x^-alpha from ``xmin`` on.

    >>> PowerLaw(alpha=3.0, xmin=1.0, distance=0.02, count=400).sigma
    0.1
    """

    alpha: float
    xmin: float
    distance: float  # Kolmogorov's, between the law and the tail
    count: int  # eigenvalues in the tail

    @property
    def sigma(self) -> float:
        """Standard error of alpha, (alpha - 1) / sqrt(count), taking xmin as known."""
        return (self.alpha - 1) / float(np.sqrt(self.count))


def power_law(eigenvalues: ArrayLike, floor: float = EIGENVALUE_FLOOR) -> PowerLaw | str:
    """Return the power law that fits the largest eigenvalues best, or the reason why none does.

    Eigenvalues are squared singular values, not divided by a size: ``floor`` is absolute, as
    WeightWatcher's is. With ``floor=0`` alpha does not depend on their scale.

    >>> power_law((1 - (np.arange(1000) + 0.5) / 1000) ** -0.5)  # P(X > x) = x^-2
    PowerLaw(alpha=3.00..., xmin=1.000..., distance=0.0..., count=1000)
    >>> power_law([1.0, 2.0])
    '2 of 2 eigenvalues exceed 1e-05, 8 are needed'
    """
    x = np.sort(np.asarray(eigenvalues, dtype=float).ravel())
    finite = int(np.isfinite(x).sum())
    if finite < len(x):
        return f"{len(x) - finite} of {len(x)} eigenvalues are not finite"
    if len(x) and x[0] == x[-1]:
        return f"all {len(x)} eigenvalues are equal"
    # a zero singular value comes as about n eps of the largest: no tail begins there
    limit = max(floor, (len(x) * np.finfo(float).eps) ** 2 * x.max(initial=0.0))
    large = x[x > limit]
    if len(large) < MIN_TAIL:
        return f"{len(large)} of {len(x)} eigenvalues exceed {limit:.2g}, {MIN_TAIL} are needed"
    return _fitted(large)


def _fitted(x: Array) -> PowerLaw | str:
    """Return the best power law for positive eigenvalues in rising order."""
    logs = np.log(x)
    alphas = _exponents(logs)
    starts = np.flatnonzero(~np.isnan(alphas))
    if not len(starts):
        return f"all {len(x)} large eigenvalues are equal"
    distance, start = _closest(logs, alphas, starts)
    return PowerLaw(float(alphas[start]), float(x[start]), distance, len(x) - start)


def _exponents(logs: Array) -> Array:
    """Return the most likely exponent of the tail from each point on; NaN where there is none."""
    n = len(logs) - np.arange(len(logs))
    sums = np.cumsum(logs[::-1])[::-1] - n * logs  # of log(x / xmin)
    few = len(logs) < UNCORRECTED_FROM
    usable = (sums > 1e-12 * n) & (n >= (MIN_TAIL if few else 2))  # a tail of equals has none
    return np.where(usable, 1 + (n - few) / np.where(usable, sums, 1.0), np.nan)


def _closest(logs: Array, alphas: Array, starts: Indices) -> tuple[float, int]:
    """Return the smallest distance of a tail from its law, and where that tail begins.

    Exactly the smallest of all distances, without n^2 of them: some points of every tail bound its
    distance from below, and tails are looked at in that order until the bound says stop.
    """
    bounds = _bounds(logs, alphas, starts)
    best = (np.inf, 0)
    for i in np.argsort(bounds, kind="stable"):
        if bounds[i] > best[0]:
            break
        start = int(starts[i])
        gaps = _gaps(logs, alphas, starts[i], np.arange(start, len(logs)))
        best = min(best, (float(gaps.max()), start))
    return best


def _bounds(logs: Array, alphas: Array, starts: Indices) -> Array:
    """Return the largest gap between law and tail at a few points of each tail."""
    steps = np.linspace(0, 1, PROBED_POINTS)
    last = len(logs) - 1
    points = np.rint(starts[:, None] + np.multiply.outer(last - starts, steps)).astype(np.intp)
    return _gaps(logs, alphas, starts[:, None], points).max(-1)


def _gaps(logs: Array, alphas: Array, start: Indices | np.intp, points: Indices) -> Array:
    """Tell how far the law from ``start`` is from the share of the tail below each point."""
    law = -np.expm1((1 - alphas[start]) * (logs[points] - logs[start]))
    return np.abs(law - (points - start) / (len(logs) - start))
