"""The row of one matrix: its components, what they are worth, and what chance would have given.

An :class:`Examination` holds numbers and text only, the same for a matrix from a checkpoint and one
in memory; :mod:`kappascope.clinic.examine` makes it. Rules, page, terminal and table read it as it
is, and :meth:`Examination.document` makes JSON of it. Every number is right to the digits of its
storage or ``None``, with the reason in ``reasons``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kappascope.clinic import SEVERITIES, Concern, Null, Severity
from kappascope.matrix import spectra
from kappascope.matrix.deltas import Delta
from kappascope.matrix.fingerprints import Fingerprints
from kappascope.matrix.rounding import Int8Errors
from kappascope.matrix.status import Outcome, Status
from kappascope.model.skipped import Reason
from kappascope.text import number
from kappascope.theory import GaussianNull
from kappascope.theory.beyond import PartComparison


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

        >>> import torch
        >>> Spread.of(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        Spread(min=1.0, median=2.0, max=3.0, cv=0.408...)
        """
        largest = float(norms.max())
        relative = norms / largest if largest > 0 else norms
        mean = float(relative.mean())
        cv = float(relative.std(correction=0)) / mean if mean > 0 else None
        scaled, exponent = near_one(norms)  # lest the sum of the two in the middle overflow
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

        >>> from kappascope.model.skipped import unreadable
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
        >>> from dataclasses import replace
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

        >>> from kappascope.model.skipped import unreadable
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


def near_one(values: Tensor) -> tuple[Tensor, int]:
    """Return values over a power of two that brings the largest near one, and its exponent.

    >>> import torch
    >>> near_one(torch.tensor([6.0, 3.0]))
    (tensor([0.7500, 0.3750]), 3)
    """
    exponent = math.frexp(float(values.max()))[1]
    return spectra.ldexp(values, -exponent), exponent
