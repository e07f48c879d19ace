"""Singular values of dense matrices, all of them or the extremes, checked in float64.

With :mod:`kappascope.krylov` the only place that takes the singular values of a weight
(:mod:`kappascope.pairs` follows two of one that moves). Two questions, two answers:

- :func:`spectrum` gives every singular value: eigenvalues of the Gram matrix, which is two to four
  times faster than an SVD, with the few values that squaring would blur taken from a
  factorization of the matrix itself, and the plain SVD where there are many of those.
- :func:`vitals` gives everything but the list. On small matrices the extremes and the count come
  from the Gram matrix's tridiagonal form, by bisection. On large ones they come from two block
  Krylov spaces, of ``W'W`` and of its inverse through one LU or Cholesky factorization, in float32
  where that suffices. Every reported value is checked by a float64 residual. What cannot be
  verified in float32 is tried in float64 where the matrix is large; what cannot be verified at all
  is taken from the list of all values, and that, where squaring would blur it, from the plain SVD.

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
from typing import Any

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from kappascope import kernels, krylov, panels, precision
from kappascope.krylov import BLURRED, COUNTABLE, LOST, Extremes, failures_told
from kappascope.lanczos import BLUNT, Unresolved
from kappascope.panels import CACHED, COPIED, FEW, Dense, Panels
from kappascope.squares import EPS, GUARD

# Columns up to which a method is the one to take, and rows over columns from which another is. The
# first number of two is for processors on which OpenBLAS is the quicker library.
SVD_UP_TO = 240 if kernels.OPENBLAS else 192  # which costs no more than the Gram matrix's values
BATCHED_UP_TO = 128 if kernels.OPENBLAS else 192  # a stack at once, by torch; each alone beyond
PIVOTS_UP_TO = 448 if kernels.OPENBLAS else 320  # a tenth of the work, to tell whether it is vain
BISECTION_UP_TO = 1280 if kernels.OPENBLAS else 896  # sooner done than two Krylov spaces
OPENBLAS_UP_TO = 2048 if kernels.OPENBLAS else 1024  # whose eigenvalues come sooner than MKL's
QR_FROM = 1.2  # which then saves time before an SVD

SOFT = 1e-3  # of sigma_1: below, the list of a Gram matrix's eigenvalues may lose the eighth digit
NORMAL = torch.finfo(torch.float64).smallest_normal  # below this float64 drops digits

CLOSE = 1e-9  # of the threshold: a value so near is counted from the list of all values
FAINT = 1e-140  # beside the largest entry; squares of such entries vanish
INTEGERS = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64} | {
    torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip
AUTOCAST = ("cpu", "cuda", "mps", "xpu")  # the devices that have it

LinAlgError = krylov.LinAlgError
"""What :func:`decomposition` raises."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """All singular values, largest first, and how they were had.

    ``values`` is empty when ``status`` says ``failed``.

    >>> Spectrum(torch.zeros(2), "degenerate: zero matrix").status
    'degenerate: zero matrix'
    """

    values: Float[Tensor, " rank"]
    status: str


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
    status: str = ""
    method: str = ""


def spectrum(matrix: Tensor | ArrayLike) -> Spectrum:
    """All singular values of one matrix.

    >>> spectrum(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).values
    tensor([3., 2., 1.], dtype=torch.float64)
    >>> spectrum(torch.tensor([[1.0, float("nan")]])).status
    'failed: non-finite (1 of 2)'
    """
    a = _as_matrix(matrix)
    reason = _unusable(a)
    values = torch.empty(0, dtype=torch.float64, device="cpu") if reason else singular_values(a)
    if values.isnan().any():
        reason = "the SVD did not converge"
    elif _representable(values[:1]) is None:
        reason = "outside float64's range"
    if reason:
        return Spectrum(values[:0], f"failed: {reason}")
    if not values.any():
        return Spectrum(values, f"degenerate: {'zero' if a.numel() else 'empty'} matrix")
    if few := int(((values > 0) & (values < NORMAL)).sum()):
        return Spectrum(values, f"ok: {few} subnormal in float64, with fewer digits")
    return Spectrum(values, "ok")


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast, should the caller be inside it, would leave products a third of their digits.

    >>> with torch.autocast("cpu", torch.float16), without_autocast():
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    with contextlib.ExitStack() as stack:
        for device in AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@without_autocast()
def vitals(
    matrix: Tensor | ArrayLike,
    certify: bool = False,
    threshold: float = 0.01,
    complete: bool = False,
) -> Vitals:
    """Norms, extreme singular values, kappa with its interval, and effective rank of one matrix.

    ``certify=True`` counts the singular values above ``threshold * sigma_1`` by inertia. What
    float64 cannot tell from zero never counts. ``complete=True`` takes all singular values.

    >>> found = vitals(torch.diag(torch.tensor([4.0, 2.0, 1.0])))
    >>> found.condition_number, found.effective_rank, found.spectral_gap, found.status
    (4.0, 3, 0.5, 'ok: certified; values lie on the bfloat16 grid')
    """
    given = _as_matrix(matrix)
    check_threshold(threshold)
    if reason := _unusable(given):
        return Vitals(status=f"failed: {reason}", storage=_name(given.dtype))
    if given.numel() == 0:
        return _of_nothing(given, "empty matrix")
    dtype = precision.storage(given) if given.dtype.is_floating_point else torch.float64
    a, exponent = _workable(given)
    norms = _Norms.of(a, dtype, exponent)
    if not precision.independent(given, dtype):
        bound = precision.rounding_bound(a.split(FEW), dtype, exponent)
        norms = replace(norms, rounding=bound)
    if norms.frobenius == 0:
        return _of_nothing(given, "zero matrix, kappa is undefined")
    try:
        extremes = _of_live_part(a, norms, threshold, certify, complete)
    except ArithmeticError as problem:
        return Vitals(status=f"failed: {problem}", storage=_name(dtype))
    return _report(given, dtype, norms, extremes, exponent)


@without_autocast()
def singular_values(stack: Shaped[Tensor, "*stack out in"]) -> Float[Tensor, "*stack rank"]:
    """All singular values of each matrix of a stack, largest first, in float64.

    NaN where a matrix is not finite or its SVD does not converge.

    >>> singular_values(torch.eye(3).expand(2, 3, 3)).shape
    torch.Size([2, 3])
    """
    if stack.numel() == 0:
        return stack.new_zeros((*stack.shape[:-2], min(stack.shape[-2:])), dtype=torch.float64)
    a, exponent = scaled(stack)
    a = a if a.shape[-2] >= a.shape[-1] else a.mT
    finite = torch.isfinite(_largest_entry(stack))
    a[~finite] = 0.0
    values = _each_spectrum(a.reshape(-1, *a.shape[-2:])).reshape(*a.shape[:-2], -1)
    return torch.where(finite[..., None], ldexp(values, exponent[..., None]), torch.nan)


@without_autocast()
def decomposition(
    stack: Float[Tensor, "*stack out in"],
) -> tuple[Float[Tensor, "*stack out rank"], Float[Tensor, "*stack rank"], Tensor]:
    """Thin SVD ``u, s, vt`` of each matrix of a stack, in the stack's own precision.

    Raises :data:`LinAlgError` where there is none, as torch does not for infinite entries.

    >>> u, s, vt = decomposition(torch.diag(torch.tensor([2.0, 1.0])))
    >>> s
    tensor([2., 1.])
    """
    if stack.numel() and not torch.isfinite(_largest_entry(stack)).all():
        raise LinAlgError("a matrix that is not finite has no singular values")
    u, s, vt = torch.linalg.svd(stack, full_matrices=False)
    return u, s, vt


def scaled(stack: Shaped[Tensor, "*stack out in"]) -> tuple[Tensor, Tensor]:
    """Each matrix in float64 with its largest entry in [1/2, 1), and the exponent taken out.

    Squares of what is left neither overflow nor vanish where they matter.

    >>> scaled(torch.tensor([[3e38, 0.0]]))[1]
    tensor(128, dtype=torch.int32)
    """
    if stack.numel() == 0:
        return stack.detach().double(), stack.new_zeros(stack.shape[:-2], dtype=torch.int32)
    largest = _largest_entry(stack)
    exponent = torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, 0)
    a = kernels.memory(stack, torch.float64).copy_(stack.detach())
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
    """Norms of scaled vectors as those of the vectors given, ``2**exponent`` times as long.

    The squares of entries that are tiny beside the largest of all may have vanished: such a vector
    is scaled on its own.

    >>> given = torch.tensor([[3e200, 4e200], [3e-200, 4e-200]], dtype=torch.float64)
    >>> a, exponent = scaled(given)
    >>> norms_restored(torch.linalg.vector_norm(a, dim=1), given, exponent)
    tensor([5.0000e+200, 5.0000e-200], dtype=torch.float64)
    """
    restored, faint = ldexp(norms, exponent), norms < FAINT
    if faint.any() and vectors[faint].any():
        alone, power = scaled(vectors[faint][:, None])
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
    """Below this a singular value of a matrix of this shape is no different from zero in float64.

    >>> resolution((1024, 1024), torch.tensor(1.0)).item()
    2.27...e-13
    """
    return max(shape[-2:]) * EPS * largest


# --- all values -----------------------------------------------------------------------------------


def _each_spectrum(stack: Float[Tensor, "stack q p"]) -> Float[Tensor, "stack p"]:
    """Singular values of tall, scaled, finite matrices; NaN where the SVD does not converge."""
    values = stack.new_full((len(stack), stack.shape[-1]), torch.nan)
    if stack.shape[-1] <= min(BATCHED_UP_TO, SVD_UP_TO):
        with contextlib.suppress(RuntimeError):  # torch gives up on all when one does not converge
            values = torch.linalg.svdvals(stack)
    for i in (~torch.isfinite(values).all(-1)).nonzero().flatten().tolist():
        with contextlib.suppress(ArithmeticError):
            values[i] = _all_values(stack[i])
    return values


def _values(a: Dense) -> Float[Tensor, " p"]:
    """As :func:`singular_values` has them, to the last bit, for what fits into memory."""
    values = _all_values(a) if isinstance(a, Panels) else _each_spectrum(a[None])[0]
    if values.isnan().any():
        raise ArithmeticError("the SVD did not converge")
    return values


def _all_values(a: Dense) -> Float[Tensor, " p"]:
    """Singular values of a tall, scaled, finite matrix."""
    return _svd_values(a) if a.shape[1] <= SVD_UP_TO else _gram_values(a)


def _gram_values(a: Dense) -> Float[Tensor, " p"]:
    """Singular values by way of the Gram matrix; those that squaring blurs from ``a`` itself."""
    try:
        values = _squares(panels.gram(a)).clamp(min=0).sqrt().flip(0)
        if blurred := int((values < BLURRED * values[0]).sum()):
            values[-blurred:] = _sharp(a, values, blurred)
    except Unresolved:
        return _svd_values(a)
    return values


def _sharp(a: Dense, values: Float[Tensor, " p"], count: int) -> Float[Tensor, " count"]:
    """The smallest values from ``a`` itself, the same as far as squaring left them."""
    if count > GUARD and values[-1] < LOST * values[0]:
        raise Unresolved("many values that squaring has lost")
    sharp = krylov.smallest(a, count)
    slack = 16 * resolution(a.shape, values[0] ** 2)
    if ((sharp**2 - values[-count:] ** 2).abs() > slack).any():
        raise Unresolved("the small values are not those of the Gram matrix")
    return sharp


def _squares(gram: Float[Tensor, "p p"]) -> Float[Tensor, " p"]:
    """Eigenvalues of a symmetric matrix, given by its lower triangle, smallest first."""
    if len(gram) > OPENBLAS_UP_TO:
        with failures_told():
            return torch.linalg.eigvalsh(gram)
    return torch.as_tensor(_all_eigenvalues(*kernels.tridiagonal(gram)), device=gram.device)


def _eigenvalues(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64], **which: Any
) -> NDArray[np.float64]:
    """Eigenvalues of a tridiagonal matrix, smallest first: all of them, or some by bisection."""
    how: dict[str, Any] = {"lapack_driver": "stebz" if which else "sterf", "check_finite": False}
    with failures_told():
        return np.asarray(scipy.linalg.eigvalsh_tridiagonal(diagonal, beside, **which, **how))


def _all_eigenvalues(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64]
) -> NDArray[np.float64]:
    """All of them, the smallest by bisection, which keeps a digit more."""
    found = _eigenvalues(diagonal, beside)
    soft = min(COUNTABLE, int((found < SOFT**2 * found[-1]).sum()))
    if soft:
        found[:soft] = _eigenvalues(diagonal, beside, select="i", select_range=(0, soft - 1))
    return found


@contextlib.contextmanager
def _without_subnormals() -> Iterator[None]:
    """Beside entries of about one they are nothing, and processors are slow on them.

    Of a constant matrix of 1000 columns, whose rotations make many, the SVD took six times as long.
    """
    before = NORMAL / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _svd_values(a: Dense) -> Float[Tensor, " p"]:
    """The plain SVD."""
    if isinstance(a, Panels) or a.shape[0] > QR_FROM * a.shape[1]:
        a = panels.triangle(a)  # which may have to read subnormals
    return _plain_svd_values(a)


@_without_subnormals()
def _plain_svd_values(a: Float[Tensor, "q p"]) -> Float[Tensor, " p"]:
    with contextlib.suppress(RuntimeError, np.linalg.LinAlgError):  # torch's is one of the former
        return kernels.svdvals(a)
    with contextlib.suppress(np.linalg.LinAlgError):
        # slower and sturdier; the transpose has the same values, and its columns in one piece
        columns = a.mT.numpy(force=True)
        values = scipy.linalg.svd(columns, compute_uv=False, lapack_driver="gesvd")
        return torch.as_tensor(values, device=a.device)
    raise ArithmeticError("the SVD did not converge")


# --- the extremes ---------------------------------------------------------------------------------


def _of_live_part(
    a: Dense, norms: _Norms, threshold: float, certify: bool, complete: bool
) -> Extremes:
    """The ends of the spectrum of a scaled, finite, non-zero matrix of any shape.

    Rows and columns of zeros, which dead neurons leave, stand for values that are zero. Where these
    are all that makes it singular, the rest is measured the fast way.
    """
    threshold = max(threshold, max(a.shape) * EPS)  # below that there is only rounding to count
    live, missing = a, 0
    if min(a.shape) > SVD_UP_TO and not isinstance(a, Panels) and not complete:
        rows, columns = norms.rows > 0, norms.columns > 0
        missing = min(a.shape) - int(min(rows.sum(), columns.sum()))
        if missing and not a[~rows].any() and not a[:, ~columns].any():  # not even faint ones
            live = a[rows][:, columns]
    tall = live if live.shape[0] >= live.shape[1] else live.mT
    found = _extremes(tall, threshold, certify, complete, singular=live is not a)
    if live is a:
        return found
    values = found.values
    if values is not None:
        values = torch.cat([values, values.new_zeros(missing)])
    below, method = found.below + missing, f"{found.method} of the non-zero rows and columns"
    return replace(found, smallest=0.0, below=below, method=method, values=values)


def _extremes(
    a: Dense, threshold: float, certify: bool, complete: bool, singular: bool
) -> Extremes:
    """The ends of the spectrum of a tall, scaled, finite, non-zero matrix, fastest method first.

    Of what is part of a ``singular`` matrix the smallest value need not be known.
    """
    blurred = False
    if min(a.shape) > SVD_UP_TO and not complete:
        try:
            if min(a.shape) > BISECTION_UP_TO:
                return krylov.extremes(a, threshold, certify)
            return _bisected(a, threshold, singular)
        except Unresolved as problem:
            blurred = problem.blurred
    values = _svd_values(a) if blurred else _values(a)
    second = float(values[1]) if len(values) > 1 else 0.0
    below = int((values <= threshold * values[0]).sum())
    ends = float(values[0]), second, float(values[-1])
    return Extremes(*ends, below, True, "all values", values)


def _bisected(a: Dense, threshold: float, singular: bool) -> Extremes:
    """The ends by bisection of the tridiagonal form, and a count by Sturm, which is inertia.

    Half the time that all values take. What squaring blurs comes from ``a`` itself.
    """
    if threshold < 2 * BLURRED:
        raise Unresolved("the threshold lies where squaring blurs")
    square, last = panels.gram(a), a.shape[1] - 1
    if last < PIVOTS_UP_TO and not singular and krylov.hopeless(square):
        raise Unresolved("squaring blurs the smallest values", blurred=True)
    form = kernels.tridiagonal(square)
    second, first = _eigenvalues(*form, select="i", select_range=(last - 1, last))

    def count(share: float) -> int:
        limits = (-first, share**2 * first)
        return len(_eigenvalues(*form, select="v", select_range=limits, tol=first))

    if singular:
        least = 0.0
    elif not (blurred := count(BLURRED)):
        least = math.sqrt(_eigenvalues(*form, select="i", select_range=(0, 0))[0])
    elif blurred > COUNTABLE or (blurred > GUARD and count(LOST)):
        raise Unresolved("squaring blurs the smallest values", blurred=True)
    else:
        try:
            least = krylov.least(a, blurred)
        except Unresolved as problem:  # which the list of all values would meet again
            raise Unresolved(str(problem), blurred=True) from problem
    ends = math.sqrt(first), math.sqrt(max(second, 0.0)), least
    if least > threshold * (1 + CLOSE) * ends[0]:
        return Extremes(*ends, 0, True, "bisection")
    below, above = (count(threshold * (1 + side * CLOSE)) for side in (-1, 1))
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
    def of(cls, a: Dense, dtype: torch.dtype, exponent: int) -> _Norms:
        rows, columns = [], torch.zeros(2, a.shape[1], dtype=a.dtype, device=a.device)
        # A panel that stays in cache makes this seven times faster than one reduction.
        for panel in a.split(max(64, CACHED // a.shape[1])):
            half_ulps = precision.half_ulps(panel, dtype, exponent)
            squares = [panel.square(), half_ulps.square_()]
            rows.append(torch.stack([each.sum(1) for each in squares]))
            columns += torch.stack([each.sum(0) for each in squares])
        (row, rounded_row), (column, rounded_column) = torch.cat(rows, 1).sqrt_(), columns.sqrt_()
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
    found: Extremes,
    exponent: int,
) -> Vitals:
    """The vitals of the matrix as given, from those of the scaled one."""
    computation = max(given.shape) * EPS * found.largest
    uncertainty = norms.rounding + computation
    # small matrices have a plain SVD; what other methods give is right to seven digits or more
    computed = 0.0 if min(given.shape) <= SVD_UP_TO else BLUNT
    interval = precision.interval(found.largest, found.smallest, uncertainty, computed)
    singular = found.smallest <= computation
    absolute = {
        "frobenius_norm": norms.frobenius,
        "sigma_max": found.largest,
        "sigma_2": found.second,
        "sigma_min": found.smallest,
    }
    shown = {name: _unscaled(value, exponent) for name, value in absolute.items()}
    rows, columns = norms.unscaled(given, exponent)
    vectors = {"row_norms": rows, "column_norms": columns}
    resolution = {"resolution": _unscaled(uncertainty, exponent)}
    absent = [name for name, value in (shown | vectors | resolution).items() if value is None]
    return Vitals(
        row_norms=rows,
        column_norms=columns,
        **shown,
        condition_number=math.inf if singular else found.largest / found.smallest,
        condition_number_low=interval.low,
        condition_number_high=interval.high,
        resolved=interval.resolved,
        effective_rank=min(given.shape) - found.below,
        spectral_gap=(found.largest - found.second) / found.largest,
        singular_values=_unscaled_values(found.values, exponent),
        **resolution,
        storage=_name(dtype),
        status="; ".join(_notes(given, dtype, found, interval.low if singular else None, absent)),
        method=found.method,
    )


def _notes(
    given: Tensor, dtype: torch.dtype, found: Extremes, least: float | None, absent: list[str]
) -> Iterator[str]:
    """How far the vitals can be trusted; ``least`` is all that is known of an infinite kappa."""
    yield "ok: certified" if found.certified else "ok: verified"
    if least is not None:
        yield f"numerically singular, condition number at least {least:.3g}"
    if given.dtype.is_floating_point and given.dtype != dtype:
        yield f"values lie on the {_name(dtype)} grid"
    if absent:
        yield f"{', '.join(absent)} outside float64's range"
    if min(given.shape) == 1:
        yield "a single singular value, the second is taken as 0"


def _of_nothing(given: Tensor, what: str) -> Vitals:
    """A matrix with no non-zero entry: every norm and value is zero, ratios are undefined."""
    rows, columns = given.shape
    zeros = given.new_zeros(rows + columns, dtype=torch.float64)
    return Vitals(
        zeros[:rows], zeros[rows:], 0.0, 0.0, 0.0, 0.0, effective_rank=0,
        storage=_name(given.dtype), status=f"degenerate: {what}",
    )  # fmt: skip


def as_tensor(given: Tensor | ArrayLike) -> Tensor:
    """A tensor as it is, anything that NumPy takes on the CPU; copied only where torch must.

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


def _workable(given: Tensor) -> tuple[Dense, int]:
    """The matrix in float64 and scaled, or in panels where that would be a large copy."""
    if 8 * given.numel() < COPIED:
        a, exponent = scaled(given)
        return a, int(exponent)
    power = int(torch.frexp(_largest_entry(given)).exponent)
    return Panels(given, power), power


def unreadable(tensor: Tensor) -> str | None:
    """What a tensor is, if not real numbers, one in each place.

    >>> unreadable(torch.eye(2)), unreadable(torch.eye(2).to_sparse())
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
    """Why no singular value of this tensor can be given, if so."""
    if kind := unreadable(matrix):
        return f"{kind} is not analysed"
    if matrix.numel() == 0 or torch.isfinite(_largest_entry(matrix)):
        return None
    bad = sum(int((~torch.isfinite(panel.double())).sum()) for panel in matrix.split(1024))
    return f"non-finite ({bad} of {matrix.numel()})"


def _largest_entry(stack: Shaped[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
    """Largest absolute entry in float64; NaN or infinite if any entry is. One pass, no copy."""
    entries = stack.detach()
    if entries.dtype.itemsize == 1 or not entries.is_floating_point():
        entries = entries.double()  # torch compares neither float8 nor all integers
    low, high = entries.aminmax() if entries.ndim == 2 else entries.flatten(-2).aminmax(dim=-1)
    return torch.maximum(low.double().abs(), high.double().abs())


def _representable(x: Tensor) -> Tensor | None:
    """The tensor, or nothing where float64 cannot hold all digits of an entry."""
    if x.numel() and NORMAL <= float(x.min()) <= float(x.max()) < math.inf:
        return x  # as a rule, and in a fraction of the time
    return x if ((x == 0) | ((x >= NORMAL) & x.isfinite())).all() else None


def _unscaled_values(values: Tensor | None, exponent: int) -> Tensor | None:
    return None if values is None else _representable(ldexp(values, exponent))


def _unscaled(value: float, exponent: int) -> float | None:
    """``value * 2**exponent``, or nothing where float64 cannot hold all its digits."""
    try:
        result = math.ldexp(value, exponent)
    except OverflowError:
        return None
    return result if result >= NORMAL or value == 0 else None


def _name(what: object) -> str:
    return str(what).removeprefix("torch.")


@without_autocast()
def product_singular_values(
    left: Float[Tensor, "*#stack m r"], right: Float[Tensor, "*#stack r n"]
) -> tuple[Float[Tensor, "*stack rank"], Float[Tensor, "*stack"]]:
    """Singular values of ``left @ right``, largest first, and what float64 cannot tell from zero.

    Two thin factors are reduced by QR to a core as small as the dimension between them, whose
    singular values are those of the product. Each has an absolute error of about the second result,
    a few roundings of the sum over k of ``|left[:, k]| |right[k, :]|``: small values of an
    ill-conditioned product are the less accurate the smaller they are, however large the factors'
    rows are beside one another. NaN where a factor is not finite.

    >>> values, floor = product_singular_values(torch.eye(5)[:, :2], torch.eye(2, 4))
    >>> values, bool(floor < 1e-14)
    (tensor([1., 1.], dtype=torch.float64), True)
    """
    (a, first), (b, second) = scaled(left), scaled(right.mT)
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
