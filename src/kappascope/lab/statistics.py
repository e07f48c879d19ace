"""What rows say: medians, tails and comparisons, each with its n and an interval that covers.

Every 95 % interval here is exact, or its coverage is simulated in the tests over normal,
log-normal, t3 and Pareto(1.5) samples of 10, 30 and 300 values. Where no honest interval exists
the :class:`Estimate` carries the reason instead. Values that are not finite are counted as
``missing``, and an interval is only given if it holds wherever those values would have fallen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import scipy  # its stats load when first used: a worker that only trains never waits for them
from numpy.typing import ArrayLike, NDArray

from kappascope.lab.table import Floats

LEVEL = 0.95
TAIL = 500  # below this the 95 % interval of a tail index of 1 spans more than 0.7 to 1.6

floats = partial(np.asarray, dtype=np.float64)

Ends = tuple[float, float]
IntervalAt = Callable[[float], Ends | None]
"""The interval of an estimate at a level of confidence, or nothing where there is none."""


@dataclass(frozen=True)
class Estimate:
    """A number measured on ``n`` values, with its 95 % interval or the reason why it has none.

    ``missing`` counts the values left out because they were not finite. An interval may be
    unbounded (``high`` infinite); ``reason`` is also given for one of zero width. ``at`` gives the
    interval at other levels of confidence, which a correction for many claims asks for.

    >>> print(median([3, 1, 4, 1, 5, 9, 2, 6]))
    median 3.5 [1, 9] (n = 8)
    >>> median([3, 1, 4, 1, 5, 9, 2, 6]).interval_at(0.9)
    (1.0, 6.0)
    >>> print(median([3, 1, 4]))
    median 3 (n = 3; no interval: the 95 % interval of a median needs 6 values)
    """

    value: float
    low: float | None
    high: float | None
    n: int
    what: str
    reason: str | None = None
    missing: int = 0
    at: IntervalAt | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends or none; an open end is math.inf")
        if self.low is None and not self.reason:
            raise ValueError(f"the {self.what} has no interval: say why in reason=")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"an interval runs upwards, not from {self.low} to {self.high}")

    @property
    def interval(self) -> Ends | None:
        """Both ends, or nothing."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def interval_at(self, level: float) -> Ends | None:
        """Return the interval at another level of confidence.

        Where only the 95 % interval is known, each of its sides is stretched like a normal one's.

        >>> Estimate(1.0, 0.0, 3.0, 9, "shift").interval_at(0.99)[1] > 3
        True
        """
        if self.at:
            return self.at(level)
        if self.low is None or self.high is None:
            return None
        stretch = float(scipy.special.ndtri((1 + level) / 2) / scipy.special.ndtri((1 + LEVEL) / 2))
        return (
            self.value - stretch * (self.value - self.low) if self.low < self.value else self.low,
            self.value + stretch * (self.high - self.value)
            if self.high > self.value
            else self.high,
        )

    def map(self, function: Callable[[float], float], what: str) -> Estimate:
        """Estimate a monotone function of this quantity; its interval covers as well.

        >>> print(median([0.2, 0.3, 0.3, 0.4, 0.2, 0.3]).map(lambda left: 1 - left, "reduction"))
        reduction 0.7 [0.6, 0.8] (n = 6)
        """

        def at(level: float) -> Ends | None:
            ends = self.interval_at(level)
            if ends is None:
                return None
            low, high = sorted(map(function, ends))
            return low, high

        low, high = at(LEVEL) or (None, None)
        value = function(self.value)
        return replace(self, value=value, low=low, high=high, what=what, at=at)

    def __format__(self, digits: str) -> str:
        digits = digits or ".3g"
        if self.low is None:
            return f"{self.value:{digits}}"
        return f"{self.value:{digits}} [{self.low:{digits}}, {self.high:{digits}}]"

    def __str__(self) -> str:
        notes = [f"n = {self.n}"]
        if self.missing:
            notes.append(f"{self.missing} missing")
        if self.reason:
            notes.append(self.reason if self.interval else f"no interval: {self.reason}")
        return f"{self.what} {self:.3g} ({'; '.join(notes)})"


def _finite(values: ArrayLike) -> tuple[Floats, int]:
    """Sort the finite values, and count the missing ones."""
    everything = floats(values).ravel()
    finite = np.sort(everything[np.isfinite(everything)])
    return finite, everything.size - finite.size


def exactly(value: float, n: int, what: str) -> Estimate:
    """Return a fact counted over all ``n`` cases rather than estimated from a sample.

    >>> print(exactly(0, 15, "targets that differ"))
    targets that differ 0 [0, 0] (n = 15; counted, not sampled)
    """
    return Estimate(
        value, value, value, n, what, "counted, not sampled", at=lambda _: (value, value)
    )


def quantile(values: ArrayLike, q: float) -> Estimate:
    """Estimate the ``q`` quantile, with the exact interval between two order statistics.

    The interval covers for every distribution: the number of values below the quantile is
    binomial, whatever they are. With missing values it is widened until it holds wherever they lie.

    >>> print(quantile(range(101), 0.25))
    0.25 quantile 25 [16, 34] (n = 101)
    """
    if not 0 < q < 1:
        raise ValueError(f"a quantile lies between 0 and 1; got {q}")
    finite, missing = _finite(values)
    n, what = finite.size, "median" if q == 0.5 else f"{q:g} quantile"
    value = float(np.quantile(finite, q)) if n else math.nan

    def at(level: float) -> Ends | None:
        first, last = _ranks(n + missing, q, level)
        first -= missing  # as if every missing value lay below; `last` is as if all lay above
        if first < 1 or last > n:
            return None
        return float(min(finite[first - 1], value)), float(max(finite[last - 1], value))

    ends = at(LEVEL)
    if ends is None:
        reason = _too_few(n, missing, q, what)
        return Estimate(value, None, None, n, what, reason, missing, at)
    equal = int(np.count_nonzero(finite == ends[0]))
    flat = f"zero width: {equal} of {n} values are equal" if ends[0] == ends[1] else None
    return Estimate(value, *ends, n, what, flat, missing, at)


def median(values: ArrayLike) -> Estimate:
    """Estimate the middle value, with its exact interval from 6 values on.

    >>> print(median([0.1, 0.1, 0.2, 0.3, 0.3, 40.0]))
    median 0.25 [0.1, 40] (n = 6)
    """
    return quantile(values, 0.5)


@lru_cache(maxsize=16384)
def _ranks(n: int, q: float, level: float) -> tuple[int, int]:
    """Ranks (from 1) of the order statistics that enclose the quantile; 0 or n + 1: too few."""
    tail = (1 - level) / 2
    return int(scipy.stats.binom.ppf(tail, n, q)), int(scipy.stats.binom.isf(tail, n, q)) + 1


def _too_few(n: int, missing: int, q: float, what: str) -> str:
    if not n:
        return f"all {missing} values are missing" if missing else "there are no values"
    needed = math.ceil(math.log((1 - LEVEL) / 2) / math.log(max(q, 1 - q)))
    if n + missing < needed:
        return f"the 95 % interval of a {what} needs {needed} values"
    return f"the {missing} missing values could lie anywhere"


def mean(values: ArrayLike) -> Estimate:
    """Estimate the mean, without an interval: one more value of a heavy tail can move it.

    >>> print(mean([1, 2, 6]))
    mean 3 (n = 3; no interval: heavy tails possible: see the median)
    """
    finite, missing = _finite(values)
    if not finite.size:
        reason = _too_few(0, missing, 0.5, "mean")
        return Estimate(math.nan, None, None, 0, "mean", reason, missing)
    heavy = "heavy tails possible: see the median"
    return Estimate(float(np.mean(finite)), None, None, finite.size, "mean", heavy, missing)


def over_seeds(values: ArrayLike, what: str = "mean difference") -> Estimate:
    """Estimate the mean with Student's interval, from three values on, if all are finite.

    It is for what is not skewed, such as differences of losses that are means over many samples,
    or medians over many matrices on a logarithmic scale: there seeds enter in many small ways. What
    is skewed, such as the largest of many kappas, has a median.

    >>> print(over_seeds([0.1, 0.2, 0.3]))
    mean difference 0.2 [-0.0484, 0.448] (n = 3)
    >>> print(over_seeds([0.0, 0.0, 0.0]))
    mean difference 0 [0, 0] (n = 3; zero width: 3 of 3 values are equal)
    >>> print(over_seeds([0.1, 0.2]))
    mean difference 0.15 (n = 2; no interval: fewer than 3 seeds)
    """
    finite, missing = _finite(values)
    n = finite.size
    value = float(finite.mean()) if n else math.nan
    if n < 3 or missing:
        reason = f"{missing} runs diverged" if missing else "fewer than 3 seeds"
        return Estimate(value, None, None, n, what, reason, missing)
    error = float(scipy.stats.sem(finite))

    def at(level: float) -> Ends:
        reach = float(scipy.stats.t.isf((1 - level) / 2, n - 1)) * error
        return value - reach, value + reach

    equal = None if error else f"zero width: {n} of {n} values are equal"
    return Estimate(value, *at(LEVEL), n, what, equal, at=at)


def proportion(hits: int, n: int) -> Estimate:
    """Estimate the share of ``n`` trials that are hits, with Clopper and Pearson's interval.

    >>> print(proportion(15, 15))
    proportion 1 [0.782, 1] (n = 15)
    """
    if not n:
        return Estimate(math.nan, None, None, 0, "proportion", "there are no trials")
    test = scipy.stats.binomtest(int(hits), int(n))

    def at(level: float) -> Ends:
        low, high = test.proportion_ci(level, method="exact")
        return float(low), float(high)

    return Estimate(hits / n, *at(LEVEL), int(n), "proportion", at=at)


def paired_difference(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """Estimate the median of ``ours - theirs``, trial by trial, with its exact interval.

    >>> print(paired_difference([3, 5, 4, 8, 6, 7], [1, 2, 3, 4, 5, 6]))
    median paired difference 1.5 [1, 4] (n = 6)
    """
    return replace(median(floats(ours) - floats(theirs)), what="median paired difference")


def paired_ratio(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """Estimate the median of ``ours / theirs``, trial by trial; division by zero is missing.

    >>> print(paired_ratio([1, 2, 3, 4, 5, 6], [2, 2, 2, 2, 2, 2]))
    median paired ratio 1.75 [0.5, 3] (n = 6)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = floats(ours) / floats(theirs)
    return replace(median(quotients), what="median paired ratio")


def wins(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """Estimate the share of pairs in which ours is smaller; above one half is the exact sign test.

    A tie is no win. A missing partner counts against us at one end of the interval and for us at
    the other.

    >>> print(wins([1, 1, 1, 1, 1, 1, 9], [2, 2, 2, 2, 2, 2, 2]))
    pairs won 0.857 [0.421, 0.996] (n = 7)
    """
    gap = floats(ours) - floats(theirs)
    missing = int(np.count_nonzero(np.isnan(gap)))
    return _share(int(np.count_nonzero(gap < 0)), gap.size - missing, missing, "pairs won")


def falls(curves: ArrayLike) -> Estimate:
    """Estimate the share of curves (one a line) that fall at every step.

    >>> print(falls([[3, 2, 1], [3, 1, 2]]))
    curves that fall throughout 0.5 [0.0126, 0.987] (n = 2)
    """
    points = floats(curves)
    if points.shape[1] < 2:
        what, reason = "curves that fall throughout", "a curve of one point neither falls nor rises"
        return Estimate(math.nan, None, None, 0, what, reason)
    steps = np.diff(points, axis=1)
    missing = int(np.isnan(steps).any(axis=1).sum())
    hits = int((steps < 0).all(axis=1).sum())
    return _share(hits, len(steps) - missing, missing, "curves that fall throughout")


def _share(hits: int, n: int, missing: int, what: str) -> Estimate:
    """Estimate a proportion, with an interval that holds whether missing cases are hits or not."""
    share = replace(proportion(hits, n), what=what, missing=missing)
    if not n or not missing:
        return share
    worst, best = proportion(hits, n + missing), proportion(hits + missing, n + missing)

    def at(level: float) -> Ends | None:
        low, high = worst.interval_at(level), best.interval_at(level)
        return low and high and (low[0], high[1])

    return replace(share, low=worst.low, high=best.high, at=at)


def contrast(estimates: Sequence[Estimate], weights: Sequence[float], what: str) -> Estimate:
    """Estimate the weighted sum of independent estimates, with an interval recovered from theirs.

    Each end is as far away as the root of the summed squares of the distances to the ends that
    would move it there (Zou and Donner's MOVER); skewed intervals stay skewed. ``n`` is that of
    the smallest group.

    >>> print(contrast([Estimate(5, 2, 6, 9, ""), Estimate(1, 0, 5, 8, "")], (1, -1), "gap"))
    gap 4 [-1, 5.41] (n = 8)
    """
    value = math.fsum(w * e.value for w, e in zip(weights, estimates, strict=True))
    n, missing = min(e.n for e in estimates), sum(e.missing for e in estimates)
    # with no weight, an end at infinity would be asked for nothing of it
    weighted = [(w, e) for w, e in zip(weights, estimates, strict=True) if w]

    def at(level: float) -> Ends | None:
        below, above = 0.0, 0.0
        for w, e in weighted:
            ends = e.interval_at(level)
            if ends is None:
                return None
            low, high = sorted((w * ends[0], w * ends[1]))
            below = math.hypot(below, w * e.value - low)
            above = math.hypot(above, high - w * e.value)
        return value - below, value + above

    ends = at(LEVEL)
    if ends is None:
        reason = next(e.reason for _, e in weighted if e.interval is None)
        return Estimate(value, None, None, n, what, reason, missing, at)
    return Estimate(value, *ends, n, what, None, missing, at)


def ratio(ours: ArrayLike, theirs: ArrayLike) -> Estimate:
    """Estimate the ratio of the medians of two independent groups of positive values.

    >>> print(ratio(range(10, 20), range(1, 11)))
    ratio of medians 2.64 [1.5, 7.42] (n = 10)
    """
    logs = [_log(median(group)) for group in (ours, theirs)]
    return contrast(logs, (1, -1), "").map(_exp, "ratio of medians")


def growth_exponent(groups: Mapping[float, ArrayLike]) -> Estimate:
    """Estimate the power of x with which the median of independent groups grows; 1 is linear.

    The least-squares slope of log median on log x over all groups, each with the same weight.

    >>> print(growth_exponent({d: d**2 * np.linspace(0.9, 1.1, 21) for d in (32, 64, 128)}))
    growth exponent 2 [1.95, 2.05] (n = 21)
    """
    what = "growth exponent"
    if len(groups) < 2:
        return Estimate(math.nan, None, None, 0, what, f"a {what} needs two groups or more")
    logs = np.array([math.log(x) for x in groups])
    x = logs - logs.mean()
    return contrast([_log(median(g)) for g in groups.values()], (x / (x @ x)).tolist(), what)


def slopes(x: ArrayLike, y: ArrayLike) -> Floats:
    """Fit a line by least squares to each row of y over x, and give its slope; NaN is left out.

    >>> slopes([[0, 1, 2], [0, 1, math.nan]], [[1, 3, 5], [2, 1, 9]])
    array([ 2., -1.])
    """
    xs, ys = np.broadcast_arrays(floats(x), floats(y))
    known = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = (np.where(known, values, np.nan) for values in (xs, ys))
    xs, ys = (values - np.nanmean(values, axis=1, keepdims=True) for values in (xs, ys))
    return np.asarray(np.nansum(xs * ys, axis=1) / np.nansum(xs * xs, axis=1))


def _log(estimate: Estimate) -> Estimate:
    value = math.log(estimate.value) if estimate.value > 0 else math.nan
    if not estimate.n or (estimate.value > 0 and (estimate.low or 0) >= 0):
        return estimate.map(lambda x: math.log(x) if x > 0 else -math.inf, f"log {estimate.what}")
    reason = f"a {estimate.what} of {estimate:.3g} has no logarithm"
    return replace(estimate, value=value, low=None, high=None, reason=reason, at=lambda _: None)


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)  # e^709 is the last below overflow


def rank_correlation(
    x: ArrayLike,
    y: ArrayLike,
    given: Sequence[ArrayLike] = (),
    within: ArrayLike | None = None,
    level: float = LEVEL,
) -> Estimate:
    """Spearman's correlation, or what is left of it once the ranks of others are ``given``.

    Its interval is Fisher's with the variance of Bonett and Wright (2000), each given variable
    costing one value, and reaches out to what many more values would have. ``within`` names a group
    for every value: ranks are then taken inside each group and pooled, and the interval is a
    jackknife over groups, which need not be alike. What it estimates is the correlation in groups
    of their size: the smaller they are, the nearer it is to zero. An infinite value has a rank; one
    that is NaN is missing.

    It sees what rises or falls together with others fixed, and is blind to interactions: if x
    raises y where another variable is large and lowers it where that is small, it is near zero.

    >>> x = np.arange(20.0)
    >>> print(rank_correlation(x, np.roll(x, 2)))
    rank correlation 0.459 [-0.00414, 0.772] (n = 20)
    >>> print(rank_correlation(x, np.roll(x, 2), given=[np.roll(x, 1)]))
    partial rank correlation -0.105 [-0.539, 0.368] (n = 20)
    """
    columns = np.array([floats(variable).ravel() for variable in (x, y, *given)])
    present = ~np.isnan(columns).any(axis=0)
    names = np.zeros(present.size) if within is None else np.asarray(within).ravel()
    products = _rank_products(columns[:, present], names[present])
    n, missing = int(present.sum()), int((~present).sum())
    what = (
        ("partial " if len(given) else "")
        + "rank correlation"
        + " within groups" * (within is not None)
    )
    value = float(_partial(products.sum(axis=0))) if len(products) else math.nan
    groups = products if within is not None else None
    _, reason = _reach(value, n - len(given), groups, level)
    if missing:
        reason = f"the {missing} missing values could have any rank"
    if reason:
        return Estimate(value, None, None, n, what, reason, missing)
    size = abs(value)
    most = size if within is not None else _of_many(size, n - len(given))

    def at(level: float) -> Ends:
        reach, _ = _reach(value, n - len(given), groups, level)
        inner, outer = math.tanh(math.atanh(size) - reach), math.tanh(math.atanh(most) + reach)
        return (inner, outer) if value >= 0 else (-outer, -inner)

    return Estimate(value, *at(level), n, what, at=at)


def _of_many(value: float, n: int) -> float:
    """Estimate what a positive rank correlation of n values would be with many more, below 1.

    On average that of n is too small by 3 (rho - tau) / (n + 1) (Hoeffding 1948); of normal
    variables tau, Kendall's correlation, follows from rho.
    """
    tau = 2 / math.pi * math.asin(2 * math.sin(math.pi * value / 6))
    return min(value + 3 * (value - tau) / (n - 2), math.nextafter(1, 0))


def _rank_products(columns: Floats, names: NDArray[Any]) -> Floats:
    """Sum the products of centred ranks over each group of two values or more."""
    _, group, sizes = np.unique(names, return_inverse=True, return_counts=True)
    ranks = scipy.stats.rankdata(columns, axis=1) + group * (group.size + 1)  # group after group
    ranks = scipy.stats.rankdata(ranks, axis=1) if sizes.size > 1 else ranks
    means = np.array([np.bincount(group, variable) for variable in ranks]) / sizes
    centred = (ranks - means[:, group]).T
    products = np.zeros((sizes.size, *2 * columns.shape[:1]))
    np.add.at(products, group, centred[:, :, None] * centred[:, None, :])
    return products[sizes > 1]


def _partial(products: Floats) -> Floats:
    """Correlate the first two variables, given the others, for each matrix of a stack."""
    across = products[..., :2, 2:]
    explained = across @ np.linalg.pinv(products[..., 2:, 2:]) @ across.swapaxes(-1, -2)
    left = products[..., :2, :2] - explained
    whole, rest = (np.diagonal(m, axis1=-2, axis2=-1)[..., :2] for m in (products, left))
    determined = (rest <= 1e-9 * whole).any(axis=-1)  # by what is given; or constant
    scale = np.sqrt(np.where(determined, np.nan, rest.prod(axis=-1)))
    return np.asarray(np.clip(left[..., 0, 1] / scale, -1, 1))


def _reach(value: float, n: int, products: Floats | None, level: float) -> tuple[float, str | None]:
    """Return half the width of the interval of Fisher's z, or the reason why there is none."""
    least = 8 if products is None else 10  # the fewest for which coverage is simulated
    count = n if products is None else len(products)
    if not abs(value) < 1:  # NaN too
        return math.nan, "the ranks are constant, or tell each other in full"
    if count < least:
        kind = "values beyond those given" if products is None else "groups of two or more"
        return math.nan, f"the interval of a rank correlation needs {least} {kind}"
    if products is None:
        error = math.sqrt((1 + value**2 / 2) / (n - 3))
        return float(scipy.stats.norm.isf((1 - level) / 2)) * error, None
    without = _partial(products.sum(axis=0) - products)
    if not (abs(without) < 1).all():
        return math.nan, "without one of the groups the others tell each other in full"
    error = math.sqrt((count - 1) * np.var(np.arctanh(without)))
    return float(scipy.stats.t.isf((1 - level) / 2, count - 1)) * error, None


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number by Holm's step-down procedure (1979).

    Rejecting what is at most 0.05 after it is wrong anywhere with a chance of at most 5 %,
    whatever the dependence of the tests.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, (len(p_values) - place) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def tail_index(values: ArrayLike) -> Estimate:
    """Estimate the power by which large values become rare, P(X > x) ~ x^-index; at 1, no mean.

    The value is Hill's, from the k = n^0.6 largest: few enough for the bias of a Cauchy or t3
    body to stay below the noise, many enough for the noise at n = 500 (k = 41) to be 16 %. Hill
    mistakes light tails for heavy ones, so the interval also spans that of the moment estimator
    (Dekkers, Einmahl, de Haan 1989), which is unbounded for exponential tails. It covers in the
    tests for Pareto(1), Pareto(1.5), |Cauchy|, |t3| and exponential samples, from 500 values on;
    not for log-normal ones, whose tail no sample of this size tells from a power: hence an index is
    at most consistent with theory, which says first whether there is a mean
    (:func:`kappascope.lab.claims.no_mean`).

    >>> print(tail_index(1 / np.linspace(0.0005, 0.9995, 1000)))
    tail index 0.998 [0.762, 1.6] (n = 1000)
    """
    finite, missing = _finite(values)
    n, k, what = finite.size, int(finite.size**0.6), "tail index"
    if k < 2 or not finite[-k - 1] > 0 or finite[-k] == finite[-1]:
        reason = f"no tail: fewer than {k + 1} positive values, or the largest are all equal"
        return Estimate(math.nan, None, None, n, what, reason, missing)
    logs = np.log(finite[-k:] / finite[-k - 1])
    value = float(1 / logs.mean())
    if n < TAIL or missing:
        lost = f"the {missing} missing values could be the largest"
        reason = lost if missing else f"the 95 % interval of a tail index needs {TAIL} values"
        return Estimate(value, None, None, n, what, reason, missing)
    lows, highs = zip(_hill_interval(logs), _moment_interval(logs), strict=True)
    return Estimate(value, min(lows), max(highs), n, what)


def _hill_interval(logs: Floats) -> tuple[float, float]:
    """Take the exact interval of a Pareto tail: summed log excesses are gamma distributed."""
    low, high = scipy.stats.gamma.interval(LEVEL, logs.size)
    return float(low / logs.sum()), float(high / logs.sum())


def _moment_interval(logs: Floats) -> tuple[float, float]:
    """Take the asymptotic interval of the extreme value index g = 1 / index, of any sign."""
    first, second = logs.mean(), (logs**2).mean()
    g = first + 1 - 0.5 / (1 - first**2 / second)
    m = min(g, 0.0)
    ratios = 4 - 8 * (1 - 2 * m) / (1 - 3 * m)
    ratios += (5 - 11 * m) * (1 - 2 * m) / ((1 - 3 * m) * (1 - 4 * m))
    variance = 1 + g**2 if g >= 0 else (1 - m) ** 2 * (1 - 2 * m) * ratios
    reach = scipy.stats.norm.isf((1 - LEVEL) / 2) * math.sqrt(variance / logs.size)
    low, high = (1 / end if end > 0 else math.inf for end in (g + reach, g - reach))
    return float(low), float(high)


def largest_share(values: ArrayLike) -> Estimate:
    """Measure how much of a mean is one trial: the largest share of one value in their sum.

    Values count by their magnitude. A single value is all of its mean.

    >>> print(largest_share([0.5, 0.3, 0.2, 49.0]))
    share of one trial 0.98 [0.98, 0.98] (n = 4; counted, not sampled)
    """
    finite, missing = _finite(values)
    sizes = np.abs(finite)
    share = 1.0
    if finite.size > 1:
        share = float(sizes.max() / sizes.sum()) if sizes.any() else 0.0
    return replace(exactly(share, finite.size, "share of one trial"), missing=missing)


@dataclass(frozen=True)
class SampleSummary:
    """Median and quartiles beside mean and standard deviation (the paper's, over n).

    >>> summary([1, 2, 3, 4, 90]).std, summary([1, 2, 3, 4, 90]).median.value
    (35.0..., 3.0)
    """

    median: Estimate
    quartiles: tuple[Estimate, Estimate]
    mean: Estimate
    std: float
    share: Estimate  # that the largest trial has in the mean


def summary(values: ArrayLike) -> SampleSummary:
    """Sum up everything a table says of one group of trials.

    >>> round(summary(range(9)).share.value, 2)
    0.22
    """
    finite, _ = _finite(values)
    return SampleSummary(
        median(values),
        (quantile(values, 0.25), quantile(values, 0.75)),
        mean(values),
        float(np.std(finite)) if finite.size else math.nan,
        largest_share(values),
    )
