"""Singular values of dense matrices, all of them or the extremes, checked in float64.

With :mod:`kappascope.matrix._krylov` the only place that takes the singular values of a weight
(:mod:`kappascope.matrix.tracking` follows two of one that moves). Two questions, two answers:

- :func:`spectrum` gives every singular value: eigenvalues of the Gram matrix, which is two to four
  times faster than an SVD, with the few values that squaring would blur taken from a
  factorization of the matrix itself, and the plain SVD where there are many of those.
- :func:`vitals` gives everything but the list. On small matrices the extremes and the count come
  from the Gram matrix's tridiagonal form, by bisection. On large ones they come from two block
  Krylov spaces, of ``W'W`` and of its inverse through one LU or Cholesky factorization, in float32
  where that suffices. Every reported value is checked by a float64 residual. What cannot be
  verified in float32 is tried in float64 where the matrix is large; what cannot be verified at all
  is taken from the list of all values, and that, where squaring would blur it, from the plain SVD.

:func:`quick_vitals` is for whoever asks again and again: it gives the same numbers from a
tridiagonal form in float32 (:mod:`kappascope.matrix.ends`), as well verified, and singular vectors.

"Verified" means: each value is a singular value, by its residual; that nothing lies beyond it, or
was missed in counting, rests on random start blocks and guards against clusters. "Certified"
means that the effective rank was counted by Sylvester's law of inertia in float64 (of which Sturm's
count is a case) or from all values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from kappascope.matrix import _blas, _gram, _krylov, precision
from kappascope.matrix._gram import (
    ACCEPTED_ERROR,
    EPS,
    L2_CACHE_ENTRIES,
    PANEL_ROWS,
    POLISHED_VECTORS,
    TOLERANCE,
    Matrix,
    Panels,
    Unresolved,
)
from kappascope.matrix._krylov import (
    GRAM_BLURS_BELOW,
    INVERSE_FAILS_BELOW,
    MAX_COUNTED,
    Extremes,
    failures_unresolved,
)
from kappascope.matrix.ends import Ends, both_ends
from kappascope.matrix.status import OK, Outcome, Status
from kappascope.matrix.threads import steady
from kappascope.system.memory import is_out_of_memory
from kappascope.text import html_table, number

# --- which method a matrix gets -------------------------------------------------------------------


class Method(Enum):
    """The ways to the singular values of one matrix.

    >>> Method.SVD.value
    'plain SVD'
    """

    SVD = "plain SVD"
    STACKED_SVD = "plain SVD of a whole stack in one call of torch"
    GRAM = "eigenvalues of the Gram matrix from its tridiagonal form"
    TORCH_GRAM = "eigenvalues of the Gram matrix by torch"
    GRAM_IN_PLACE = "the first of these again, which needs no copy of the Gram matrix"
    BISECTION = "bisection of the Gram matrix's tridiagonal form"
    PIVOTS_THEN_BISECTION = "the same, unless the pivots of the Gram matrix say that it is in vain"
    KRYLOV = "Krylov spaces in float32, then in float64"
    KRYLOV_FLOAT32 = "Krylov spaces in float32 alone"


@dataclass(frozen=True)
class Limit:
    """A line of a table of methods: the one for matrices of up to so many columns, and why.

    >>> Limit(240, Method.SVD, "it is as fast as any other").columns
    240
    """

    columns: float  # of a tall matrix; a wide one is transposed first
    method: Method
    why: str


# The first line whose columns are enough is the method. The limits were measured with OpenBLAS.
ALL_VALUES = (
    Limit(128, Method.STACKED_SVD, "one call for a stack saves more than a faster library would"),
    Limit(240, Method.SVD, "it takes no longer than the Gram matrix's eigenvalues"),
    Limit(2048, Method.GRAM, "two to four times as fast as the SVD"),
    Limit(5792, Method.TORCH_GRAM, "up to 1.5 times as fast as scipy's, of a digit less"),
    Limit(math.inf, Method.GRAM_IN_PLACE, "where a copy counts, and torch would make one"),
)
EXTREMES = (
    Limit(240, Method.SVD, "it takes no longer than the ends of the Gram matrix's spectrum"),
    Limit(448, Method.PIVOTS_THEN_BISECTION, "pivots take a tenth of the time that is in vain"),
    Limit(1280, Method.BISECTION, "half the time of all values; Krylov spaces take longer"),
    Limit(1800, Method.KRYLOV_FLOAT32, "another try in float64 would cost as much as the SVD"),
    Limit(math.inf, Method.KRYLOV, "a few products and one factorization instead of an SVD"),
)
# Where a method cannot verify its answer, all values are taken; where squaring would blur these, or
# they cannot be verified either, the plain SVD. Two more conditions do not depend on columns alone:
MAX_COPY_BYTES = 2**28  # of a float64 copy; a larger matrix is read in panels of rows
QR_FROM_ROWS_PER_COLUMN = 1.2  # from which a QR factorization before the SVD saves time
MIN_QUICK_ENTRIES = 2**17  # from which float32 saves more time than it takes to correct it

# Beside the matrix itself :func:`vitals` and :func:`spectrum` hold at most (benchmarks/memory.py):
COPIES_OF_SMALL = 7  # of a matrix that is copied to float64: that copy, factors, Gram matrices
COPIES_OF_LARGE = 1  # in panels: one matrix in float64, or two in float32
SHORT_VECTORS = 3072  # as long as the shorter side: rows of panels, bases of Krylov spaces
LONG_VECTORS = 512  # as long as the longer side: images of a few vectors


def bytes_needed(shape: tuple[int, int]) -> int:
    """Return the most bytes that vitals or spectrum take, beside the matrix itself.

    For large matrices that is about one copy in float64. Benchmarks measure it, and
    ``docs/spectra.md`` has a figure for every size.

    >>> bytes_needed((16384, 16384)) / (8 * 16384**2) < 1.3
    True
    """
    least = least_bytes_needed(shape)
    copy = 8 * math.prod(shape)
    return least if copy >= MAX_COPY_BYTES else max(least, COPIES_OF_SMALL * copy)


def least_bytes_needed(shape: tuple[int, int]) -> int:
    """Return the same where memory is short, and small matrices are read in panels, too.

    >>> least_bytes_needed((5000, 5000)) < bytes_needed((5000, 5000))
    True
    """
    long, short = max(shape), min(shape)
    return 8 * (COPIES_OF_LARGE * short**2 + SHORT_VECTORS * short + LONG_VECTORS * long)


def _chosen(table: tuple[Limit, ...], columns: int) -> Method:
    """Return the method of a table for a tall matrix of so many columns."""
    return next(limit.method for limit in table if columns <= limit.columns)


BISECTED_BELOW = 1e-3  # of sigma_1: a Gram matrix's smaller values keep a digit more by bisection
SMALLEST_NORMAL = torch.finfo(torch.float64).smallest_normal  # below this float64 drops digits
THRESHOLD_MARGIN = 1e-9  # of the threshold: a value so near is counted from all values
SQUARES_VANISH_BELOW = 1e-140  # of the largest entry
INTEGERS = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64} | {
    torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

LinAlgError = _krylov.LinAlgError
"""What :func:`decomposition` raises."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """All singular values, largest first, and how far they can be trusted.

    ``values`` is empty when ``status`` says ``failed``.

    >>> Spectrum(torch.zeros(2), Status(Outcome.DEGENERATE, "zero matrix")).status
    'degenerate: zero matrix'
    """

    values: Float[Tensor, " rank"]
    status: Status


@dataclass(frozen=True, eq=False)
class Vitals:
    """Everything but the full list of singular values. ``None`` marks what is absent.

    ``status`` starts with ``ok``, ``degenerate`` or ``failed`` and gives the reason for what is
    absent or infinite; ``method`` names the factorizations behind the numbers. Where those gave all
    ``singular_values``, they are kept. ``resolution`` is how far rounding, in storage and in
    computing, may have moved any of them, beside the 1e-7 of its size that a fast method may miss.

    >>> found = vitals(torch.zeros(2, 3))
    >>> found.effective_rank, found.condition_number, found.status
    (0, None, 'degenerate: zero matrix, kappa is undefined')
    """

    row_norms: Tensor | None = field(default=None, repr=False)
    column_norms: Tensor | None = field(default=None, repr=False)
    frobenius_norm: float | None = None
    sigma_max: float | None = None
    sigma_2: float | None = None
    sigma_min: float | None = None
    condition_number: float | None = None
    condition_number_low: float | None = None
    condition_number_high: float | None = None
    resolved: bool = False
    effective_rank: int | None = None
    spectral_gap: float | None = None
    singular_values: Tensor | None = field(default=None, repr=False)
    resolution: float | None = None
    storage: str = ""
    status: Status = OK
    method: str = ""

    def _repr_html_(self) -> str:
        """Return a table of what is known, with what the storage leaves open of kappa."""
        ends = self.condition_number_low, self.condition_number_high
        text = number(self.condition_number, 4)
        if self.condition_number is not None and not self.resolved:
            text = f"not resolved: between {number(ends[0])} and {number(ends[1])}"
        numbers = {
            "σ, the largest": self.sigma_max,
            "σ, the second": self.sigma_2,
            "σ, the smallest": self.sigma_min,
            "spectral gap": self.spectral_gap,
            "Frobenius norm": self.frobenius_norm,
        }
        rows = [("condition number κ", text)]
        rows += [(label, number(value, 4)) for label, value in numbers.items()]
        rows.append(("σ > 1 %", "–" if self.effective_rank is None else str(self.effective_rank)))
        return html_table(f"Vitals: {self.status}", [*rows, ("method", self.method or "–")])


def spectrum(matrix: Tensor | ArrayLike) -> Spectrum:
    """Return all singular values of one matrix.

    >>> spectrum(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).values
    tensor([3., 2., 1.], dtype=torch.float64)
    >>> spectrum(torch.tensor([[1.0, float("nan")]])).status
    'failed: non-finite (1 of 2)'
    """
    a = _as_matrix(matrix)
    reason, values = _unusable(a), torch.empty(0, dtype=torch.float64, device="cpu")
    if not reason:
        values = singular_values(a) if 8 * a.numel() < MAX_COPY_BYTES else _values_of_large(a)
    if values.isnan().any():
        reason = "the SVD did not converge"
    elif _representable(values[:1]) is None:
        reason = "outside float64's range"
    if reason:
        return Spectrum(values[:0], Status(Outcome.FAILED, reason))
    if not values.any():
        what = f"{'zero' if a.numel() else 'empty'} matrix"
        return Spectrum(values, Status(Outcome.DEGENERATE, what))
    if few := int(((values > 0) & (values < SMALLEST_NORMAL)).sum()):
        detail = f"{few} subnormal in float64, with fewer digits"
        return Spectrum(values, Status(Outcome.OK, detail))
    return Spectrum(values, OK)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off inside: it would leave products a third of their digits.

    >>> with torch.autocast("cpu", torch.float16), without_autocast():
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    with contextlib.ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@steady
@without_autocast()
def vitals(
    matrix: Tensor | ArrayLike,
    certify: bool = False,
    threshold: float = 0.01,
    complete: bool = False,
    rounding: precision.Rounding | None = None,
) -> Vitals:
    """Norms, extreme singular values, kappa with its interval, and effective rank of one matrix.

    ``certify=True`` counts the singular values above ``threshold * sigma_1`` by inertia. What
    float64 cannot tell from zero never counts. ``complete=True`` takes all singular values.
    ``rounding`` tells how well a matrix is known that was decoded; other matrices are known as well
    as their dtype allows.

    >>> found = vitals(torch.diag(torch.tensor([4.0, 2.0, 1.0])))
    >>> found.condition_number, found.effective_rank, found.spectral_gap, found.status
    (4.0, 3, 0.5, 'ok: certified; values lie on the bfloat16 grid')
    """
    given = _as_matrix(matrix)
    check_threshold(threshold)
    wanted = _Wanted(threshold, certify, complete)
    if reason := _unusable(given):
        return Vitals(status=Status(Outcome.FAILED, reason), storage=_name(given.dtype))
    if given.numel() == 0:
        return _without_entries(given, "empty matrix")
    try:
        return _measured(given, _workable(given), wanted, rounding)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or 8 * given.numel() >= MAX_COPY_BYTES:
            raise
    return _measured(given, _in_panels(given), wanted, rounding)


@dataclass(frozen=True)
class _Wanted:
    """What the caller of :func:`vitals` asks for beside the ends of the spectrum."""

    threshold: float  # of sigma_1: larger values are counted for the effective rank
    certify: bool  # that count, by inertia
    complete: bool  # all singular values


def _measured(
    given: Tensor, scaled: tuple[Matrix, int], wanted: _Wanted, rounding: precision.Rounding | None
) -> Vitals:
    """Measure a finite matrix with entries, scaled by the power of two that comes with it."""
    a, exponent = scaled
    floating = given.dtype.is_floating_point and not rounding
    dtype = precision.storage_dtype(given) if floating else torch.float64
    if rounding:
        norms = _Norms.of(a, dtype, exponent)
        norms = replace(norms, rounding=math.ldexp(rounding.norm(), -exponent))
    else:
        norms = _norms(given, a, dtype, exponent)
    if norms.frobenius == 0:
        return _without_entries(given, "zero matrix, kappa is undefined")
    try:
        extremes = _non_zero_extremes(a, norms, wanted)
    except ArithmeticError as problem:
        return Vitals(status=Status(Outcome.FAILED, str(problem)), storage=_name(dtype))
    measured = _report(given, dtype if floating else given.dtype, norms, extremes, exponent)
    return replace(measured, storage=rounding.code) if rounding else measured


def _norms(given: Tensor, a: Matrix, dtype: torch.dtype, exponent: int) -> _Norms:
    """Measure norms, and what rounding to ``dtype`` amounts to, by a bound where entries repeat."""
    norms = _Norms.of(a, dtype, exponent)
    if precision.independent(given, dtype):
        return norms
    bound = precision.rounding_bound(a.split(PANEL_ROWS), dtype, exponent)
    return replace(norms, rounding=bound)


@steady
@without_autocast()
def quick_vitals(matrix: Shaped[Tensor, "out in"]) -> tuple[Vitals, Ends | None]:
    """Return what :func:`vitals` does, sooner, and the outermost singular vectors where found.

    Values are found in float32 and verified in float64, to the same eight digits. Where that fails,
    or would save no time, they are those of :func:`vitals`, and there are no vectors.

    >>> weight = torch.randn(512, 300, generator=torch.Generator().manual_seed(0))
    >>> quick, ends = quick_vitals(weight)
    >>> abs(quick.sigma_min / vitals(weight).sigma_min - 1) < 1e-7, ends.right.shape
    (True, torch.Size([300, 8]))
    """
    given = _as_matrix(matrix)
    bisected = Method.PIVOTS_THEN_BISECTION, Method.BISECTION
    suits = given.is_floating_point() and given.numel() >= MIN_QUICK_ENTRIES
    suits = suits and _chosen(EXTREMES, min(given.shape)) in bisected
    if not suits or given.device.type != "cpu" or _unusable(given):
        return vitals(given), None
    a, power = scaled_to_one(given)
    tall, exponent = a if a.shape[0] >= a.shape[1] else a.mT, int(power)
    try:
        extremes, ends = both_ends(tall, threshold=0.01)
    except ArithmeticError:
        return vitals(given), None
    dtype = precision.storage_dtype(given)
    measured = _report(given, dtype, _norms(given, a, dtype, exponent), extremes, exponent)
    ends = ends.scaled(exponent, given.dtype if given.dtype.itemsize > 4 else torch.float32)
    return measured, ends if tall is a else ends.transposed()


@steady
@without_autocast()
def singular_values(stack: Shaped[Tensor, "*stack out in"]) -> Float[Tensor, "*stack rank"]:
    """Return all singular values of each matrix of a stack, largest first, in float64.

    NaN where a matrix is not finite or its SVD does not converge.

    >>> singular_values(torch.eye(3).expand(2, 3, 3)).shape
    torch.Size([2, 3])
    """
    if stack.numel() == 0:
        return stack.new_zeros((*stack.shape[:-2], min(stack.shape[-2:])), dtype=torch.float64)
    a, exponent = scaled_to_one(stack)
    a = a if a.shape[-2] >= a.shape[-1] else a.mT
    finite = torch.isfinite(_largest_entry(stack))
    a[~finite] = 0.0
    values = _each_spectrum(a.reshape(-1, *a.shape[-2:])).reshape(*a.shape[:-2], -1)
    return torch.where(finite[..., None], ldexp(values, exponent[..., None]), torch.nan)


@steady
@without_autocast()
def decomposition(
    stack: Float[Tensor, "*stack out in"],
) -> tuple[Float[Tensor, "*stack out rank"], Float[Tensor, "*stack rank"], Tensor]:
    """Return the thin SVD ``u, s, vt`` of each matrix of a stack, in the stack's own precision.

    Raises :data:`LinAlgError` where there is none, as torch does not for infinite entries.

    >>> u, s, vt = decomposition(torch.diag(torch.tensor([2.0, 1.0])))
    >>> s
    tensor([2., 1.])
    """
    if stack.numel() and not torch.isfinite(_largest_entry(stack)).all():
        raise LinAlgError("a matrix that is not finite has no singular values")
    u, s, vt = torch.linalg.svd(stack, full_matrices=False)
    return u, s, vt


def scaled_to_one(stack: Shaped[Tensor, "*stack out in"]) -> tuple[Tensor, Tensor]:
    """Return each matrix in float64 with its largest entry in [1/2, 1), and the exponent taken out.

    Squares of what is left neither overflow nor vanish where they matter.

    >>> scaled_to_one(torch.tensor([[3e38, 0.0]]))[1]
    tensor(128, dtype=torch.int32)
    """
    if stack.numel() == 0:
        return stack.detach().double(), stack.new_zeros(stack.shape[:-2], dtype=torch.int32)
    largest = _largest_entry(stack)
    exponent = torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, 0)
    a = _blas.empty_like(stack, torch.float64).copy_(stack.detach())
    if int(exponent.abs().amax()) < 1000:
        return a.mul_(torch.exp2(-exponent[..., None, None].double())), exponent
    return ldexp(a, -exponent[..., None, None]), exponent


def ldexp(x: Tensor, exponent: Tensor | int) -> Tensor:
    """``x * 2**exponent`` in two steps, since 2**1074 alone would overflow.

    >>> ldexp(torch.tensor([5e-324], dtype=torch.float64), 1074)
    tensor([1.], dtype=torch.float64)
    """
    if isinstance(exponent, int):
        return x * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
    half = exponent // 2
    return torch.ldexp(torch.ldexp(x, half), exponent - half)


def norms_restored(
    norms: Float[Tensor, "*count"],
    vectors: Shaped[Tensor, "*count entries"],
    exponent: Tensor | int,
) -> Float[Tensor, "*count"]:
    """Return norms of scaled vectors as those of the vectors given, ``2**exponent`` times as long.

    The squares of entries that are tiny beside the largest of all may have vanished: such a vector
    is scaled on its own.

    >>> given = torch.tensor([[3e200, 4e200], [3e-200, 4e-200]], dtype=torch.float64)
    >>> a, exponent = scaled_to_one(given)
    >>> norms_restored(torch.linalg.vector_norm(a, dim=1), given, exponent)
    tensor([5.0000e+200, 5.0000e-200], dtype=torch.float64)
    """
    restored, faint = ldexp(norms, exponent), norms < SQUARES_VANISH_BELOW
    if faint.any() and vectors[faint].any():
        alone, power = scaled_to_one(vectors[faint][:, None])
        restored[faint] = ldexp(torch.linalg.vector_norm(alone[:, 0], dim=1), power)
    return restored


def check_threshold(threshold: float) -> None:
    """Refuse what is no share of sigma_1.

    >>> check_threshold(1.5)
    Traceback (most recent call last):
    ValueError: expected a threshold in [0, 1), a share of sigma_1; got 1.5
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"expected a threshold in [0, 1), a share of sigma_1; got {threshold}")


def resolution(shape: tuple[int, ...], largest: Tensor) -> Tensor:
    """Return the value below which a singular value cannot be told from zero in float64.

    >>> resolution((1024, 1024), torch.tensor(1.0)).item()
    2.27...e-13
    """
    return max(shape[-2:]) * EPS * largest


# --- all values -----------------------------------------------------------------------------------


def _each_spectrum(stack: Float[Tensor, "stack q p"]) -> Float[Tensor, "stack p"]:
    """Return singular values of tall, scaled, finite matrices.

    NaN where the SVD does not converge.
    """
    values = stack.new_full((len(stack), stack.shape[-1]), torch.nan)
    if _chosen(ALL_VALUES, stack.shape[-1]) is Method.STACKED_SVD:
        with contextlib.suppress(RuntimeError):  # torch gives up on all when one does not converge
            values = torch.linalg.svdvals(stack)
    for i in (~torch.isfinite(values).all(-1)).nonzero().flatten().tolist():
        with contextlib.suppress(ArithmeticError):
            values[i] = _all_values(stack[i])
    return values


@steady
@without_autocast()
def _values_of_large(given: Shaped[Tensor, "out in"]) -> Float[Tensor, " rank"]:
    """Return what :func:`singular_values` does for one finite matrix, without a float64 copy."""
    a, exponent = _workable(given)
    tall = a if a.shape[0] >= a.shape[1] else a.mT
    with contextlib.suppress(ArithmeticError):
        return ldexp(_all_values(tall), exponent)
    return torch.full((tall.shape[1],), torch.nan, dtype=torch.float64)


def _values(a: Matrix) -> Float[Tensor, " p"]:
    """Return what :func:`singular_values` does, to the last bit where the matrix is dense."""
    values = _all_values(a) if isinstance(a, Panels) else _each_spectrum(a[None])[0]
    if values.isnan().any():
        raise ArithmeticError("the SVD did not converge")
    return values


def _all_values(a: Matrix) -> Float[Tensor, " p"]:
    """Return singular values of a tall, scaled, finite matrix.

    What squaring blurs is taken from ``a`` itself.
    """
    method = _chosen(ALL_VALUES, a.shape[1])
    if method in (Method.STACKED_SVD, Method.SVD):
        return _svd_values(a)
    with contextlib.suppress(Unresolved):
        values = _gram_values(a, method)
        if blurred := int((values < GRAM_BLURS_BELOW * values[0]).sum()):
            values[-blurred:] = _sharp(a, values, blurred)
        return values
    return _svd_values(a)  # once the error, which holds what was tried, is gone


def _gram_values(a: Matrix, method: Method) -> Float[Tensor, " p"]:
    """Return the roots of the eigenvalues of the Gram matrix, largest first."""
    gram = _gram.gram(a)
    if method is Method.TORCH_GRAM:
        with failures_unresolved():
            squares = torch.linalg.eigvalsh(gram)
    else:
        squares = torch.as_tensor(_all_eigenvalues(*_blas.tridiagonal(gram)), device=gram.device)
    return squares.clamp(min=0).sqrt().flip(0)


def _sharp(a: Matrix, values: Float[Tensor, " p"], count: int) -> Float[Tensor, " count"]:
    """Return the smallest values from ``a`` itself, the same as far as squaring left them."""
    if count > POLISHED_VECTORS and values[-1] < INVERSE_FAILS_BELOW * values[0]:
        raise Unresolved("many values that squaring has lost")
    sharp = _krylov.smallest(a, count)
    slack = 16 * resolution(a.shape, values[0] ** 2)
    if ((sharp**2 - values[-count:] ** 2).abs() > slack).any():
        raise Unresolved("the small values are not those of the Gram matrix")
    return sharp


def _eigenvalues(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64], **which: Any
) -> NDArray[np.float64]:
    """Return the eigenvalues of a tridiagonal matrix, smallest first, or some by bisection."""
    how: dict[str, Any] = {"lapack_driver": "stebz" if which else "sterf", "check_finite": False}
    with failures_unresolved():
        return np.asarray(scipy.linalg.eigvalsh_tridiagonal(diagonal, beside, **which, **how))


def _all_eigenvalues(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return all eigenvalues, the smallest by bisection, which keeps a digit more."""
    values = _eigenvalues(diagonal, beside)
    small = min(MAX_COUNTED, int((values < BISECTED_BELOW**2 * values[-1]).sum()))
    if small:
        values[:small] = _eigenvalues(diagonal, beside, select="i", select_range=(0, small - 1))
    return values


@contextlib.contextmanager
def _without_subnormals() -> Iterator[None]:
    """Let torch take subnormal numbers for zero inside: processors are slow on them.

    Beside entries of about one they change no digit. With them the SVD of a constant matrix of
    1000 columns, whose rotations make many, took six times as long.
    """
    before = SMALLEST_NORMAL / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _svd_values(a: Matrix) -> Float[Tensor, " p"]:
    """Return singular values by the plain SVD, of a tall matrix after a QR factorization."""
    if isinstance(a, Panels):
        with contextlib.suppress(RuntimeError, np.linalg.LinAlgError):
            dense = _reduced(a)
            with _without_subnormals():
                return _blas.svdvals(dense, overwrite=True)
    return _plain_svd_values(_reduced(a))


def _reduced(a: Matrix) -> Float[Tensor, "r p"]:
    """Return a dense matrix in float64 with the same values: the triangle of a tall one."""
    ratio = 1 if isinstance(a, Panels) else QR_FROM_ROWS_PER_COLUMN
    if a.shape[0] > ratio * a.shape[1]:
        return _gram.triangle(a)  # which may have to read subnormals
    return _gram.as_dense(a, torch.float64)


@_without_subnormals()
def _plain_svd_values(a: Float[Tensor, "q p"]) -> Float[Tensor, " p"]:
    with contextlib.suppress(RuntimeError, np.linalg.LinAlgError):  # torch's is one of the former
        return _blas.svdvals(a)
    with contextlib.suppress(np.linalg.LinAlgError):
        # slower and sturdier; the transpose has the same values, in column-major order
        columns = a.mT.numpy(force=True)
        values = scipy.linalg.svd(columns, compute_uv=False, lapack_driver="gesvd")
        return torch.as_tensor(values, device=a.device)
    raise ArithmeticError("the SVD did not converge")


# --- the extremes ---------------------------------------------------------------------------------


def _non_zero_extremes(a: Matrix, norms: _Norms, wanted: _Wanted) -> Extremes:
    """Return the ends of the spectrum of a scaled, finite, non-zero matrix of any shape.

    Rows or columns of zeros, which dead neurons leave, may make it singular. Then sigma_min is
    known, and nothing needs to be factorized for it.
    """
    least = max(a.shape) * EPS  # below that there is only rounding to count
    wanted = replace(wanted, threshold=max(wanted.threshold, least))
    tall = a if a.shape[0] >= a.shape[1] else a.mT
    by_svd = wanted.complete or _chosen(EXTREMES, tall.shape[1]) is Method.SVD
    if by_svd or not _is_dead(a, norms):
        return _extremes(tall, wanted, singular=False)
    ends = _extremes(tall, wanted, singular=True)
    return replace(ends, smallest=0.0, method=f"{ends.method}, zero rows or columns")


def _is_dead(a: Matrix, norms: _Norms) -> bool:
    """Tell whether so many rows or columns are zero that the matrix is singular."""
    rows, columns = norms.rows > 0, norms.columns > 0
    if min(int(rows.sum()), int(columns.sum())) == min(a.shape):
        return False
    stored = a.stored if isinstance(a, Panels) else a  # the squares of faint entries may vanish
    return _all_zero(stored[~rows]) and _all_zero(stored[:, ~columns])


def _extremes(a: Matrix, wanted: _Wanted, singular: bool) -> Extremes:
    """Return the ends of the spectrum of a tall, scaled, finite, non-zero matrix.

    The smallest value of one that is known to be ``singular`` is not looked for.
    """
    method, blurred = Method.SVD if wanted.complete else _chosen(EXTREMES, a.shape[1]), False
    threshold, certify = wanted.threshold, wanted.certify
    try:
        match method:
            case Method.KRYLOV:
                dtypes = [torch.float32, torch.float64]
                return _krylov.extremes(a, threshold, certify, dtypes, singular)
            case Method.KRYLOV_FLOAT32:
                return _krylov.extremes(a, threshold, certify, [torch.float32], singular)
            case Method.PIVOTS_THEN_BISECTION | Method.BISECTION:
                return _bisected(a, threshold, singular, method)
    except Unresolved as problem:
        blurred = problem.blurred
    values = _svd_values(a) if blurred or singular else _values(a)
    second = float(values[1]) if len(values) > 1 else 0.0
    below = int((values <= threshold * values[0]).sum())
    ends = float(values[0]), second, float(values[-1])
    return Extremes(*ends, below, True, "all values", values)


def _bisected(a: Matrix, threshold: float, singular: bool, method: Method) -> Extremes:
    """Return the ends by bisection of the tridiagonal form, and a count by Sturm, which is inertia.

    Half the time that all values take. What squaring blurs comes from ``a`` itself.
    """
    if threshold < 2 * GRAM_BLURS_BELOW:
        raise Unresolved("the threshold lies where squaring blurs")
    square, last = _gram.gram(a), a.shape[1] - 1
    pivots_first = method is Method.PIVOTS_THEN_BISECTION and not singular
    if pivots_first and _krylov.hopeless(square):
        raise Unresolved("squaring blurs the smallest values", blurred=True)
    form = _blas.tridiagonal(square)
    second, first = _eigenvalues(*form, select="i", select_range=(last - 1, last))

    def count(share: float) -> int:
        limits = (-first, share**2 * first)
        return len(_eigenvalues(*form, select="v", select_range=limits, tol=first))

    if singular:
        least = 0.0
    elif not (blurred := count(GRAM_BLURS_BELOW)):
        least = math.sqrt(_eigenvalues(*form, select="i", select_range=(0, 0))[0])
    elif blurred > MAX_COUNTED or (blurred > POLISHED_VECTORS and count(INVERSE_FAILS_BELOW)):
        raise Unresolved("squaring blurs the smallest values", blurred=True)
    else:
        try:
            least = _krylov.least(a, blurred)
        except Unresolved as problem:  # which the list of all values would meet again
            raise Unresolved(str(problem), blurred=True) from problem
    ends = math.sqrt(first), math.sqrt(max(second, 0.0)), least
    if least > threshold * (1 + THRESHOLD_MARGIN) * ends[0]:
        return Extremes(*ends, 0, True, "bisection")
    below, above = (count(threshold * (1 + side * THRESHOLD_MARGIN)) for side in (-1, 1))
    if below != above:
        values = np.sqrt(_all_eigenvalues(*form).clip(min=0))
        below = int((values <= threshold * values[-1]).sum())
    return Extremes(*ends, below, True, "bisection")


# --- putting together -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norms:
    """Euclidean norms of the rows and columns of a scaled matrix; what rounding it amounts to."""

    rows: Tensor
    columns: Tensor
    rounding: float

    @classmethod
    def of(cls, a: Matrix, dtype: torch.dtype, exponent: int) -> _Norms:
        # Both are allocated first: small results between freed panels would keep these from the
        # next ones, and the heap would grow to the size of the matrix.
        rows, columns = (torch.zeros(2, n, dtype=a.dtype, device=a.device) for n in a.shape)
        # A panel that stays in cache makes this seven times faster than one reduction.
        height = max(64, L2_CACHE_ENTRIES // a.shape[1])
        for part, panel in zip(rows.split(height, 1), a.split(height), strict=True):
            half_ulps = precision.half_ulps(panel, dtype, exponent)
            squares = [panel.square(), half_ulps.square_()]
            part.copy_(torch.stack([each.sum(1) for each in squares]))
            columns += torch.stack([each.sum(0) for each in squares])
        (row, rounded_row), (column, rounded_column) = rows.sqrt_(), columns.sqrt_()
        return cls(row, column, precision.rounding_norm(rounded_row, rounded_column))

    @property
    def frobenius(self) -> float:
        """Root of the sum of all squares."""
        return float(torch.linalg.vector_norm(self.rows))

    def unscaled(self, given: Tensor, exponent: int) -> tuple[Tensor | None, Tensor | None]:
        """Row and column norms of the matrix as given; nothing where float64 cannot hold them."""
        rows = norms_restored(self.rows, given, exponent)
        columns = norms_restored(self.columns, given.mT, exponent)
        return _representable(rows), _representable(columns)


def _report(
    given: Tensor,
    dtype: torch.dtype,
    norms: _Norms,
    extremes: Extremes,
    exponent: int,
) -> Vitals:
    """Return the vitals of the matrix as given, from those of the scaled one."""
    computation = max(given.shape) * EPS * extremes.largest
    uncertainty = norms.rounding + computation
    # small matrices have a plain SVD; what other methods give is right to seven digits or more
    exact = _chosen(EXTREMES, min(given.shape)) is Method.SVD
    computed = 0.0 if exact else ACCEPTED_ERROR
    interval = precision.condition_interval(
        extremes.largest, extremes.smallest, uncertainty, computed
    )
    singular = extremes.smallest <= computation
    absolute = {
        "frobenius_norm": norms.frobenius,
        "sigma_max": extremes.largest,
        "sigma_2": extremes.second,
        "sigma_min": extremes.smallest,
    }
    shown = {name: unscaled(value, exponent) for name, value in absolute.items()}
    rows, columns = norms.unscaled(given, exponent)
    vectors = {"row_norms": rows, "column_norms": columns}
    resolution = {"resolution": unscaled(uncertainty, exponent)}
    absent = [name for name, value in (shown | vectors | resolution).items() if value is None]
    return Vitals(
        row_norms=rows,
        column_norms=columns,
        **shown,
        condition_number=math.inf if singular else extremes.largest / extremes.smallest,
        condition_number_low=interval.low,
        condition_number_high=interval.high,
        resolved=interval.resolved,
        effective_rank=min(given.shape) - extremes.below,
        spectral_gap=(extremes.largest - extremes.second) / extremes.largest,
        singular_values=_unscaled_values(extremes.values, exponent),
        **resolution,
        storage=_name(dtype),
        status=Status(
            Outcome.OK,
            "; ".join(_notes(given, dtype, extremes, interval.low if singular else None, absent)),
        ),
        method=extremes.method,
    )


def _notes(
    given: Tensor, dtype: torch.dtype, extremes: Extremes, least: float | None, absent: list[str]
) -> Iterator[str]:
    """Tell how far the vitals can be trusted.

    ``least`` is all that is known of an infinite kappa.
    """
    yield "certified" if extremes.certified else "verified"
    if least is not None:
        yield f"numerically singular, condition number at least {least:.3g}"
    if given.dtype.is_floating_point and given.dtype != dtype:
        yield f"values lie on the {_name(dtype)} grid"
    if absent:
        yield f"{', '.join(absent)} outside float64's range"
    if min(given.shape) == 1:
        yield "a single singular value, the second is taken as 0"


def _without_entries(given: Tensor, what: str) -> Vitals:
    """Describe a matrix without a non-zero entry: values are zero, ratios undefined."""
    rows, columns = given.shape
    zeros = given.new_zeros(rows + columns, dtype=torch.float64)
    return Vitals(
        zeros[:rows], zeros[rows:], 0.0, 0.0, 0.0, 0.0, effective_rank=0,
        storage=_name(given.dtype), status=Status(Outcome.DEGENERATE, what),
    )  # fmt: skip


def as_tensor(given: Tensor | ArrayLike) -> Tensor:
    """Return a tensor as it is, anything that NumPy takes on the CPU; copied only where torch must.

    >>> as_tensor(np.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    if isinstance(given, Tensor):
        if is_lazy(given):
            raise ValueError("expected a matrix, got one not initialized yet; run the model first")
        return given
    if np.ma.is_masked(given):
        raise ValueError("expected all entries of an array, got some masked; fill them first")
    array = np.asarray(given)
    steps = all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    if not (array.dtype.isnative and array.flags.writeable and steps):
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).copy()
    try:
        return torch.as_tensor(array, device="cpu")  # or it would go to torch's default device
    except TypeError:
        wrong = f"expected an array of numbers, got {array.dtype}; convert it first"
        raise TypeError(wrong) from None


def _as_matrix(matrix: Tensor | ArrayLike) -> Tensor:
    tensor = as_tensor(matrix).detach().resolve_neg()
    if tensor.is_nested or tensor.ndim != 2:
        given = "a nested tensor" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
        raise ValueError(f"expected a matrix, got {given}; pass one at a time")
    return tensor


def _workable(given: Tensor) -> tuple[Matrix, int]:
    """Return the matrix in float64 and scaled, or in panels where that would be a large copy."""
    if 8 * given.numel() < MAX_COPY_BYTES:
        a, exponent = scaled_to_one(given)
        return a, int(exponent)
    return _in_panels(given)


def _in_panels(given: Tensor) -> tuple[Panels, int]:
    """Return the matrix as stored, to be read in panels."""
    power = int(torch.frexp(_largest_entry(given)).exponent)
    return Panels(given, power), power


def unsupported(tensor: Tensor) -> str | None:
    """Return the kind of a tensor that is not dense real numbers, or nothing if it is.

    >>> unsupported(torch.eye(2)), unsupported(torch.eye(2).to_sparse())
    (None, 'float32 sparse_coo on cpu')
    """
    if tensor.is_nested:
        return "a nested tensor"
    numbers = tensor.dtype in INTEGERS or tensor.is_floating_point()
    numbers &= tensor.dtype != torch.float4_e2m1fn_x2  # two in each place
    if not numbers or tensor.layout != torch.strided or tensor.is_meta:
        return f"{_name(tensor.dtype)} {_name(tensor.layout)} on {tensor.device}"
    return None


def _unusable(matrix: Tensor) -> str | None:
    """Say why no singular value of this tensor can be given, if so."""
    if kind := unsupported(matrix):
        return f"{kind} is not analysed"
    if matrix.numel() == 0 or torch.isfinite(_largest_entry(matrix)):
        return None
    bad = sum(int((~torch.isfinite(panel.double())).sum()) for panel in matrix.split(1024))
    return f"non-finite ({bad} of {matrix.numel()})"


def _largest_entry(stack: Shaped[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
    """Return the largest absolute entry in float64.

    NaN or infinite if any entry is. One pass, no copy.
    """
    entries = stack.detach()
    if entries.dtype.itemsize == 1 or not entries.is_floating_point():
        entries = entries.double()  # torch compares neither float8 nor all integers
    low, high = entries.aminmax() if entries.ndim == 2 else entries.flatten(-2).aminmax(dim=-1)
    return torch.maximum(low.double().abs(), high.double().abs())


def _all_zero(entries: Shaped[Tensor, "out in"]) -> bool:
    return entries.numel() == 0 or float(_largest_entry(entries)) == 0


def _representable(x: Tensor) -> Tensor | None:
    """Return the tensor, or nothing where float64 cannot hold all digits of an entry."""
    if x.numel() and SMALLEST_NORMAL <= float(x.min()) <= float(x.max()) < math.inf:
        return x  # as a rule, and in a fraction of the time
    return x if ((x == 0) | ((x >= SMALLEST_NORMAL) & x.isfinite())).all() else None


def _unscaled_values(values: Tensor | None, exponent: int) -> Tensor | None:
    return None if values is None else _representable(ldexp(values, exponent))


def unscaled(value: float, exponent: int) -> float | None:
    """Return ``value * 2**exponent``, or nothing where float64 cannot hold all its digits.

    >>> unscaled(3.0, 2), unscaled(1.0, 2000), unscaled(1.0, -1050)
    (12.0, None, None)
    """
    try:
        result = math.ldexp(value, exponent)
    except OverflowError:
        return None
    return result if result >= SMALLEST_NORMAL or value == 0 else None


def _name(what: object) -> str:
    return str(what).removeprefix("torch.")


@steady
@without_autocast()
def product_singular_values(
    left: Float[Tensor, "*#stack m r"], right: Float[Tensor, "*#stack r n"]
) -> tuple[Float[Tensor, "*stack rank"], Float[Tensor, "*stack"]]:
    """Return the singular values of ``left @ right`` and what float64 cannot tell from zero.

    Two thin factors are reduced by QR to a core as small as the dimension between them, whose
    singular values are those of the product. Each has an absolute error of about the second result,
    a few roundings of the sum over k of ``|left[:, k]| |right[k, :]|``: small values of an
    ill-conditioned product are the less accurate the smaller they are, however large the factors'
    rows are beside one another. NaN where a factor is not finite.

    >>> values, floor = product_singular_values(torch.eye(5)[:, :2], torch.eye(2, 4))
    >>> values, bool(floor < 1e-14)
    (tensor([1., 1.], dtype=torch.float64), True)
    """
    (a, first), (b, second) = scaled_to_one(left), scaled_to_one(right.mT)
    terms = torch.linalg.vector_norm(a, dim=-2) * torch.linalg.vector_norm(b, dim=-2)
    if not terms.isfinite().all():
        a, b = a.nan_to_num_(0.0, 0.0, 0.0), b.nan_to_num_(0.0, 0.0, 0.0)
    cores = [torch.linalg.qr(x, mode="r").R for x in (a, b)]
    values = singular_values(cores[0] @ cores[1].mT)
    # r terms add up in the core, and a reflection's sums of m terms wander like a random walk
    steps = max(left.shape[-1], math.sqrt(max(left.shape[-2], right.shape[-1])))
    floor = ldexp(steps * EPS * terms.sum(-1), first + second)
    values = ldexp(values, (first + second)[..., None])
    return torch.where(floor.isfinite()[..., None], values, torch.nan), floor


@steady
@without_autocast()
def quick_product_singular_values(
    left: Float[Tensor, "stack m r"], right: Float[Tensor, "stack r n"]
) -> Float[Tensor, "stack rank"]:
    """The values of :func:`product_singular_values` where they can be had at a third of the cost.

    With ``right right' = L L'`` (Cholesky) their squares are the eigenvalues of
    ``L' left'left L``. Rounding moves none of them by more than a few eps times the product of the
    squared norms: where that may be 1e-8 of the smallest or more, the slow way is taken.

    >>> quick_product_singular_values(torch.eye(5)[None, :, :2], torch.eye(2, 4)[None])
    tensor([[1., 1.]], dtype=torch.float64)
    """
    a, b = left.double(), right.double()
    squares = [a.mT @ a, b @ b.mT]
    factor = torch.linalg.cholesky_ex(squares[1])[0]
    core = factor.mT @ squares[0] @ factor
    if bool(core.isfinite().all()):
        found = torch.linalg.eigvalsh(core)
        # the traces exceed the squared norms by more than the roundings are
        traces = [x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in squares]
        if bool((EPS * traces[0] * traces[1] < TOLERANCE * found[:, 0]).all()):
            return found.flip(-1).sqrt()
    return product_singular_values(left, right)[0]
