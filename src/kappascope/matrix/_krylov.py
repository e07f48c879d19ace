"""The ends of a spectrum from block Krylov spaces, every value checked in float64.

The largest singular values come from a Krylov space of ``A'A``, the smallest from one of its
inverse, through one LU or Cholesky factorization; in float32 where that can be verified and in
float64 where not. Where many lie close together, Davidson's method finds the smallest from a shift
just below them. A method that cannot verify its answer raises :class:`Unresolved`, and
:mod:`kappascope.matrix.spectra` takes all singular values instead. Matrices here are tall (or
square), finite, non-zero and scaled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kappascope.matrix import _blas
from kappascope.matrix._gram import (
    ACCEPTED_ERROR,
    BLOCK_SIZE,
    EPS,
    POLISHED_VECTORS,
    TOLERANCE,
    Gram,
    Matrix,
    Panels,
    Unresolved,
    count_below,
    count_below_in_float32,
    norm,
    random_block,
    times,
    transposed_times,
    triangle,
)

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
"""What torch raises where LAPACK fails, named once: torch does not say that it exports it."""

# Steps of a Krylov space, a block of vectors each
FIRST_STEPS = 3  # towards the bottom, which tell whether its values are crowded
PATIENCE_STEPS = 8  # after which a smallest value that is hardly known needs some forty more
MAX_TOP_STEPS, MAX_BOTTOM_STEPS = 36, 32
COLUMNS_PER_TOP_STEP = 64  # of a large matrix, whose largest values lie the closer the more it has;
MOST_TOP_STEPS = 128  # so many steps take less time than its factorization
SHIFTED_STEPS = 8  # from just below a crowd, after which its smallest values are told apart
# Turns of an iteration in float64
MAX_CORRECTIONS = 8  # through float32 factors; three are usual
MAX_DAVIDSON_TURNS = 12
MAX_POLISH_TURNS = 12
COUNTING_TURNS = 4  # more turns to count by: each costs a fifth of what inertia does

# Shares of sigma_1
GRAM_BLURS_BELOW = 3e-4  # squaring moves a value x sigma_1 by some eps/x^2: above, a few 1e-9
INVERSE_FAILS_BELOW = 1e-7  # an inverse in float64 seldom has eight digits of what is smaller
FLOAT32_COUNTS_ABOVE = 4e-3  # a lower threshold, squared, is hardly more than float32's rounding
# Other ratios
STALLED_UNCERTAINTY = 0.05  # of a value after PATIENCE_STEPS: all values cost less than going on
NULL_SHARE = 0.25  # of what float64 cannot tell from zero: what is less is zero for certain
CROWDED_RATIO = 0.75  # of the ninth inverse square to the first, from which forty steps follow
SHIFT_MARGIN = 0.02  # of the smallest square: nearer to it float32's rounding may cross it

MAX_COUNTED = 64  # singular values below the threshold that a Krylov space counts reliably
CROWDED_REASON = "too many values near the smallest"


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum and the number of values at or below the threshold.

    >>> Extremes(4.0, 2.0, 1.0, below=0, certified=True, method="all values").values is None
    True
    """

    largest: float
    second: float
    smallest: float
    below: int
    certified: bool
    method: str
    values: Tensor | None = None  # all of them, where the method gives them


@contextlib.contextmanager
def failures_unresolved() -> Iterator[None]:
    """Make LAPACK's own failure to converge one more reason to try the next method.

    >>> with failures_unresolved():
    ...     np.linalg.cholesky(-np.eye(2))
    Traceback (most recent call last):
    kappascope.matrix._gram.Unresolved: LAPACK: Matrix is not positive definite
    """
    try:
        yield
    except (np.linalg.LinAlgError, LinAlgError) as problem:
        raise Unresolved(f"LAPACK: {problem}") from problem


# --- block Lanczos --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ritz:
    """Leading approximate eigenvalues of a symmetric operator, their residuals and vectors.

    >>> ritz = Ritz([2.0, 1.0], [1e-3, 1e-3])
    >>> ritz.uncertainty(1) < 1e-6, ritz.count(1.5)
    (True, 1)
    """

    values: list[float]
    residuals: list[float]
    basis: Tensor | None = None
    coefficients: Tensor | None = None

    def uncertainty(self, wanted: int) -> float:
        """Return the relative error bound of the first ``wanted`` values.

        A value is within its residual of an eigenvalue, or much nearer in a group that a gap
        separates from the rest. What lies below a value that has not converged is no gap: more of
        the group may still come up there.
        """
        values, residuals = np.array(self.values), np.array(self.residuals)
        size = abs(float(values[wanted - 1]))
        if not size > 0:
            return math.inf
        alone = math.sqrt((residuals[:wanted] ** 2).sum())
        groups = range(wanted, len(values))
        return min([alone, *(self._in_group(group, wanted) for group in groups)]) / size

    def _in_group(self, group: int, wanted: int) -> float:
        """Bound the error of the first ``wanted`` of a ``group``, if all others lie below it.

        Seen from the group (Schur's complement at a wanted value), the rest adds a form of at
        most ``(sum of |x_k| r_k)^2`` over the distance between them, and so no more than a diagonal
        matrix, whatever weights the members have (Cauchy and Schwarz). One value in a group of one
        is within ``r^2`` over the gap (Kato and Temple).
        """
        values, squares = np.array(self.values[:group]), np.array(self.residuals[:group]) ** 2
        rest = self.values[group] + self.residuals[group]
        gap = values[-1] - rest
        distance = values[wanted - 1] - rest - squares.sum() / gap if gap > 0 else 0.0
        if distance <= 0:
            return math.inf
        weights = np.where(np.arange(group) < wanted, 1, 1 / (8 * group))
        most = np.sort(values + squares * weights.sum() / weights / distance)[::-1]
        return float((most - values)[:wanted].max())

    def count(self, cut: float) -> int | None:
        """Tell how many values exceed ``cut``, if the residuals place each one clearly.

        Alone in a gap, a value is known to the square of its residual over the gap.
        """
        values, residuals = np.array(self.values), np.array(self.residuals)
        k = int((values > cut).sum())
        steps = values[:-1] - values[1:] - residuals[:-1] - residuals[1:]
        gaps = np.minimum(np.r_[math.inf, steps], np.r_[steps, 0.0])  # below the last, who knows
        alone = gaps > 2 * residuals
        errors = np.where(alone, residuals**2 / np.where(alone, gaps, 1.0), residuals)
        clear = np.abs(values - cut) > 2 * errors + ACCEPTED_ERROR * abs(cut)
        return k if k < len(values) and clear[: k + 1].all() else None

    @property
    def steps(self) -> int:
        """How many blocks the Krylov space has."""
        assert self.basis is not None
        return self.basis.shape[1] // BLOCK_SIZE

    def vectors(self, count: int) -> Tensor:
        """Return the first ``count`` approximate eigenvectors."""
        assert self.basis is not None and self.coefficients is not None
        return self.basis @ self.coefficients[:, :count].to(self.basis)


class Space:
    """A Krylov space of a symmetric operator: block Lanczos, fully reorthogonalised.

    The operator acts on blocks of columns as long as ``like`` has columns, in its precision. The
    projection is formed explicitly, so the basis may be continued by any block orthogonal to it
    when the space becomes invariant. It begins with random columns, or with the span of ``start``.

    >>> a = torch.diag(torch.arange(64.0).double())
    >>> space = Space(lambda x: a @ x, a, max_steps=4)
    >>> space.grow(4)
    >>> round(space.ritz(1).values[0], 6)
    63.0
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        like: Tensor,
        max_steps: int,
        start: Tensor | None = None,
    ) -> None:
        self.apply, self.like, self.start = apply, like, start
        self.steps, self.max_steps = 0, min(max_steps, like.shape[1] // BLOCK_SIZE)
        width = self.max_steps * BLOCK_SIZE
        self._basis = torch.empty(width, like.shape[1], dtype=like.dtype, device=like.device).mT
        self._projection = np.zeros((width, width))
        self._rest = torch.empty(0)

    def until(self, progress: Callable[[Ritz], float], keep: int) -> Ritz:
        """Grow until ``progress``, the share of the digits that are there, is one.

        The result is the ``keep`` leading eigenpairs.
        """
        due = max(2, self.steps)
        while True:
            self.grow(due)
            ritz = self.ritz(keep)
            done = progress(ritz)
            if done >= 1:
                return ritz
            if self.steps == self.max_steps:
                rounding = 64 * torch.finfo(self.like.dtype).eps * ritz.values[0]
                slow = ritz.residuals[0] > rounding  # more precision will not hasten it
                raise Unresolved("Krylov space exhausted", crowded=slow)
            # The eigenpairs of a large space take time: wait until the rest of the digits may be
            # there, which come three times faster than the first ones.
            due += math.ceil(due * min(1.0, (1 / max(done, 0.1) - 1) / 3))

    def grow(self, steps: int) -> None:
        """Grow to so many blocks, or to as many as there can be."""
        while self.steps < min(steps, self.max_steps):
            self._step()

    def _step(self) -> None:
        """Add one block, and its part of the projection."""
        old, new = self.steps * BLOCK_SIZE, (self.steps + 1) * BLOCK_SIZE
        self._basis[:, old:new] = block = self._next()
        known = self._basis[:, :new]
        rest = self.apply(block)
        column = _blas.multiply(known.mT, rest)
        rest = rest - _blas.multiply(known, column)
        again = _blas.multiply(known.mT, rest)
        self._rest = rest - _blas.multiply(known, again)
        projection = self._projection
        projection[:new, old:new] = (column + again).numpy(force=True)
        projection[old:new, :new] = projection[:new, old:new].T
        if not np.isfinite(projection[:new, old:new]).all():
            raise Unresolved("overflow")
        self.steps += 1

    def _next(self) -> Tensor:
        """Return the next orthonormal block: what the operator left of the last one."""
        if not self.steps:
            if self.start is None:
                return random_block(self.like)
            return torch.linalg.qr(self.start.to(self.like))[0]
        known = self._basis[:, : self.steps * BLOCK_SIZE]
        block = torch.linalg.qr(self._rest)[0]
        return torch.linalg.qr(block - _blas.multiply(known, _blas.multiply(known.mT, block)))[0]

    def ritz(self, keep: int) -> Ritz:
        """Return the leading eigenpairs of the projection, and their residuals."""
        n = self.steps * BLOCK_SIZE
        projection, keep = self._projection[:n, :n], min(n, keep)
        theta, c = scipy.linalg.eigh(
            (projection + projection.T) / 2, subset_by_index=[n - keep, n - 1], check_finite=False
        )
        vectors = torch.from_numpy(c[:, ::-1].copy())
        residuals = torch.linalg.vector_norm(
            self._rest @ vectors[-BLOCK_SIZE:].to(self._rest), dim=0
        )
        return Ritz(theta[::-1].tolist(), residuals.tolist(), self._basis[:, :n], vectors)


def share(uncertainty: float, tolerance: float) -> float:
    """Return the share of the digits of ``tolerance`` that an uncertainty leaves; from one on, all.

    >>> round(share(1e-4, tolerance=1e-8), 6)
    0.5
    """
    return math.log(max(uncertainty, 1e-300)) / math.log(tolerance)


# --- both ends ------------------------------------------------------------------------------------


@failures_unresolved()
def extremes(
    a: Matrix,
    threshold: float,
    certify: bool,
    precisions: Sequence[torch.dtype],
    singular: bool = False,
) -> Extremes:
    """Find both ends by Krylov spaces, each in the first of the precisions that verifies it.

    With float32 alone, nothing is tried where float32 has no inverse. The bottom of a matrix that
    is known to be ``singular`` is zero: it is not looked for, and nothing is factorized for it.

    >>> a = torch.diag(torch.cat([torch.tensor([3.0, 2.0]), torch.ones(60), torch.tensor([0.5])]))
    >>> both = extremes(a.double(), 0.01, certify=False, precisions=[torch.float32])
    >>> round(both.largest, 6), round(both.smallest, 6), both.below
    (3.0, 0.5, 0)
    """
    rough, exact = Gram(a, torch.float32), Gram(a, torch.float64)
    squares = [square for square in (rough, exact) if square.dtype in precisions]
    if len(squares) == 1 and not singular:
        _ = rough.factor  # raises Unresolved, where nothing else is worth its time
    begun = None if singular else _first_steps(rough)
    try:
        top = _first_verified(_top, squares)
    except Unresolved as problem:
        blurred = problem.blurred or (begun is not None and _squaring_blurs(begun, rough))
        raise Unresolved(str(problem), crowded=problem.crowded, blurred=blurred) from problem
    largest, cut = top.values[0], threshold * top.values[0]
    if singular:
        bottom = _End([0.0], top.method)
    elif begun and _crowded(begun):
        bottom = _first_verified(lambda square: _crowd(square, begun, largest), [rough, exact])
    else:
        bottom = _bottom_or_null(squares, exact, begun, largest, cut)
    exact.release()
    smallest, below, method = bottom.values[0], bottom.below, f"krylov, {bottom.method}"
    clear = smallest > cut * (1 + 1e-6)
    if below is not None and clear != (below == 0):
        raise Unresolved("the count and the smallest value contradict each other")
    if below is None and clear:
        below = 0
    if below is None and not certify and cut > FLOAT32_COUNTS_ABOVE * largest:
        below = count_below_in_float32(rough, cut)
        method = method if below is None else f"{method}, inertia float32"
    rough.release()
    if below is None or certify:
        below, certify, method = count_below(exact, cut), True, f"{method}, inertia"
    return Extremes(largest, top.values[1], smallest, below, certify, method)


def _first_steps(square: Gram) -> Space | None:
    """Return a short Krylov space of the inverse, if this precision has one; another may have."""
    try:
        space = _bottom_space(square)
        space.grow(FIRST_STEPS)
    except Unresolved:
        return None
    return space


def _bottom_space(square: Gram) -> Space:
    """Return a Krylov space of the inverse, whose largest eigenvalues are the bottom's."""
    _ = square.factor  # raises where there is no inverse
    # not cached by the square: a reference cycle would delay freeing the matrix
    return Space(square.inverse, square.like, MAX_BOTTOM_STEPS)


def _crowded(begun: Space) -> bool:
    """Tell whether the first steps say that the Krylov space would take too many more."""
    ritz = begun.ritz(POLISHED_VECTORS + 1)
    return ritz.values[POLISHED_VECTORS] > CROWDED_RATIO * ritz.values[0]


def _squaring_blurs(begun: Space, square: Gram) -> bool:
    """Tell whether the first steps show a sigma_min, or a crowd, too small to square."""
    ritz = begun.ritz(POLISHED_VECTORS + 1)
    largest = math.sqrt(norm(square.apply, square.like, turns=2))
    if _crowded(begun):
        return _Settled(largest, math.inf, square.eps).blurred(ritz)
    return ritz.values[0] ** -0.5 < 10 * INVERSE_FAILS_BELOW * largest


@dataclass(frozen=True)
class _End:
    """Verified singular values at one end of the spectrum, outermost first."""

    values: list[float]
    method: str
    below: int | None = None


def _first_verified(method: Callable[[Gram], _End], squares: list[Gram]) -> _End:
    """Return the method's answer in the first precision that can verify it."""
    for square in squares[:-1]:
        try:
            return method(square)
        except Unresolved as problem:
            if problem.crowded:
                raise
        square.release()
    return method(squares[-1])


def _top(square: Gram) -> _End:
    """Return the two largest singular values, from a Krylov space of ``A'A``."""

    def progress(ritz: Ritz) -> float:
        if ritz.values[1] < 256 * square.eps * ritz.values[0]:
            raise Unresolved("the second value drowns in the rounding of the first")
        done = share(ritz.uncertainty(2), 2 * TOLERANCE)  # of the squares
        if done < 1 and ritz.residuals[1] < 4 * square.eps * ritz.values[1]:
            raise Unresolved("the largest values are as close together as rounding lets them be")
        return done

    steps = min(square.matrix.shape[1] // COLUMNS_PER_TOP_STEP, MOST_TOP_STEPS)
    space = Space(square.apply, square.like, max(steps, MAX_TOP_STEPS))
    ritz = space.until(progress, POLISHED_VECTORS)
    triplets = Triplets.within(square.matrix, ritz.vectors(POLISHED_VECTORS))
    if not triplets.largest_squares.uncertainty(2) < 2 * TOLERANCE:
        raise Unresolved("residual of the largest singular values")
    return _End(triplets.values[:2].tolist(), square.precision)


def _bottom(square: Gram, exact: Gram, begun: Space | None, largest: float, cut: float) -> _End:
    """Return the smallest singular value, and the number of values up to ``cut`` if countable.

    A value that a space in float32 cannot verify is polished in float64, by the ``exact`` square.
    """
    settled = _Settled(largest, cut**-2, square.eps)
    space = begun if begun and begun.like.dtype == square.dtype else _bottom_space(square)
    ritz = space.until(settled, MAX_COUNTED + BLOCK_SIZE)
    start, countable = (
        ritz.vectors(POLISHED_VECTORS + (settled.count or 0)),
        settled.count is not None,
    )
    if square is not exact:
        with contextlib.suppress(Unresolved):
            begin = Triplets.within(square.matrix, start)
            triplets, below = last_triplets(square, begin, cut if countable else None)
            return _End([float(triplets.values[-1])], str(square), below)
        square.release()
    hopeless = _inverse_fails(exact)
    try:
        if hopeless:
            raise Unresolved("so small that an inverse in float64 cannot verify it")
        polished = _polish(exact, start, 1, cut**-2 if countable else None)
    except Unresolved as problem:
        # where squaring blurs even one of them, the list of all values would meet this again
        blurred = hopeless or settled.blurred(ritz, several=False)
        raise Unresolved(str(problem), crowded=hopeless, blurred=blurred) from problem
    below = polished.count(cut**-2) if countable else None
    return _End([polished.values[0] ** -0.5], str(exact), below)


def _bottom_or_null(
    squares: list[Gram], exact: Gram, begun: Space | None, largest: float, cut: float
) -> _End:
    """Return the smallest singular value, which may be one that float64 cannot tell from zero."""
    try:
        return _first_verified(lambda square: _bottom(square, exact, begun, largest, cut), squares)
    except Unresolved as problem:
        if exact not in squares or (problem.crowded and not problem.blurred):
            raise
        known = problem.crowded, problem.blurred
    null = _null(exact, largest)
    if null is None:
        crowded, blurred = known
        raise Unresolved("nearly singular", crowded=crowded, blurred=blurred)
    return null


def _null(exact: Gram, largest: float) -> _End | None:
    """Return an end of zero, as far as float64 can tell: vectors that the matrix maps to nothing.

    No singular value exceeds what is left of a unit vector, so the last one is that small. Without
    this an exactly singular matrix would take the time of the plain SVD.
    """
    if exact.tall:  # its Gram matrix has lost what is asked for here
        exact.release()
        exact = _unsquared(exact.matrix)
    if not _inverse_fails(exact):
        return None
    vectors = exact.near_null(random_block(exact.like))
    if not vectors.isfinite().all():
        return None
    left = float(torch.linalg.svdvals(times(exact.matrix, vectors))[-1])
    is_zero = left < NULL_SHARE * max(exact.matrix.shape) * EPS * largest
    return _End([left], f"{exact}, null vector") if is_zero else None


def last_triplets(
    square: Gram, start: Triplets, cut: float | None = None
) -> tuple[Triplets, int | None]:
    """Return the last singular triplets in float64, by corrections through rougher factors.

    This is Davidson's method (1975): the residual of a vector, multiplied by an inverse that has a
    few digits, takes as many digits from its error. All vectors are corrected until the values up
    to ``cut``, whose number is the second answer, can be told apart from those above. The value
    that is verified is the smallest.

    >>> square = Gram(torch.diag(torch.arange(1.0, 33.0)).double(), torch.float32)
    >>> start = Triplets.within(square.matrix, torch.eye(32)[:, :4] + 1e-3)
    >>> round(float(last_triplets(square, start)[0].values[-1]), 6)
    1.0
    """
    triplets, below, previous, waiting = start, None, math.inf, cut is not None
    for turn in range(MAX_CORRECTIONS):
        ritz = triplets.smallest_squares
        if cut is not None and waiting:
            below = ritz.count(-cut * cut)
            waiting = below is None and turn < COUNTING_TURNS
        uncertainty = ritz.uncertainty(1)
        if uncertainty < 2 * TOLERANCE and not waiting:
            return triplets, below
        if turn > 2 and uncertainty > previous / 2 and not waiting:
            break
        kept = slice(None if waiting else -POLISHED_VECTORS, None)
        residual = (triplets.rest * triplets.values)[:, kept]
        better = triplets.right[:, kept] - square.scaled_inverse(residual)
        triplets, previous = Triplets.within(square.matrix, better), uncertainty
    raise Unresolved("residual of the smallest singular values")


def _crowd(square: Gram, begun: Space, largest: float) -> _End:
    """Return the smallest of many singular values that lie close together.

    The inverse of ``A'A - s`` tells them apart if the shift s is little less than the smallest
    square. From the Gram matrix it has a few digits: enough to find where to begin, and to correct
    in float64.
    """
    ritz = begun.ritz(BLOCK_SIZE)
    shift = 1 / (ritz.values[0] + max(ritz.residuals[0], SHIFT_MARGIN * ritz.values[0]))
    try:
        if shift < square.eps * largest**2:
            raise Unresolved("squaring drowns the smallest values")
        inverse = square.shifted_inverse(shift)
        space = Space(inverse, square.like, SHIFTED_STEPS, ritz.vectors(BLOCK_SIZE))
        space.grow(SHIFTED_STEPS)
        smallest = _davidson(
            square.matrix, shift, inverse, space.ritz(BLOCK_SIZE).vectors(BLOCK_SIZE)
        )
    except Unresolved as problem:
        blurred = _Settled(largest, math.inf, square.eps).blurred(ritz)
        raise Unresolved(str(problem), crowded=problem.crowded, blurred=blurred) from problem
    return _End([smallest], f"Davidson {square.precision}")


def _davidson(
    a: Matrix, shift: float, inverse: Callable[[Tensor], Tensor], start: Float[Tensor, "p k"]
) -> float:
    """Return the smallest singular value in float64, through a rough ``(A'A - shift)^-1``.

    Most of a residual r belongs to values far away, which move the one sought by little. The
    inverse tells: ``r'(A'A - shift)^-1 r``, times the distance of the last square looked at from
    the shift, is the square of a residual to which values beyond add their due share only. It is
    doubled, as the inverse is rough.
    """
    basis, _ = torch.linalg.qr(start.double())
    image, previous = times(a, basis), math.inf
    for turn in range(min(MAX_DAVIDSON_TURNS, a.shape[1] // BLOCK_SIZE)):
        c = torch.linalg.eigh(image.mT @ image)[1][:, :BLOCK_SIZE]
        right, left = _blas.multiply(basis, c), _blas.multiply(image, c)
        squares = left.square().sum(0)
        rest = transposed_times(a, left) - right * squares
        sizes = torch.linalg.vector_norm(rest, dim=0)
        block = inverse((rest / sizes.clamp(min=1e-300)).to(start.dtype)).double()
        near = (2 * sizes * (rest * block).sum(0) * (squares[-1] - shift)).abs().sqrt()
        ritz = Ritz((-squares).tolist(), torch.minimum(sizes, near).tolist())
        uncertainty = ritz.uncertainty(1)
        if uncertainty < 2 * TOLERANCE and squares[0] > shift:
            return float(squares[0].sqrt())
        if turn > 2 and uncertainty > previous / 2:
            break
        for _ in range(2):  # once more for what rounding left of the basis in the block
            block = torch.linalg.qr(block - _blas.multiply(basis, _blas.multiply(basis.mT, block)))[
                0
            ]
        previous = uncertainty
        basis, image = torch.cat([basis, block], 1), torch.cat([image, times(a, block)], 1)
    raise Unresolved("residual of the smallest of many close values", crowded=True)


@dataclass(frozen=True)
class Triplets:
    """Approximate singular triplets, largest first, and the residuals of these.

    ``rest`` is ``A'u - sigma v`` of every triplet, which is zero where it is exact.

    >>> found = Triplets.within(torch.diag(torch.tensor([3.0, 1.0])).double(), torch.eye(2))
    >>> found.values, float(found.rest.abs().max())
    (tensor([3., 1.], dtype=torch.float64), 0.0)
    """

    left: Float[Tensor, "q k"]
    values: Float[Tensor, " k"]
    right: Float[Tensor, "p k"]
    rest: Float[Tensor, "p k"]

    @classmethod
    def within(cls, a: Matrix, vectors: Float[Tensor, "p k"]) -> Triplets:
        """Return the best triplets of a span (Rayleigh and Ritz), in float64."""
        v, _ = torch.linalg.qr(vectors.double())
        u, s, wt = torch.linalg.svd(times(a, v), full_matrices=False)
        right = v @ wt.mT
        return cls(u, s, right, transposed_times(a, u) - right * s)

    def sliced(self, kept: slice) -> Triplets:
        """Return some of the triplets."""
        return Triplets(*(part[..., kept] for part in vars(self).values()))

    @property
    def largest_squares(self) -> Ritz:
        """The values as eigenvalues of ``A'A``."""
        residuals = self.values * torch.linalg.vector_norm(self.rest, dim=0)
        return Ritz(self.values.square().tolist(), residuals.tolist())

    @property
    def smallest_squares(self) -> Ritz:
        """The values as eigenvalues of ``-A'A``: its largest are the smallest squares."""
        squares = self.largest_squares
        return Ritz([-value for value in squares.values[::-1]], squares.residuals[::-1])


@failures_unresolved()
def smallest(a: Matrix, wanted: int) -> Float[Tensor, " wanted"]:
    """Return the ``wanted`` smallest singular values, largest of them first.

    >>> smallest(torch.diag(torch.arange(1.0, 33.0)).double(), 2).round(decimals=6)
    tensor([2., 1.], dtype=torch.float64)
    """
    square, start = _started(a, wanted)
    polished = _polish(square, start, wanted)
    if wanted > POLISHED_VECTORS and _clustered(np.array(polished.values[:wanted])):
        # a Krylov space holds as many equal values as its block has vectors: take a wider block
        polished = _polish(square, random_block(a, wanted + POLISHED_VECTORS), wanted)
    squares = torch.tensor(polished.values[:wanted], dtype=a.dtype, device=a.device)
    return squares.rsqrt().flip(0)


@failures_unresolved()
def least(a: Matrix, near: int) -> float:
    """Return the smallest singular value, one of about ``near`` that lie near each other.

    >>> round(least(torch.diag(torch.arange(1.0, 33.0)).double(), near=2), 6)
    1.0
    """
    return float(_polish(*_started(a, near), 1).values[0] ** -0.5)


def _unsquared(a: Matrix) -> Gram:
    """Return an inverse in float64 from an LU factorization of the matrix, or of its triangle."""
    if a.shape[0] == a.shape[1]:
        return Gram(a, torch.float64)
    if isinstance(a, Panels):
        return Gram(a, torch.float64, by_triangle=True)
    return Gram(triangle(a), torch.float64)


def _started(a: Matrix, wanted: int) -> tuple[Gram, Float[Tensor, "p k"]]:
    """Return an inverse in float64, and vectors from which to find so many of the smallest values.

    For a few values these are random; for more they are about the last right singular vectors,
    and a few others that separate them from the rest.
    """
    if wanted > MAX_COUNTED:
        raise Unresolved("more small values than can be polished together")
    # the Gram matrix of a tall one has lost what is asked for here
    square = _unsquared(a)
    if _inverse_fails(square):
        raise Unresolved("so small that an inverse in float64 cannot verify it")
    if wanted <= POLISHED_VECTORS:
        return square, random_block(a)

    def progress(ritz: Ritz) -> float:
        if len(ritz.values) <= wanted:
            return 0.0
        uncertainty = ritz.uncertainty(wanted)
        if ritz.steps >= PATIENCE_STEPS + wanted // 4 and uncertainty > STALLED_UNCERTAINTY:
            raise Unresolved(CROWDED_REASON)
        return share(uncertainty, TOLERANCE)

    count = wanted + POLISHED_VECTORS
    return square, _bottom_space(square).until(progress, count).vectors(count)


def hopeless(gram: Float[Tensor, "p p"]) -> bool:
    """Tell whether the pivots of a Gram matrix, its lower triangle, say that the SVD is faster.

    :func:`smallest` would find nothing, or too much. No pivot is smaller than sigma_min, so a tiny
    one is proof; some tiny values have none.

    >>> hopeless(torch.diag(torch.tensor([1.0, 1e-16]).double()))
    True
    """
    cholesky = _blas.Cholesky.of(gram)
    pivots = cholesky.factor.diagonal()
    largest = math.sqrt(float(torch.linalg.matrix_norm(gram)))  # sigma_1, or up to p^(1/4) of it
    blurred = int((pivots < GRAM_BLURS_BELOW * largest).sum())
    if cholesky.indefinite or blurred > POLISHED_VECTORS:
        return True
    return float(pivots.min()) < 10 * INVERSE_FAILS_BELOW * largest


def _inverse_fails(square: Gram) -> bool:
    """Tell whether the pivots say that an inverse in float64 would verify nothing.

    Those of a tall matrix say nothing: its Gram matrix has lost the same digits.
    """
    if square.tall:
        return False
    try:
        pivots = square.factor.diagonal().abs()
    except Unresolved:
        return True
    return float(pivots.min()) < INVERSE_FAILS_BELOW * float(pivots.max())


def _polish(
    square: Gram, start: Float[Tensor, "p k"], wanted: int, cut: float | None = None
) -> Ritz:
    """Return the largest eigenvalues of the inverse in float64, by subspace iteration.

    Accepted after two independent checks: the residual of the inverse, and ``|Av|`` against it.
    With a ``cut`` it goes on for a few turns until those above can be counted.
    """
    a, v = square.matrix, start.double()
    previous, more = math.inf, COUNTING_TURNS if cut else 0
    for turn in range(MAX_POLISH_TURNS):
        v, _ = torch.linalg.qr(v)
        image = square.inverse(v)
        theta, c = torch.linalg.eigh(v.mT @ image)
        theta, c = theta.flip(0), c.flip(1)
        residuals = torch.linalg.vector_norm(image @ c - (v @ c) * theta, dim=0)
        ritz = Ritz(theta.tolist(), residuals.tolist())
        uncertainty = ritz.uncertainty(wanted)
        if turn > 2 + (COUNTING_TURNS if cut else 0) and uncertainty >= previous / 2:
            break  # also where no residual is left, and |Av| differs all the same
        if uncertainty < TOLERANCE and cut and more and ritz.count(cut) is None:
            more -= 1
        elif uncertainty < TOLERANCE:
            # |Av| errs by the square of what v and the inverse do: it is the value, they the check.
            y = torch.linalg.qr(image @ c[:, :wanted])[0]
            values = torch.linalg.svdvals(times(a, y)).flip(0)
            if ((values**2 * theta[:wanted] - 1).abs() < 10 * TOLERANCE).all():
                return Ritz([*(values**-2).tolist(), *theta[wanted:].tolist()], residuals.tolist())
        v, previous = image, uncertainty
    raise Unresolved("residual of the smallest singular values")


@dataclass
class _Settled:
    """Whether a Krylov space of the inverse holds its largest eigenvalue and all above ``cut``.

    ``count`` is then their number, or ``None`` when there are too many or rounding hides them.
    """

    largest: float
    cut: float
    eps: float
    count: int | None = None

    def __call__(self, ritz: Ritz) -> float:
        uncertainty = ritz.uncertainty(1)
        if ritz.steps >= PATIENCE_STEPS and uncertainty > STALLED_UNCERTAINTY:
            raise Unresolved(CROWDED_REASON, crowded=True, blurred=self.blurred(ritz))
        done = share(uncertainty, TOLERANCE)
        return done if done < 1 or self._counted(ritz) else 0.9

    def blurred(self, ritz: Ritz, several: bool = True) -> bool:
        """Tell whether more than a few values are too small for the Gram matrix, or any is."""
        value = ritz.values[POLISHED_VECTORS if several else 0]
        return value > max((GRAM_BLURS_BELOW * self.largest) ** -2, self._noise(ritz))

    def _noise(self, ritz: Ritz) -> float:
        return 4 * self.eps * ritz.values[0]  # ten times the worst met

    def _counted(self, ritz: Ritz) -> bool:
        """Tell whether the number of values above ``cut`` is known, or known to stay unknown."""
        theta, residuals = np.array(ritz.values), np.array(ritz.residuals)
        k = int((theta > self.cut).sum())
        noise = self._noise(ritz)
        if k > MAX_COUNTED or noise > 0.5 * self.cut:
            return True
        if k + BLOCK_SIZE // 2 >= len(theta):
            return False
        distance = np.abs(theta[: k + 1] - self.cut)
        if not (residuals[: k + 1] < np.maximum(0.1 * distance, noise)).all():
            return False
        self.count = None if _clustered(theta[: k + 1]) else k
        return True


def _clustered(values: NDArray[np.float64]) -> bool:
    """Tell whether so many values lie together that a Krylov block may hide some."""
    width = BLOCK_SIZE - 3
    return len(values) > width and bool((values[width:] > 0.98 * values[:-width]).any())
