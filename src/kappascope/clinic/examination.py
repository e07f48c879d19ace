"""One matrix examined: its components, what they are worth, and what chance would have given.

An :class:`Examination` is a row: numbers and text only, the same for a matrix from a checkpoint
and one in memory. Every number is right to the digits of its storage or ``None``, with the reason
in ``reasons``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import components, spectra, tails
from kappascope.clinic import Extent
from kappascope.clinic.status import INFINITE, MASKING, NON_FINITE, Status
from kappascope.components import Components
from kappascope.theory import GaussianNull, MarchenkoPastur, tracy_widom_cdf
from kappascope.weights.reasons import Unlike

FULL = 2048  # up to this many singular values "auto" takes them all: about half a second
THRESHOLDS = (0.001, 0.01, 0.1)  # of the effective rank; the middle one is the paper's
POINTS = 256  # of a drawn spectrum, evenly spaced in the logarithm of the index: all that is seen
BARS = 32  # of the histogram of row norms
DEAD = 1e-6  # of the median norm: a row this small adds nothing to bfloat16 or float16 sums
OUTLYING = 6.0  # robust deviations from the median, and twice the median at least
PANEL = 2**20  # numbers looked at together: eight megabytes in float64
CHANCE = 1e-3  # at which the largest singular value of a random matrix exceeds its limit


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some norms, and their coefficient of variation."""

    min: float
    median: float
    max: float
    cv: float | None  # none where the mean is zero

    @classmethod
    def of(cls, norms: Float[Tensor, " count"]) -> Spread:
        """The spread of at least one norm.

        >>> Spread.of(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        Spread(min=1.0, median=2.0, max=3.0, cv=0.408...)
        """
        largest = float(norms.max())
        relative = norms / largest if largest > 0 else norms
        mean = float(relative.mean())
        cv = float(relative.std(correction=0)) / mean if mean > 0 else None
        middle = float(np.median(norms.numpy(force=True)))  # torch's has a longest, of 2^24
        return cls(float(norms.min()), middle, largest, cv)


@dataclass(frozen=True)
class Examination:
    """All that is known of one matrix; ``reasons`` says why a field is ``None``.

    >>> Examination("w", (2, 2), "float32", "failed: non-finite (1 of 4)").failed
    True
    """

    name: str
    shape: tuple[int, int]
    dtype: str
    status: str
    kind: str = "other"
    depth: int | None = None
    part_of: str | None = None
    storage: str = ""
    method: str = ""
    row_norms: Spread | None = None
    column_norms: Spread | None = None
    dead_rows: int | None = None
    dead_columns: int | None = None
    outlier_rows: int | None = None
    outlier_columns: int | None = None
    entry_mean: float | None = None
    entry_std: float | None = None
    entry_kurtosis: float | None = None
    sigma_max: float | None = None
    sigma_2: float | None = None
    sigma_min: float | None = None
    condition_number: float | None = None
    condition_number_low: float | None = None
    condition_number_high: float | None = None
    resolved: bool = False
    effective_rank: int | None = None
    effective_ranks: Mapping[str, int | None] = field(default_factory=dict)
    stable_rank: float | None = None
    entropy_rank: float | None = None
    spectral_gap: float | None = None
    frobenius_norm: float | None = None
    null_condition_number: float | None = None
    null_z: float | None = None
    null_tail: float | None = None
    null_distance: float | None = None
    edge: float | None = None
    outliers: int | None = None
    alpha: float | None = None
    alpha_xmin: float | None = None
    alpha_distance: float | None = None
    alpha_count: int | None = None
    errors: Mapping[str, float | None] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    plot: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        """Whether nothing could be measured."""
        return Status(self.status).failed


def examine(
    name: str, matrix: Tensor, spectrum: Extent = "auto", reference: Tensor | None = None
) -> Examination:
    """Measure one matrix, and its errors against a reference of its shape if there is one.

    >>> found = examine("eye", torch.eye(4))
    >>> found.condition_number, found.effective_rank, found.stable_rank, found.spectral_gap
    (1.0, 4, 4.0, 0.0)
    >>> found.reasons["alpha"]
    'all 4 eigenvalues are equal'
    >>> examine("bad", torch.tensor([[math.nan, 1.0]])).status
    'failed: non-finite (1 of 2), first at [0, 0]'
    """
    complete = spectrum == "full" or (spectrum == "auto" and min(matrix.shape) <= FULL)
    found = spectra.vitals(matrix, complete=complete)
    row = Examination(
        name=name,
        shape=(matrix.shape[0], matrix.shape[1]),
        dtype=str(matrix.dtype).removeprefix("torch."),
        status=found.status,
        storage=found.storage,
        method=found.method,
    )
    if row.failed:
        broken = unsound(matrix)
        return replace(row, status=f"failed: {broken}" if broken else row.status)
    values = found.singular_values
    facts = {
        **_norms(found),
        **_entries(matrix, found),
        **_vitals(found),
        **_ranks(found, values),
        **_null(row.shape, found),
        **_spectrum(row.shape, found, values),
        "errors": _errors(matrix, found, reference, complete),
    }
    plot = _plot(row.shape, found, values)
    return replace(row, **_present(facts), reasons=dict(_reasons(facts)), plot=plot)


@dataclass(frozen=True)
class _Absent:
    """In the place of a number that does not exist, or was not asked for."""

    reason: str


def _present(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same with ``None`` for what is absent, also inside."""
    pairs = ((name, _present(it) if isinstance(it, dict) else it) for name, it in facts.items())
    return {name: None if isinstance(it, _Absent) else it for name, it in pairs}


def _reasons(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why fields are absent, and of others what is inside them."""
    for name, it in facts.items():
        inside = {"cv": ZERO} if isinstance(it, Spread) and it.cv is None else it
        if isinstance(it, _Absent):
            yield name, it.reason
        elif isinstance(inside, dict):
            yield from ((f"{name}.{key}", why) for key, why in _reasons(inside))


RANGE = _Absent("outside float64's range")
EMPTY = _Absent("empty matrix")
ZERO = _Absent("zero matrix")
SINGULAR = _Absent(f"{INFINITE}: the smallest singular value cannot be told from zero")
PARTIAL = _Absent("needs all singular values: --spectrum full")


def unsound(tensor: Tensor) -> str:
    """How many numbers of a tensor are none, and where the first of them is; nothing if all are.

    >>> unsound(torch.tensor([1.0, math.nan, -math.inf])), unsound(torch.ones(2, 2))
    ('non-finite (2 of 3), first at [1]', '')
    """
    if tensor.is_meta:  # saved or made without values
        return ""
    rows = torch.atleast_1d(tensor)
    height = max(1, PANEL * len(rows) // max(1, tensor.numel()))
    bad = minus = 0
    first: list[int] = []
    for top, panel in enumerate(rows.split(height)):
        exact = panel.double()
        broken = ~exact.isfinite()
        if broken.any() and not first:
            first = broken.nonzero()[0].tolist()
            first[0] += top * height
        bad, minus = bad + int(broken.sum()), minus + int(exact.isneginf().sum())
    told = f"{NON_FINITE} ({bad} of {tensor.numel()}), first at {first}"
    return Status(f"failed: {told}{MASKING if bad == minus else ''}").reason if bad else ""


def _norms(found: spectra.Vitals) -> dict[str, Any]:
    """Spread of the norms, dead and outlying rows and columns."""
    rows, columns = found.row_norms, found.column_norms
    facts: dict[str, Any] = {}
    for side, norms, others in (("row", rows, columns), ("column", columns, rows)):
        names = f"{side}_norms", f"dead_{side}s", f"outlier_{side}s"
        if norms is None or others is None:
            facts |= dict.fromkeys(names, RANGE)
        elif not len(norms):
            facts |= dict.fromkeys(names, EMPTY)
        else:
            dead = int((norms <= DEAD * norms.median()).sum())
            beyond = int((norms > outlying(norms, len(others))).sum())
            facts |= dict(zip(names, (Spread.of(norms), dead, beyond), strict=True))
    return facts


def outlying(norms: Float[Tensor, " count"], length: int) -> float:
    """The norm above which a vector of this length is an outlier among the others.

    Robust: from the median and the median deviation, which half the vectors would have to be
    outliers to move, and never narrower than chance makes norms of ``length`` normal entries.

    >>> outlying(torch.ones(9, dtype=torch.float64), length=2)
    4.0
    """
    middle = float(norms.median())
    deviation = 1.4826 * float((norms - middle).abs().median())  # of a normal sample
    chance = middle / math.sqrt(2 * max(length, 1))
    return max(middle + OUTLYING * max(deviation, chance), 2 * middle)


def _entries(matrix: Tensor, found: spectra.Vitals) -> dict[str, Any]:
    """Mean, deviation and excess kurtosis of the entries, from one pass in panels."""
    names = "entry_mean", "entry_std", "entry_kurtosis"
    if not found.frobenius_norm or not matrix.numel():
        return dict.fromkeys(names, RANGE if found.frobenius_norm is None else ZERO)
    rms = found.frobenius_norm / math.sqrt(matrix.numel())
    sums = torch.zeros(4, dtype=torch.float64)
    for panel in matrix.split(max(1, 2**16 // matrix.shape[1])):  # half a megabyte: in cache
        x = panel.double().flatten() / rms
        square = x * x
        sums += torch.stack([x.sum(), square.sum(), square @ x, square @ square])
    m1, m2, m3, m4 = (sums / matrix.numel()).tolist()
    variance = m2 - m1 * m1
    if variance < 1e-12:  # of a mean square of 1: rounding is all that is left
        return {"entry_mean": m1 * rms, "entry_std": 0.0, names[2]: _Absent("all entries equal")}
    fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4
    values = m1 * rms, math.sqrt(variance) * rms, fourth / variance**2 - 3
    return dict(zip(names, values, strict=True))


def _vitals(found: spectra.Vitals) -> dict[str, Any]:
    """Extremes and kappa as they are, infinite ones apart."""
    why = Status(found.status).reason
    names = ("frobenius_norm", "sigma_max", "sigma_2", "sigma_min", "spectral_gap")
    kappas = ("condition_number", "condition_number_low", "condition_number_high")
    facts: dict[str, Any] = {}
    for name in (*names, *kappas):
        value = getattr(found, name)
        facts[name] = _Absent(why) if value is None else value
    for name in kappas:
        if facts[name] == math.inf:
            facts[name] = SINGULAR
    return facts | {"resolved": found.resolved}


def _ranks(found: spectra.Vitals, values: Tensor | None) -> dict[str, Any]:
    """Effective ranks at the thresholds, stable and entropy rank."""
    ranks: dict[str, Any] = dict.fromkeys(map(str, THRESHOLDS), PARTIAL)
    ranks["0.01"] = found.effective_rank
    facts: dict[str, Any] = {"effective_rank": found.effective_rank}
    if not found.sigma_max or found.frobenius_norm is None:
        absent = ZERO if found.sigma_max == 0 else RANGE
        return facts | dict.fromkeys(("stable_rank", "entropy_rank"), absent)
    facts["stable_rank"] = (found.frobenius_norm / found.sigma_max) ** 2
    facts["entropy_rank"] = PARTIAL
    if values is not None:
        relative = values / values[0]
        above = {str(t): int((relative > t).sum()) for t in THRESHOLDS if str(t) != "0.01"}
        ranks |= above
        facts["entropy_rank"] = float(torch.special.entr(relative / relative.sum()).sum().exp())
    return facts | {"effective_ranks": ranks}


def _null(shape: tuple[int, int], found: spectra.Vitals) -> dict[str, Any]:
    """Kappa against that of a random matrix of this shape."""
    names = "null_z", "null_tail", "null_condition_number"
    kappa = found.condition_number
    if min(shape) <= 1:
        return dict.fromkeys(names, _Absent("no more than one singular value"))
    null = GaussianNull(*shape)
    usual = {names[2]: math.exp(null.log_condition_number)}
    if kappa is None or math.isinf(kappa):
        return usual | dict.fromkeys(names[:2], _Absent("kappa is not finite"))
    return usual | {names[0]: float(null.z(kappa)), names[1]: float(null.tail(kappa))}


def _spectrum(
    shape: tuple[int, int], found: spectra.Vitals, values: Tensor | None
) -> dict[str, Any]:
    """What needs all singular values: the tail's exponent, outliers, distance from chance."""
    names = "alpha", "alpha_xmin", "alpha_distance", "alpha_count"
    facts: dict[str, Any] = dict.fromkeys((*names, "outliers", "null_distance"), PARTIAL)
    if not found.frobenius_norm:
        zero = ZERO if found.frobenius_norm == 0 else RANGE
        return dict.fromkeys((*facts, "edge"), zero)
    deviation = found.frobenius_norm / math.sqrt(shape[0] * shape[1])
    null = MarchenkoPastur(*shape)
    facts["edge"] = null.edges[1] * deviation
    if values is None:
        return facts
    in_units = (values / deviation).numpy(force=True)  # of chance; nothing squared overflows
    facts["outliers"] = int((in_units > _limit(shape) * null.edges[1]).sum())
    facts["null_distance"] = _kolmogorov(null, in_units[::-1])
    squares = values.square().numpy(force=True)
    if not 0 < squares[0] < math.inf:
        return facts | dict.fromkeys(names, RANGE)
    fitted = tails.power_law(squares)
    if isinstance(fitted, str):
        return facts | dict.fromkeys(names, _Absent(fitted))
    tail = fitted.alpha, fitted.xmin, fitted.distance, fitted.count
    return facts | dict(zip(names, tail, strict=True))


def _limit(shape: tuple[int, int]) -> float:
    """How far above the edge the largest value of a random matrix gets one time in a thousand.

    Johnstone 2001: the largest square is Tracy and Widom's about the squared edge.
    """
    m, n = math.sqrt(shape[0]), math.sqrt(shape[1])
    return math.sqrt(1 + max(0.0, _tracy_widom()) * np.cbrt(1 / m + 1 / n) / (m + n))


@cache
def _tracy_widom() -> float:
    steps = 2**30  # of the way from 0 to 8; to load scipy.optimize would take a quarter of a second
    place = bisect_left(
        range(steps), 1 - CHANCE, key=lambda k: float(tracy_widom_cdf(8 * k / steps))
    )
    return 8 * place / steps


def _kolmogorov(null: MarchenkoPastur, ascending: np.ndarray[Any, Any]) -> float:
    """The largest difference of the two distribution functions."""
    law = null.cdf(ascending)
    steps = np.arange(len(law) + 1) / len(law)
    return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def _errors(
    matrix: Tensor, found: spectra.Vitals, reference: Tensor | None, complete: bool
) -> dict[str, float | _Absent] | _Absent | None:
    """The errors of the components against the reference."""
    if reference is None:
        return None
    if reference.shape != matrix.shape:
        shapes = f"{tuple(reference.shape)}, not {tuple(matrix.shape)}"
        return _Absent(Unlike(f"the reference has another shape: {shapes}"))
    theirs = spectra.vitals(reference, complete=complete)
    if Status(theirs.status).failed:
        return _Absent(f"the reference {theirs.status}")
    both = components.errors(_known(matrix, found), _known(reference, theirs))
    absent = {name: _Absent(_single(why)) for name, why in both.absent.items()}
    if any(one.singular_values is None and one.sigma_max for one in (found, theirs)):
        absent["singular_values"] = PARTIAL
    if len(absent) == len(both):  # to a matrix of zeros nothing is relative
        return absent["overall_matrix"]
    return {name: absent.get(name, float(error)) for name, error in both.items()}


def _single(reason: str) -> str:
    """Why an error is absent, of one matrix and in the words of a diagnosis."""
    return reason.removesuffix(" (1 of 1)").replace("target", "reference")


def _known(matrix: Tensor, found: spectra.Vitals) -> Components:
    """Components that are not factorized again; without their singular values if none are known."""
    result = Components(matrix)
    for name in Components.names:
        value = getattr(found, name)
        known = torch.nan if value is None else value
        vars(result)[name] = torch.as_tensor(known, dtype=torch.float64)
    if found.singular_values is None:
        unknown = 0.0 if found.sigma_max == 0 else torch.nan
        vars(result)["singular_values"] = torch.full((min(matrix.shape),), unknown)
    vars(result)["_values"] = torch.zeros(1)  # asked for nothing but whether they are finite
    return result


def _plot(shape: tuple[int, int], found: spectra.Vitals, values: Tensor | None) -> dict[str, Any]:
    """What is drawn: points of the spectrum and of chance's, the floor, bars of row norms."""
    drawn: dict[str, Any] = {"spectrum": [], "null": [], "floor": found.resolution, "rows": None}
    rows = found.row_norms
    if rows is not None and len(rows):
        drawn["rows"] = _bars(rows.numpy(force=True))
    if values is None or not found.frobenius_norm:
        return drawn
    indices = _indices(len(values))
    null = _curve(*shape) * found.frobenius_norm / math.sqrt(shape[0] * shape[1])
    drawn["spectrum"] = [[int(i) + 1, float(values[i])] for i in indices]
    drawn["null"] = [[int(i) + 1, float(x)] for i, x in zip(indices, null, strict=True)]
    return drawn


def _bars(norms: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    largest = norms.max() or 1.0
    relative = norms / largest
    limits = min(relative.min(), 1 - 1e-6), 1.0  # norms that are all the same fall into one bar
    counts, edges = np.histogram(relative, bins=min(BARS, len(norms)), range=limits)
    return {"edges": (edges * largest).tolist(), "counts": counts.tolist()}


def _indices(count: int) -> np.ndarray[Any, Any]:
    return np.unique(np.geomspace(1, count, POINTS).round().astype(int)) - 1


@cache
def _curve(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Marchenko and Pastur's singular values of a random matrix with entries of deviation one."""
    indices, size = _indices(min(rows, columns)), min(rows, columns)
    return MarchenkoPastur(rows, columns).quantile(1 - (indices + 0.5) / size)
