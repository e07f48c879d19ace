"""Measure one matrix: its components, norms and entries, and how they compare with chance.

Each group of numbers is measured by a function of its own, and an error in one costs that group
alone. A number that does not exist, or was not asked for, is absent with its reason.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.clinic import Extent
from kappascope.clinic.examination import Examination, Spread, near_one
from kappascope.matrix import components, powerlaw, precision, spectra
from kappascope.matrix.components import Components
from kappascope.matrix.convolutions import MOST_OPERATIONS, operator_norm
from kappascope.matrix.deltas import delta_between, delta_of_product
from kappascope.matrix.fingerprints import fingerprints, likeness
from kappascope.matrix.precision import Rounding
from kappascope.matrix.rounding import int8_errors, unchanged_share
from kappascope.matrix.status import Outcome
from kappascope.matrix.waves import is_sinusoidal
from kappascope.model.skipped import Reason, ReasonKind, unreadable
from kappascope.text import error_text
from kappascope.theory import GaussianNull, MarchenkoPastur, tracy_widom_cdf

AUTO_LIMIT = 2048  # singular values up to which "auto" takes them all: about half a second
THRESHOLDS = (0.001, 0.01, 0.1)  # of the effective rank; the middle one is the paper's
ENERGIES = (0.9, 0.99, 0.999)  # of the squared singular values, at which a matrix is truncated
MOST_LISTED = 256  # indices of dead and outlying lines: more are counted, not named
PLOT_POINTS = 256  # of a spectrum, evenly spaced in the logarithm of the index: all that is seen
PLOT_BARS = 32  # of the histogram of row norms
DEAD_BELOW = 1e-6  # of the median norm: such a row adds nothing to bfloat16 or float16 sums
OUTLIER_DEVIATIONS = 6.0  # robust deviations from the median, and twice the median at least
PANEL_ENTRIES = 2**20  # numbers looked at together: eight megabytes in float64
OUTLIER_CHANCE = 1e-3  # that the largest singular value of a random matrix exceeds its limit


@dataclass(frozen=True)
class Kernel:
    """How the columns of a matrix are the taps of a convolution.

    >>> Kernel((3, 3)).size
    9
    """

    taps: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()  # where it is known
    groups: int = 1
    depthwise: bool = False  # a group for every row

    @property
    def size(self) -> int:
        """The number of columns that belong to one input."""
        return math.prod(self.taps)


NO_KERNEL = Kernel()


def examine(
    name: str,
    matrix: Tensor,
    spectrum: Extent = "auto",
    reference: Tensor | None = None,
    *,
    rounding: Rounding | None = None,
    kernel: Kernel = NO_KERNEL,
    limit: int | None = None,
) -> Examination:
    """Measure one matrix, and its errors against a reference of its shape if there is one.

    ``rounding`` tells how well a matrix is known that was decoded, ``limit`` the rank that the
    factors of a product allow.

    >>> found = examine("eye", torch.eye(4))
    >>> found.condition_number, found.effective_rank, found.stable_rank, found.spectral_gap
    (1.0, 4, 4.0, 0.0)
    >>> found.reasons["alpha"]
    'all 4 eigenvalues are equal'
    >>> examine("bad", torch.tensor([[math.nan, 1.0]])).status
    'failed: non-finite (1 of 2), first at [0, 0]'
    """
    complete = spectrum == "full" or (spectrum == "auto" and min(matrix.shape) <= AUTO_LIMIT)
    vitals = spectra.vitals(matrix, complete=complete, rounding=rounding)
    shape, dtype = (matrix.shape[0], matrix.shape[1]), str(matrix.dtype).removeprefix("torch.")
    if vitals.status.outcome is Outcome.FAILED:
        failure = non_finite_entries(matrix) or unreadable(vitals.status.reason)
        row = Examination.failed(name, shape, dtype, failure)
        return replace(row, storage=vitals.storage, method=vitals.method)
    values = vitals.singular_values
    faults: list[str] = []
    missing = RANGE if complete else PARTIAL  # why there is no list of singular values
    norms = _guarded(NORMS, faults, _norms, vitals, kernel)
    numbers = {
        **{name: it for name, it in norms.items() if name != "apart"},
        **_guarded(ENTRIES, faults, _entries, matrix, vitals),
        **_guarded(EXTREMES, faults, _extremes, vitals),
        **_guarded(RANKS, faults, _ranks, vitals, values, missing),
        **_guarded(NULL, faults, _null, shape, vitals),
        **_guarded(SPECTRUM, faults, _spectrum, shape, vitals, values, missing),
        **_guarded(("errors",), faults, _errors, matrix, vitals, reference, complete),
        **_guarded(("int8", "fingerprints"), faults, _stored, matrix, norms.get("apart")),
        **_guarded((), faults, _operator, matrix, kernel, spectrum),
        **_guarded((), faults, _unchanged, matrix, vitals, reference),
        **_guarded((), faults, _delta, matrix, values, reference, limit),
    }
    if kernel.depthwise:
        numbers |= dict.fromkeys((*MAPS, *ENDS[1:]), DEPTHWISE) | {"resolved": True}
        numbers |= {"effective_ranks": {}, "energy_ranks": {}}
    if limit is not None and limit < min(shape):
        numbers |= dict.fromkeys((*KAPPAS, *NULL, *SPECTRUM, "sigma_min"), LOW_RANK)
        numbers |= {"resolved": True}
    errors = numbers["errors"]
    return Examination(
        name=name,
        shape=shape,
        dtype=dtype,
        status=vitals.status,
        storage=vitals.storage,
        method=vitals.method,
        taps=kernel.taps,
        **_present(numbers),
        reasons=dict(_reasons(numbers)),
        plot=_guarded(("plot",), faults, _plot, shape, vitals, values, kernel),
        uncompared=Reason(errors.kind, errors.reason) if isinstance(errors, _Absent) else None,
        is_singular=numbers["condition_number"] is SINGULAR,
        faults=tuple(faults),
    )


NORMS = "row_norms", "dead_rows", "outlier_rows", "column_norms", "dead_columns", "outlier_columns"
ENTRIES = "entry_mean", "entry_std", "entry_kurtosis"
NULL = "null_z", "null_tail", "null_condition_number"
TAIL = "alpha", "alpha_xmin", "alpha_distance", "alpha_count"
SPECTRUM = (*TAIL, "outliers", "null_distance", "edge")
RANKS = "stable_rank", "entropy_rank"
ENDS = "frobenius_norm", "sigma_max", "sigma_2", "sigma_min", "spectral_gap"
KAPPAS = "condition_number", "condition_number_low", "condition_number_high"
EXTREMES = (*ENDS, *KAPPAS)
MAPS = (*KAPPAS, "effective_rank", *RANKS, *NULL, *SPECTRUM)  # what only a map of its shape has


def _guarded(
    names: Sequence[str], faults: list[str], measure: Callable[..., dict[str, Any]], *given: Any
) -> dict[str, Any]:
    """Measure some numbers of a matrix; an error costs these alone, with itself as the reason."""
    try:
        return measure(*given)
    except (MemoryError, RuntimeError):  # of torch, for want of memory: the whole is tried anew
        raise
    except Exception as error:
        reason = error_text(error)
        what = ", ".join(names) or measure.__name__.strip("_")
        faults.append(f"{what} not computed: {reason}")
        return {} if names == ("plot",) else dict.fromkeys(names, _Absent(reason))


@dataclass(frozen=True)
class _Absent:
    """Stands for a number that does not exist, or was not asked for."""

    reason: str
    kind: ReasonKind = ReasonKind.UNREADABLE


def _present(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with ``None`` for what is absent, also inside."""
    pairs = ((name, _present(it) if isinstance(it, dict) else it) for name, it in numbers.items())
    return {name: None if isinstance(it, _Absent) else it for name, it in pairs}


def _reasons(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Say why numbers are absent; those inside a field are called ``field.name``."""
    for name, it in numbers.items():
        inside = {"cv": ZERO} if isinstance(it, Spread) and it.cv is None else it
        if isinstance(it, _Absent):
            yield name, it.reason
        elif isinstance(inside, dict):
            yield from ((f"{name}.{key}", why) for key, why in _reasons(inside))


RANGE = _Absent("outside float64's range")
EMPTY = _Absent("empty matrix")
ZERO = _Absent("zero matrix")
SINGULAR = _Absent("infinite: the smallest singular value cannot be told from zero")
OUTLYING = _Absent("nothing but zeros beside outlying lines")
PARTIAL = _Absent("needs all singular values: --spectrum full")
LOW_RANK = _Absent("a product of factors, of low rank by design")
DEPTHWISE = _Absent("a depthwise kernel is a filter for each channel, no map of this shape")


def non_finite_entries(tensor: Tensor) -> Reason | None:
    """Tell how many entries of a tensor are NaN or infinite, and where the first is.

    None if all are.

    >>> non_finite_entries(torch.tensor([1.0, math.nan, -math.inf]))
    'non-finite (2 of 3), first at [1]'
    >>> non_finite_entries(torch.ones(2, 2))
    """
    if tensor.is_meta:  # saved or made without values
        return None
    rows = torch.atleast_1d(tensor)
    height = max(1, PANEL_ENTRIES * len(rows) // max(1, tensor.numel()))
    bad = minus = 0
    first: list[int] = []
    for top, panel in enumerate(rows.split(height)):
        exact = panel.double()
        broken = ~exact.isfinite()
        if broken.any() and not first:
            first = broken.nonzero()[0].tolist()
            first[0] += top * height
        bad, minus = bad + int(broken.sum()), minus + int(exact.isneginf().sum())
    text = f"non-finite ({bad} of {tensor.numel()}), first at {first}"
    if bad and bad == minus:
        return Reason(ReasonKind.MINUS_INFINITY, f"{text}, all minus infinity")
    return Reason(ReasonKind.NON_FINITE, text) if bad else None


def _norms(vitals: spectra.Vitals, kernel: Kernel) -> dict[str, Any]:
    """Return the spread of the norms, and the counts of dead and outlying rows and columns.

    The columns of a convolution are its inputs: the taps of one are taken together. A depthwise
    kernel has one input, so that its columns have nothing to be compared with.
    """
    rows, columns = vitals.row_norms, _input_norms(vitals.column_norms, kernel)
    numbers: dict[str, Any] = {}
    lines: dict[str, tuple[int, ...]] = {}
    apart = {}
    for side, norms, others in (("row", rows, columns), ("column", columns, rows)):
        names = f"{side}_norms", f"dead_{side}s", f"outlier_{side}s"
        if norms is None or others is None:
            numbers |= dict.fromkeys(names, RANGE)
        elif not len(norms):
            numbers |= dict.fromkeys(names, EMPTY)
        else:
            scaled, _ = near_one(norms)  # lest a limit be beyond float64's range
            dead = scaled <= DEAD_BELOW * scaled.median()
            beyond = scaled > outlying(scaled, len(others) * kernel.size)
            counts = int(dead.sum()), int(beyond.sum())
            numbers |= dict(zip(names, (Spread.of(norms), *counts), strict=True))
            listed = {names[1]: dead, names[2]: beyond}
            lines |= {name: _indices_of(mask, norms) for name, mask in listed.items() if mask.any()}
            apart[side] = beyond.repeat_interleave(kernel.size) if side == "column" else beyond
    return numbers | {"lines": lines, "apart": apart if len(apart) == 2 else None}


def _input_norms(columns: Tensor | None, kernel: Kernel) -> Tensor | None:
    """Return the norms of columns, those of the taps of one input taken together."""
    if columns is None or kernel.size < 2 or not len(columns):
        return columns
    scaled, exponent = near_one(columns.unflatten(0, (-1, kernel.size)))
    return spectra.ldexp(torch.linalg.vector_norm(scaled, dim=1), exponent)


def _indices_of(mask: Tensor, norms: Tensor) -> tuple[int, ...]:
    """Return the indices of lines, the longest line first, as many as are worth naming."""
    indices = mask.nonzero().flatten()
    order = norms[indices].argsort(descending=True, stable=True)[:MOST_LISTED]
    return tuple(indices[order].tolist())


def _stored(matrix: Tensor, apart: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return what only the entries tell: rounding to int8, waves, and their fingerprints."""
    found: dict[str, Any] = {"fingerprints": fingerprints(matrix)}
    if not matrix.any():
        return found | {"int8": ZERO if matrix.numel() else EMPTY}
    found["sinusoidal"] = is_sinusoidal(matrix)
    if apart is None:
        return found | {"int8": RANGE}
    return found | {"int8": int8_errors(matrix, apart["row"], apart["column"]) or OUTLYING}


def _operator(matrix: Tensor, kernel: Kernel, spectrum: Extent) -> dict[str, Any]:
    """Bound the norm of a convolution as a map of signals; nothing where that takes too long."""
    if kernel.size < 2 or not matrix.any():
        return {}
    weight = matrix.unflatten(1, (-1, *kernel.taps))
    stride, groups = kernel.stride or 1, len(matrix) if kernel.depthwise else kernel.groups
    most = math.inf if spectrum == "full" else MOST_OPERATIONS
    norm = operator_norm(weight, stride, groups, most)
    if norm is None:
        return {}
    known = "stride as in the module" if kernel.stride else "stride 1 assumed"
    assumed = f"{known}; signals without end, or padded with zeros"
    return {"operator_norm": {"low": norm.low, "high": norm.high, "assumed": assumed}}


def _unchanged(matrix: Tensor, vitals: spectra.Vitals, reference: Tensor | None) -> dict[str, Any]:
    """Compare the entries with those of the reference one by one, or in another order."""
    if reference is None or non_finite_entries(reference):
        return {}
    alike = likeness(fingerprints(matrix), fingerprints(reference))
    if reference.shape != matrix.shape or alike:
        return {"likeness": alike}
    dtypes = precision.storage_dtype(matrix), precision.storage_dtype(reference)
    coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    shares = unchanged_share(reference, matrix, coarse)
    return {"unchanged": dict(zip(("share", "expected"), shares, strict=True))} if shares else {}


def _delta(
    matrix: Tensor, values: Tensor | None, reference: Tensor | None, limit: int | None
) -> dict[str, Any]:
    """Count the directions of a change: of a product of factors, or since the reference."""
    if limit is not None and values is not None and len(values):
        return {"delta": delta_of_product(values, (matrix.shape[0], matrix.shape[1]), limit)}
    if reference is None or reference.shape != matrix.shape or values is None:
        return {}
    if non_finite_entries(reference) or min(matrix.shape) < 2:
        return {}
    return {"delta": delta_between(reference, matrix)}


def outlying(norms: Float[Tensor, " count"], length: int) -> float:
    """Return the norm above which a vector of this length is an outlier among the others.

    Robust: from the median and the median deviation, which half the vectors would have to be
    outliers to move, and never narrower than chance makes norms of ``length`` normal entries.

    >>> outlying(torch.ones(9, dtype=torch.float64), length=2)
    4.0
    """
    middle = float(norms.median())
    deviation = 1.4826 * float((norms - middle).abs().median())  # of a normal sample
    chance = middle / math.sqrt(2 * max(length, 1))
    return max(middle + OUTLIER_DEVIATIONS * max(deviation, chance), 2 * middle)


def _entries(matrix: Tensor, vitals: spectra.Vitals) -> dict[str, Any]:
    """Mean, deviation and excess kurtosis of the entries, from one pass in panels."""
    names = ENTRIES
    if not vitals.frobenius_norm or not matrix.numel():
        return dict.fromkeys(names, RANGE if vitals.frobenius_norm is None else ZERO)
    rms = vitals.frobenius_norm / math.sqrt(matrix.numel())
    sums, negligible = torch.zeros(4, dtype=torch.float64), 0
    for panel in matrix.split(max(1, 2**16 // matrix.shape[1])):  # half a megabyte: in cache
        x = panel.double().flatten() / rms
        square = x * x
        sums += torch.stack([x.sum(), square.sum(), square @ x, square @ square])
        negligible += int((square < DEAD_BELOW**2).sum())
    m1, m2, m3, m4 = (sums / matrix.numel()).tolist()
    variance = m2 - m1 * m1
    if variance < 1e-12:  # of a mean square of 1: rounding is all that is left
        equal = _exact(m1 * rms), 0.0, _Absent("all entries equal")
        return dict(zip(names, equal, strict=True))
    fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4
    values = _exact(m1 * rms), _exact(math.sqrt(variance) * rms), fourth / variance**2 - 3
    share = {"negligible": negligible / matrix.numel()} if negligible else {}
    return dict(zip(names, values, strict=True)) | share


def _exact(value: float) -> float | _Absent:
    """Return the value, unless float64 cannot hold all its digits."""
    return value if value == 0 or sys.float_info.min <= abs(value) < math.inf else RANGE


def _extremes(vitals: spectra.Vitals) -> dict[str, Any]:
    """Return the ends of the spectrum and kappa.

    An infinite kappa is absent, with its own reason.
    """
    numbers: dict[str, Any] = {}
    for name in EXTREMES:
        value = getattr(vitals, name)
        numbers[name] = _Absent(vitals.status.reason) if value is None else value
        if name in KAPPAS and value == math.inf:
            numbers[name] = SINGULAR
    return numbers | {"resolved": vitals.resolved}


def _ranks(vitals: spectra.Vitals, values: Tensor | None, missing: _Absent) -> dict[str, Any]:
    """Return effective ranks at the thresholds, stable and entropy rank."""
    ranks: dict[str, Any] = dict.fromkeys(map(str, THRESHOLDS), missing)
    ranks["0.01"] = vitals.effective_rank
    numbers: dict[str, Any] = {"effective_rank": vitals.effective_rank}
    if not vitals.sigma_max or vitals.frobenius_norm is None:
        absent = ZERO if vitals.sigma_max == 0 else RANGE
        return numbers | dict.fromkeys(("stable_rank", "entropy_rank"), absent)
    numbers["stable_rank"] = (vitals.frobenius_norm / vitals.sigma_max) ** 2
    numbers["entropy_rank"] = missing
    if values is not None:
        relative = values / values[0]
        above = {str(t): int((relative > t).sum()) for t in THRESHOLDS if str(t) != "0.01"}
        ranks |= above
        energy = relative.square().cumsum(0)
        # the smallest rank whose energy is that share of all
        numbers["energy_ranks"] = {
            str(share): int((energy < share * energy[-1]).sum()) + 1 for share in ENERGIES
        }
        numbers["entropy_rank"] = float(torch.special.entr(relative / relative.sum()).sum().exp())
    return numbers | {"effective_ranks": ranks}


def _null(shape: tuple[int, int], vitals: spectra.Vitals) -> dict[str, Any]:
    """Return kappa against that of a random matrix of this shape."""
    names = NULL
    kappa = vitals.condition_number
    if min(shape) <= 1:
        return dict.fromkeys(names, _Absent("no more than one singular value"))
    null = GaussianNull(*shape)
    usual = {names[2]: math.exp(null.log_condition_number)}
    if kappa is None or math.isinf(kappa):
        return usual | dict.fromkeys(names[:2], _Absent("kappa is not finite"))
    return usual | {names[0]: float(null.z(kappa)), names[1]: float(null.tail(kappa))}


def _spectrum(
    shape: tuple[int, int], vitals: spectra.Vitals, values: Tensor | None, missing: _Absent
) -> dict[str, Any]:
    """Measure what takes all singular values: tail exponent, outliers, distance from chance."""
    numbers: dict[str, Any] = dict.fromkeys(SPECTRUM, missing)
    if not vitals.frobenius_norm:
        zero = ZERO if vitals.frobenius_norm == 0 else RANGE
        return dict.fromkeys(numbers, zero)
    deviation = vitals.frobenius_norm / math.sqrt(shape[0] * shape[1])
    null = MarchenkoPastur(*shape)
    numbers["edge"] = _exact(null.edges[1] * deviation)
    if values is None:
        return numbers
    in_units = (values / deviation).numpy(force=True)  # of chance; nothing squared overflows
    numbers["outliers"] = int((in_units > _limit(shape) * null.edges[1]).sum())
    numbers["null_distance"] = _kolmogorov(null, in_units[::-1])
    squares = values.square().numpy(force=True)
    if not 0 < squares[0] < math.inf:
        return numbers | dict.fromkeys(TAIL, RANGE)
    fitted = powerlaw.power_law(squares)
    if isinstance(fitted, str):
        return numbers | dict.fromkeys(TAIL, _Absent(fitted))
    tail = fitted.alpha, fitted.xmin, fitted.distance, fitted.count
    return numbers | dict(zip(TAIL, tail, strict=True))


def _limit(shape: tuple[int, int]) -> float:
    """Tell how far above the edge the largest value of a random matrix gets one time in a thousand.

    Johnstone 2001: the largest square is Tracy and Widom's about the squared edge.
    """
    m, n = math.sqrt(shape[0]), math.sqrt(shape[1])
    return math.sqrt(1 + max(0.0, _tracy_widom_quantile()) * np.cbrt(1 / m + 1 / n) / (m + n))


@cache
def _tracy_widom_quantile() -> float:
    steps = 2**30  # of the way from 0 to 8; to load scipy.optimize would take a quarter of a second
    step = bisect_left(
        range(steps), 1 - OUTLIER_CHANCE, key=lambda k: float(tracy_widom_cdf(8 * k / steps))
    )
    return 8 * step / steps


def _kolmogorov(null: MarchenkoPastur, ascending: np.ndarray[Any, Any]) -> float:
    """Return the largest difference of the two distribution functions."""
    law = null.cdf(ascending)
    steps = np.arange(len(law) + 1) / len(law)
    return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def _errors(
    matrix: Tensor, vitals: spectra.Vitals, reference: Tensor | None, complete: bool
) -> dict[str, Any]:
    """Compare the components with those of the reference, if there is one."""
    if reference is None:
        return {"errors": None}
    if reference.shape != matrix.shape:
        shapes = f"{tuple(reference.shape)}, not {tuple(matrix.shape)}"
        text = f"the reference has another shape: {shapes}"
        return {"errors": _Absent(text, ReasonKind.NO_COUNTERPART)}
    theirs = spectra.vitals(reference, complete=complete)
    if theirs.status.outcome is Outcome.FAILED:
        return {"errors": _Absent(f"the reference {theirs.status}")}
    both = components.errors(_as_components(matrix, vitals), _as_components(reference, theirs))
    # of one matrix, and in the words of a diagnosis
    absent = {
        name: _Absent(why.removesuffix(" (1 of 1)").replace("target", "reference"))
        for name, why in both.absent.items()
    }
    if any(each.singular_values is None and each.sigma_max for each in (vitals, theirs)):
        absent["singular_values"] = PARTIAL
    if len(absent) == len(both):  # to a matrix of zeros nothing is relative
        return {"errors": absent["overall_matrix"]}
    return {"errors": {name: absent.get(name, float(error)) for name, error in both.items()}}


def _as_components(matrix: Tensor, vitals: spectra.Vitals) -> Components:
    """Return components that need no second factorization, but for those that vitals do not have.

    Singular values are NaN where unknown.
    """
    result, own = Components(matrix), Components(matrix)
    for name in Components.names:
        value = getattr(vitals, name) if hasattr(vitals, name) else getattr(own, name)
        known = torch.nan if value is None else value
        vars(result)[name] = torch.as_tensor(known, dtype=torch.float64)
    if vitals.singular_values is None:
        unknown = 0.0 if vitals.sigma_max == 0 else torch.nan
        vars(result)["singular_values"] = torch.full((min(matrix.shape),), unknown)
    vars(result)["_values"] = torch.zeros(1)  # asked for nothing but whether they are finite
    return result


def _plot(
    shape: tuple[int, int], vitals: spectra.Vitals, values: Tensor | None, kernel: Kernel
) -> dict[str, Any]:
    """Return what the page draws: spectrum, random curve, floor, and bars of both norms."""
    drawn: dict[str, Any] = {"spectrum": [], "null": [], "floor": vitals.resolution, "rows": None}
    columns = _input_norms(vitals.column_norms, kernel)
    for name, norms in (("rows", vitals.row_norms), ("columns", columns)):
        if norms is not None and len(norms):
            drawn[name] = _bars(norms.numpy(force=True))
    if values is None or not vitals.frobenius_norm:
        return drawn
    indices = _indices(len(values))
    with np.errstate(over="ignore"):
        null = _curve(*shape) * (vitals.frobenius_norm / math.sqrt(shape[0] * shape[1]))
    drawn["spectrum"] = [[int(i) + 1, float(values[i])] for i in indices]
    if not np.isfinite(null).all():  # beyond float64's range, as a curve above the values may be
        return drawn
    drawn["null"] = [[int(i) + 1, float(x)] for i, x in zip(indices, null, strict=True)]
    return drawn


def _bars(norms: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    largest = norms.max() or 1.0
    relative = norms / largest
    limits = min(relative.min(), 1 - 1e-6), 1.0  # norms that are all the same fall into one bar
    counts, edges = np.histogram(relative, bins=min(PLOT_BARS, len(norms)), range=limits)
    return {"edges": (edges * largest).tolist(), "counts": counts.tolist()}


@cache
def _indices(count: int) -> np.ndarray[Any, Any]:
    return np.unique(np.geomspace(1, count, PLOT_POINTS).round().astype(int)) - 1


@cache
def _curve(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return the singular values that Marchenko and Pastur give for unit deviation."""
    indices, size = _indices(min(rows, columns)), min(rows, columns)
    return MarchenkoPastur(rows, columns).quantile(1 - (indices + 0.5) / size)
