"""The row of one matrix: its components, what they are worth, and what chance would have given.

An :class:`Examination` holds numbers and text only, the same for a matrix from a checkpoint and one
in memory. Rules, page, terminal and table read it as it is, and :meth:`Examination.document` makes
JSON of it. Every number is right to the digits of its storage or ``None``, with the reason in
``reasons``.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.clinic import SEVERITIES, Concern, Extent, Null, Severity
from kappascope.matrix import components, powerlaw, precision, spectra
from kappascope.matrix.components import Components
from kappascope.matrix.convolutions import MOST_OPERATIONS, operator_norm
from kappascope.matrix.deltas import Delta, delta_between, delta_of_product
from kappascope.matrix.fingerprints import Fingerprints, fingerprints, likeness
from kappascope.matrix.precision import Rounding
from kappascope.matrix.rounding import Int8Errors, int8_errors, unchanged_share
from kappascope.matrix.status import Outcome, Status
from kappascope.matrix.waves import is_sinusoidal
from kappascope.model.skipped import Reason, ReasonKind, unreadable
from kappascope.text import error_text, number
from kappascope.theory import GaussianNull, MarchenkoPastur, tracy_widom_cdf
from kappascope.theory.beyond import PartComparison

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
class Spread:
    """Smallest, median and largest of some norms, and their coefficient of variation."""

    min: float
    median: float
    max: float
    cv: float | None  # none where the mean is zero

    @classmethod
    def of(cls, norms: Float[Tensor, " count"]) -> Spread:
        """Return the spread of at least one norm.

        >>> Spread.of(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        Spread(min=1.0, median=2.0, max=3.0, cv=0.408...)
        """
        largest = float(norms.max())
        relative = norms / largest if largest > 0 else norms
        mean = float(relative.mean())
        cv = float(relative.std(correction=0)) / mean if mean > 0 else None
        scaled, exponent = _scaled(norms)  # lest the sum of the two in the middle overflow
        ordered, count = scaled.sort().values, len(norms)
        median = float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return cls(float(norms.min()), math.ldexp(median, exponent), largest, cv)


@dataclass(frozen=True)
class Finding:
    """What one rule says of one matrix, of a product, or of the model.

    ``advice`` is what can be done with the file as it is, ``training_advice`` what to try if it is
    trained on, with the ``correction`` and a ``snippet`` that attaches it. ``concern`` is the class
    by which findings are ordered, ``harm`` a share that is lost or wasted (of bits, energy or
    parameters), and ``null`` what the rule compares with.

    >>> Finding("zero", "info", "fc.weight", "all entries are zero", "check that it is trained")
    Finding(rule='zero', severity='info', subject='fc.weight', evidence='all entries are zero', ...)
    """

    rule: str
    severity: Severity
    subject: str
    evidence: str
    advice: str
    correction: str | None = None
    snippet: str = ""
    concern: Concern = "observation"
    harm: float | None = None
    null: Null = "none"
    training_advice: str = ""


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


@dataclass(frozen=True)
class Examination:
    """All that is known of one matrix; ``reasons`` says why a field is ``None``.

    The fields are those of the JSON document, in its order, except the last four: ``failure`` says
    why nothing could be measured, ``uncompared`` why there are no errors against the reference,
    ``is_singular`` that the condition number is infinite, and ``faults`` which numbers could not
    be computed by an error of ours.

    >>> row = Examination("w", (1, 9), "float32", "ok", condition_number=1.0, resolved=True)
    >>> row.ratio, row.severity, row.failure
    (1.0, '', None)
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
    taps: tuple[int, ...] = ()
    row_norms: Spread | None = None
    column_norms: Spread | None = None
    dead_rows: int | None = None
    dead_columns: int | None = None
    outlier_rows: int | None = None
    outlier_columns: int | None = None
    lines: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    int8: Int8Errors | None = None
    sinusoidal: bool = False
    one_code: bool = False
    entry_mean: float | None = None
    entry_std: float | None = None
    entry_kurtosis: float | None = None
    negligible: float | None = None
    sigma_max: float | None = None
    sigma_2: float | None = None
    sigma_min: float | None = None
    condition_number: float | None = None
    condition_number_low: float | None = None
    condition_number_high: float | None = None
    resolved: bool = False
    effective_rank: int | None = None
    effective_ranks: Mapping[str, int | None] = field(default_factory=dict)
    energy_ranks: Mapping[str, int | None] = field(default_factory=dict)
    operator_norm: Mapping[str, Any] = field(default_factory=dict)
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
    unchanged: Mapping[str, float] = field(default_factory=dict)
    likeness: str = ""
    fingerprints: Fingerprints | None = None
    delta: Delta | None = None
    unlearned: tuple[PartComparison, ...] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    plot: Mapping[str, Any] = field(default_factory=dict, repr=False)
    findings: tuple[Finding, ...] = ()
    failure: Reason | None = None
    uncompared: Reason | None = None
    is_singular: bool = False
    faults: tuple[str, ...] = ()

    @classmethod
    def failed(cls, name: str, shape: tuple[int, int], dtype: str, failure: Reason) -> Examination:
        """Return the row of a matrix of which nothing could be measured.

        >>> Examination.failed("w", (2, 2), "float32", unreadable("timeout")).status
        'failed: timeout'
        """
        status = Status(Outcome.FAILED, str(failure))
        return cls(name, shape, dtype, status, failure=failure)

    @property
    def parameters(self) -> int:
        """The number of its entries."""
        return self.shape[0] * self.shape[1]

    @property
    def inputs(self) -> int:
        """The number of its inputs, each of which has as many columns as a kernel has taps."""
        return self.shape[1] // max(1, math.prod(self.taps))

    @property
    def is_unresolved(self) -> bool:
        """Whether rounding to the stored dtype alone could give such a condition number."""
        is_zero = self.frobenius_norm == 0  # which has no condition number to be resolved
        return not self.resolved and self.failure is None and not is_zero

    @property
    def is_bounded(self) -> bool:
        """Whether of the condition number no more is known than the least that it can be."""
        return self.is_unresolved or self.condition_number is None

    @property
    def kappa(self) -> float | None:
        """The condition number, infinite for a singular matrix, or the least that it can be.

        >>> row = Examination("w", (3, 3), "float32", "ok", condition_number=900.0)
        >>> row.resolved, replace(row, condition_number_low=30.0).kappa
        (False, 30.0)
        """
        if self.condition_number is not None and not self.is_bounded:
            return self.condition_number
        infinite = math.inf if self.is_singular else None
        return infinite if self.condition_number_low is None else self.condition_number_low

    @property
    def kappa_text(self) -> str:
        """The condition number as a reader wants it, or the least that it can be.

        >>> Examination("w", (3, 3), "", "ok", condition_number_low=9.0).kappa_text
        '≥ 9.00'
        """
        is_least = self.is_bounded and self.kappa not in (None, math.inf)
        return f"≥ {number(self.kappa)}" if is_least else number(self.kappa)

    @cached_property
    def ratio(self) -> float | None:
        """The condition number, or its least, over that of a random matrix of this shape.

        This ratio means the same for a square and for a long matrix, which z does not: long random
        matrices have almost one and the same condition number.
        """
        if not self.kappa or min(self.shape) < 1:
            return None
        usual = self.null_condition_number  # a tenth of a second where it is not known
        return self.kappa / (usual or math.exp(GaussianNull(*self.shape).log_condition_number))

    @property
    def moved(self) -> float | None:
        """How far it is from its counterpart in the reference, over the norm of that one."""
        return (self.errors or {}).get("overall_matrix")

    @property
    def severity(self) -> str:
        """The severity of the worst finding, or nothing."""
        return max(
            (finding.severity for finding in self.findings), key=SEVERITIES.index, default=""
        )

    @property
    def is_alarming(self) -> bool:
        """Whether it failed, or a rule found something to act on or to warn of."""
        found = any(one.concern != "observation" or one.severity != "info" for one in self.findings)
        return found or self.failure is not None

    @property
    def gravity(self) -> int:
        """The severity of the worst finding as a number, 0 without findings."""
        return max((SEVERITIES.index(finding.severity) + 1 for finding in self.findings), default=0)

    @property
    def badness(self) -> tuple[bool, int, bool, float]:
        """The key that sorts by failure, then by the worst finding, then by distance from chance.

        What the stored digits resolve comes before what they leave open.

        >>> sick = Examination.failed("a", (2, 2), "float32", unreadable("timeout"))
        >>> sick.badness > Examination("b", (2, 2), "", "ok", condition_number=1e9).badness
        True
        """
        return self.failure is not None, self.gravity, not self.is_unresolved, self.ratio or 0.0

    def document(self, plots: bool = False) -> dict[str, Any]:
        """Return the row as strict JSON values.

        >>> Examination("w", (3, 3), "float32", "ok", sigma_max=2.0).document()["shape"]
        [3, 3]
        """
        absent = {"failure", "uncompared", "is_singular", "faults", *(() if plots else ("plot",))}
        absent |= {name for name in OPTIONAL if not getattr(self, name)}
        if self.errors is None and "errors" not in self.reasons:  # there was no reference
            absent.add("errors")
        if self.unlearned is None and "unlearned" not in self.reasons:  # nobody asked
            absent.add("unlearned")
        names = (field.name for field in fields(self) if field.name not in absent)
        return {name: json_value(getattr(self, name)) for name in names}


# What only some matrices have, with no reason to be given for the others.
OPTIONAL = ("taps", "lines", "int8", "sinusoidal", "one_code", "energy_ranks", "operator_norm",
            "unchanged", "likeness", "fingerprints", "delta", "negligible")  # fmt: skip


def json_value(value: Any) -> Any:
    """Return a value in the types of strict JSON; what is infinite becomes ``None``.

    >>> json_value({"kappa": math.inf, "values": (1.0, math.nan)})
    {'kappa': None, 'values': [1.0, None]}
    """
    if isinstance(value, Spread | Finding | Int8Errors | Fingerprints | Delta | PartComparison):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, str):
        return str(value)  # and not a type of ours
    if isinstance(value, Sequence):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
            scaled, _ = _scaled(norms)  # lest a limit be beyond float64's range
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
    scaled, exponent = _scaled(columns.unflatten(0, (-1, kernel.size)))
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


def _scaled(values: Tensor) -> tuple[Tensor, int]:
    """Return values over a power of two that brings the largest near one, and its exponent."""
    exponent = math.frexp(float(values.max()))[1]
    return spectra.ldexp(values, -exponent), exponent


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
    """Return components that need no second factorization.

    Singular values are NaN where unknown.
    """
    result = Components(matrix)
    for name in Components.names:
        value = getattr(vitals, name)
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
