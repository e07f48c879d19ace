"""The ends of a spectrum from block Krylov spaces, every value checked in float64.

The largest singular values come from a Krylov space of ``A'A``, the smallest from one of its
inverse, through one LU or Cholesky factorization; in float32 where that can be verified and in
float64 where not. Where many lie close together, Davidson's method finds the smallest from just
below them. A method that cannot verify its answer raises :class:`Unresolved`, and
:mod:`kappascope.spectra` takes all singular values instead. Matrices here are tall (or square),
finite, non-zero and scaled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kappascope import kernels
from kappascope.lanczos import (
    BLOCK,
    TOLERANCE,
    Ritz,
    Space,
    Unresolved,
    norm,
    random_block,
    share,
)
from kappascope.panels import Dense, times, transposed_times, triangle
from kappascope.squares import GUARD, Square, count_below, count_roughly

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
"""What torch raises where LAPACK fails, named once: torch does not say that it exports it."""

COUNTING = 4  # more turns of an iteration to count by: each costs a fifth of what inertia does
COUNTABLE = 64  # singular values below the threshold that a Krylov space can count reliably
BLURRED = 3e-4  # squaring moves a value x sigma_1 by some eps/x^2: above this a few 1e-9
LOST = 1e-7  # of sigma_1: of what is smaller, an inverse in float64 seldom has eight digits
SLOW = 0.05  # what is no better known after eight steps needs forty, which all values are worth
CROWDED = 0.75  # ninth of the inverse squares over the first: from here on forty steps follow
COARSE = 4e-3  # of sigma_1: a threshold below, squared, is hardly more than float32's rounding
APART = 0.02  # of the smallest square: nearer to it the rounding of float32 may cross it
TELLING = 8  # steps from just below a crowd, after which its smallest are told apart
TURNS = 12  # of its corrections
NEAR = "too many values near the smallest"
WORTHWHILE = 1800  # up to here a float64 attempt costs as much as the SVD it would save


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
def failures_told() -> Iterator[None]:
    """LAPACK's own failure to converge is one more reason to try the next method.

    >>> with failures_told():
    ...     np.linalg.cholesky(-np.eye(2))
    Traceback (most recent call last):
    kappascope.lanczos.Unresolved: LAPACK: Matrix is not positive definite
    """
    try:
        yield
    except (np.linalg.LinAlgError, LinAlgError) as problem:
        raise Unresolved(f"LAPACK: {problem}") from problem


@failures_told()
def extremes(a: Dense, threshold: float, certify: bool) -> Extremes:
    """The two ends from two Krylov spaces, each in float32 if that can be verified.

    >>> a = torch.diag(torch.cat([torch.tensor([3.0, 2.0]), torch.ones(60), torch.tensor([0.5])]))
    >>> found = extremes(a.double(), threshold=0.01, certify=False)
    >>> round(found.largest, 6), round(found.smallest, 6), found.below
    (3.0, 0.5, 0)
    """
    rough, exact = Square(a, torch.float32), Square(a, torch.float64)
    squares = [rough, exact]
    if min(a.shape) <= WORTHWHILE:
        squares.pop()
        _ = rough.factor  # where that fails nothing else is worth its time
    begun = _look_down(rough)
    try:
        top = _first_verified(_top, squares)
    except Unresolved as problem:
        blurred = problem.blurred or _vanishing(begun, rough)
        raise Unresolved(str(problem), crowded=problem.crowded, blurred=blurred) from problem
    largest, cut = top.values[0], threshold * top.values[0]
    if begun and _crowded(begun):
        bottom = _first_verified(lambda square: _crowd(square, begun, largest), [rough, exact])
    else:
        bottom = _first_verified(
            lambda square: _bottom(square, exact, begun, largest, cut), squares
        )
    smallest, below, method = bottom.values[0], bottom.below, f"krylov, {bottom.method}"
    clear = smallest > cut * (1 + 1e-6)
    if below is not None and clear != (below == 0):
        raise Unresolved("the count and the smallest value contradict each other")
    if below is None and clear:
        below = 0
    if below is None and not certify and cut > COARSE * largest:
        below = count_roughly(rough, cut)
        method = method if below is None else f"{method}, inertia float32"
    if below is None or certify:
        below, certify, method = count_below(exact, cut), True, f"{method}, inertia"
    return Extremes(largest, top.values[1], smallest, below, certify, method)


def _look_down(square: Square) -> Space | None:
    """Three steps towards the bottom, if this precision has an inverse; another may have."""
    try:
        space = square.lower()
        space.grow(3)
    except Unresolved:
        return None
    return space


def _crowded(begun: Space) -> bool:
    """Whether three steps say that the Krylov space would take too many more."""
    ritz = begun.ritz(GUARD + 1)
    return ritz.values[GUARD] > CROWDED * ritz.values[0]


def _vanishing(begun: Space | None, square: Square) -> bool:
    """Whether three steps say that sigma_min, or a crowd of values, is too small for squaring."""
    if begun is None:
        return False
    ritz = begun.ritz(GUARD + 1)
    largest = math.sqrt(norm(square.apply, square.rough, turns=2))
    if _crowded(begun):
        return _Settled(largest, math.inf, square.eps).blurred(ritz)
    return ritz.values[0] ** -0.5 < 10 * LOST * largest


@dataclass(frozen=True)
class _End:
    """Verified singular values at one end of the spectrum, outermost first."""

    values: list[float]
    method: str
    below: int | None = None


def _first_verified(method: Callable[[Square], _End], squares: list[Square]) -> _End:
    """The method's answer in the first precision that can verify it."""
    for square in squares:
        try:
            return method(square)
        except Unresolved as problem:
            reason = problem
            if problem.crowded:
                break
    raise reason


def _top(square: Square) -> _End:
    """The two largest singular values, from a Krylov space of ``A'A``."""

    def progress(ritz: Ritz) -> float:
        if ritz.values[1] < 256 * square.eps * ritz.values[0]:
            raise Unresolved("the second value drowns in the rounding of the first")
        done = share(ritz.uncertainty(2), 2 * TOLERANCE)  # of the squares
        if done < 1 and ritz.residuals[1] < 4 * square.eps * ritz.values[1]:
            raise Unresolved("the largest values are as close together as rounding lets them be")
        return done

    ritz = Space(square.apply, square.rough, 36).until(progress, GUARD)
    found = _Triplets.within(square.matrix, ritz.vectors(GUARD))
    if not found.largest_squares.uncertainty(2) < 2 * TOLERANCE:
        raise Unresolved("residual of the largest singular values")
    return _End(found.values[:2].tolist(), str(square))


def _bottom(square: Square, exact: Square, begun: Space | None, largest: float, cut: float) -> _End:
    """The smallest singular value, and the number of values up to ``cut`` where it is countable.

    What a space in float32 finds and cannot verify is polished in float64, by the ``exact`` square.
    """
    settled = _Settled(largest, cut**-2, square.eps)
    space = begun if begun and begun.like.dtype == square.dtype else square.lower()
    ritz = space.until(settled, COUNTABLE + BLOCK)
    start, countable = ritz.vectors(GUARD + (settled.count or 0)), settled.count is not None
    if square is not exact:
        with contextlib.suppress(Unresolved):
            smallest, below = _corrected(square, start, cut if countable else None)
            return _End([smallest], str(square), below)
    lost = _lost(exact)
    try:
        if lost:
            raise Unresolved("so small that an inverse in float64 cannot verify it")
        polished = _polish(exact, start, 1, cut**-2 if countable else None)
    except Unresolved as problem:
        # where squaring blurs even one of them, the list of all values would meet this again
        blurred = lost or settled.blurred(ritz, several=False)
        raise Unresolved(str(problem), crowded=lost, blurred=blurred) from problem
    below = polished.count(cut**-2) if countable else None
    return _End([polished.values[0] ** -0.5], str(exact), below)


def _corrected(
    square: Square, start: Float[Tensor, "p k"], cut: float | None
) -> tuple[float, int | None]:
    """The smallest singular value in float64, by corrections through rougher factors.

    This is Davidson's method (1975): what a vector leaves, sent through an inverse that has a few
    digits, takes as many digits from its error. All vectors are corrected until the values up to
    ``cut``, whose number is the second answer, can be told apart from those above.
    """
    v, below, previous, waiting = start, None, math.inf, cut is not None
    for turn in range(8):
        found = _Triplets.within(square.matrix, v)
        ritz = found.smallest_squares
        if cut is not None and waiting:
            below = ritz.count(-cut * cut)
            waiting = below is None and turn < COUNTING
        uncertainty = ritz.uncertainty(1)
        if uncertainty < 2 * TOLERANCE and not waiting:
            return float(found.values[-1]), below
        if turn > 2 and uncertainty > previous / 2 and not waiting:
            break
        kept = slice(None if waiting else -GUARD, None)
        v = found.right[:, kept] - square.rough_inverse((found.rest * found.values)[:, kept])
        previous = uncertainty
    raise Unresolved("residual of the smallest singular values")


def _crowd(square: Square, begun: Space, largest: float) -> _End:
    """The smallest of many singular values that lie close together.

    The inverse of ``A'A - s`` tells them apart if s is little less than the smallest square. Of the
    Gram matrix it has a few digits: enough to find where to begin, and to correct in float64.
    """
    ritz = begun.ritz(BLOCK)
    below = 1 / (ritz.values[0] + max(ritz.residuals[0], APART * ritz.values[0]))
    try:
        if below < square.eps * largest**2:
            raise Unresolved("squaring drowns the smallest values")
        inverse = square.inverse_beyond(below)
        space = Space(inverse, square.gram, TELLING, ritz.vectors(BLOCK))
        space.grow(TELLING)
        smallest = _davidson(square.matrix, below, inverse, space.ritz(BLOCK).vectors(BLOCK))
    except Unresolved as problem:
        blurred = _Settled(largest, math.inf, square.eps).blurred(ritz)
        raise Unresolved(str(problem), crowded=problem.crowded, blurred=blurred) from problem
    return _End([smallest], f"Davidson {square.precision}")


def _davidson(
    a: Dense, shift: float, inverse: Callable[[Tensor], Tensor], start: Float[Tensor, "p k"]
) -> float:
    """The smallest singular value in float64, from all that a rough ``(A'A - shift)^-1`` adds.

    Most of a residual r belongs to values far away, which move the one sought by little. The
    inverse tells: ``r'(A'A - shift)^-1 r``, times the distance of the last square looked at from
    the shift, is the square of a residual to which values beyond add their due share only. It is
    doubled, as the inverse is rough.
    """
    basis, _ = torch.linalg.qr(start.double())
    image, previous = times(a, basis), math.inf
    for turn in range(min(TURNS, a.shape[1] // BLOCK)):
        c = torch.linalg.eigh(image.mT @ image)[1][:, :BLOCK]
        right, left = kernels.times(basis, c), kernels.times(image, c)
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
        new, previous = _apart(block, basis), uncertainty
        basis, image = torch.cat([basis, new], 1), torch.cat([image, times(a, new)], 1)
    raise Unresolved("residual of the smallest of many close values", crowded=True)


def _apart(block: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of what a block adds to a basis."""
    for _ in range(2):
        block = torch.linalg.qr(block - kernels.times(basis, kernels.times(basis.mT, block)))[0]
    return block


@dataclass(frozen=True)
class _Triplets:
    """Approximate singular triplets, largest first, and what ``A'`` makes of the left vectors.

    ``rest`` is that without its part along the right ones: what it has left is an error.
    """

    values: Float[Tensor, " k"]
    right: Float[Tensor, "p k"]
    rest: Float[Tensor, "p k"]

    @classmethod
    def within(cls, a: Dense, vectors: Float[Tensor, "p k"]) -> _Triplets:
        """The best of a span, in float64."""
        v, _ = torch.linalg.qr(vectors.double())
        u, s, wt = torch.linalg.svd(times(a, v), full_matrices=False)
        right = v @ wt.mT
        return cls(s, right, transposed_times(a, u) - right * s)

    @property
    def largest_squares(self) -> Ritz:
        """As eigenvalues of ``A'A``."""
        residuals = self.values * torch.linalg.vector_norm(self.rest, dim=0)
        return Ritz(self.values.square().tolist(), residuals.tolist())

    @property
    def smallest_squares(self) -> Ritz:
        """As eigenvalues of ``-A'A``, of which the smallest squares are the largest."""
        squares = self.largest_squares
        return Ritz([-value for value in squares.values[::-1]], squares.residuals[::-1])


@failures_told()
def smallest(a: Dense, wanted: int) -> Float[Tensor, " wanted"]:
    """The ``wanted`` smallest singular values, largest of them first.

    >>> smallest(torch.diag(torch.arange(1.0, 33.0)).double(), 2).round(decimals=6)
    tensor([2., 1.], dtype=torch.float64)
    """
    square, start = _begun(a, wanted)
    polished = _polish(square, start, wanted)
    if wanted > GUARD and _clustered(np.array(polished.values[:wanted])):
        # of equal values a Krylov space has as many as its block has vectors: take a wider block
        polished = _polish(square, random_block(a, wanted + GUARD), wanted)
    squares = torch.tensor(polished.values[:wanted], dtype=a.dtype, device=a.device)
    return squares.rsqrt().flip(0)


@failures_told()
def least(a: Dense, near: int) -> float:
    """The smallest singular value, one of some ``near`` each other.

    >>> round(least(torch.diag(torch.arange(1.0, 33.0)).double(), near=2), 6)
    1.0
    """
    return float(_polish(*_begun(a, near), 1).values[0] ** -0.5)


def _begun(a: Dense, wanted: int) -> tuple[Square, Float[Tensor, "p k"]]:
    """An inverse in float64, and vectors with which to seek so many of the smallest values."""
    if wanted > COUNTABLE:
        raise Unresolved("more small values than can be polished together")
    # the Gram matrix of a tall one has lost what is asked for here
    square = Square(a if a.shape[0] == a.shape[1] else triangle(a), torch.float64)
    if _lost(square):
        raise Unresolved("so small that an inverse in float64 cannot verify it")
    return square, random_block(a) if wanted <= GUARD else _lowest(square, wanted)


def _lowest(square: Square, wanted: int) -> Float[Tensor, "p k"]:
    """About the last right singular vectors, and a few more to separate them from the rest."""

    def progress(ritz: Ritz) -> float:
        if len(ritz.values) <= wanted:
            return 0.0
        uncertainty = ritz.uncertainty(wanted)
        if ritz.steps >= 8 + wanted // 4 and uncertainty > SLOW:
            raise Unresolved(NEAR)
        return share(uncertainty, TOLERANCE)

    return square.lower().until(progress, wanted + GUARD).vectors(wanted + GUARD)


def hopeless(gram: Float[Tensor, "p p"]) -> bool:
    """Whether pivots of a Gram matrix, its lower triangle, say that the SVD is sooner done.

    :func:`smallest` would find nothing, or too much. No pivot is smaller than sigma_min, so a tiny
    one is proof; some tiny values have none.

    >>> hopeless(torch.diag(torch.tensor([1.0, 1e-16]).double()))
    True
    """
    found = kernels.Cholesky.of(gram)
    pivots = found.factor.diagonal()
    largest = math.sqrt(float(torch.linalg.matrix_norm(gram)))  # sigma_1, or up to p^(1/4) of it
    blurred = int((pivots < BLURRED * largest).sum())
    return found.indefinite or blurred > GUARD or float(pivots.min()) < 10 * LOST * largest


def _lost(square: Square) -> bool:
    """Whether the pivots say that an inverse in float64 would verify nothing.

    Of a tall matrix they are of no use: its Gram matrix has lost the same digits.
    """
    if square.tall:
        return False
    try:
        pivots = square.factor.diagonal().abs()
    except Unresolved:
        return True
    return float(pivots.min()) < LOST * float(pivots.max())


def _polish(
    square: Square, start: Float[Tensor, "p k"], wanted: int, cut: float | None = None
) -> Ritz:
    """The largest eigenvalues of the inverse in float64, by subspace iteration.

    Accepted after two independent checks: the residual of the inverse, and ``|Av|`` against it.
    With a ``cut`` it goes on for a few turns until those above can be counted.
    """
    a, v = square.matrix, start.double()
    previous, more = math.inf, COUNTING if cut else 0
    for turn in range(12):
        v, _ = torch.linalg.qr(v)
        image = square.inverse(v)
        theta, c = torch.linalg.eigh(v.mT @ image)
        theta, c = theta.flip(0), c.flip(1)
        residuals = torch.linalg.vector_norm(image @ c - (v @ c) * theta, dim=0)
        ritz = Ritz(theta.tolist(), residuals.tolist())
        uncertainty = ritz.uncertainty(wanted)
        if turn > 2 + (COUNTING if cut else 0) and uncertainty >= previous / 2:
            break  # also where nothing is left of it, and |Av| differs all the same
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
        if ritz.steps >= 8 and uncertainty > SLOW:
            raise Unresolved(NEAR, crowded=True, blurred=self.blurred(ritz))
        done = share(uncertainty, TOLERANCE)
        return done if done < 1 or self._counted(ritz) else 0.9

    def blurred(self, ritz: Ritz, several: bool = True) -> bool:
        """Whether more than a few values are too small for the Gram matrix, or any is."""
        value = ritz.values[GUARD if several else 0]
        return value > max((BLURRED * self.largest) ** -2, self._noise(ritz))

    def _noise(self, ritz: Ritz) -> float:
        return 4 * self.eps * ritz.values[0]  # ten times the worst met

    def _counted(self, ritz: Ritz) -> bool:
        theta, residuals = np.array(ritz.values), np.array(ritz.residuals)
        k = int((theta > self.cut).sum())
        noise = self._noise(ritz)
        if k > COUNTABLE or noise > 0.5 * self.cut:
            return True
        if k + BLOCK // 2 >= len(theta):
            return False
        distance = np.abs(theta[: k + 1] - self.cut)
        if not (residuals[: k + 1] < np.maximum(0.1 * distance, noise)).all():
            return False
        self.count = None if _clustered(theta[: k + 1]) else k
        return True


def _clustered(values: NDArray[np.float64]) -> bool:
    """Whether as many values as a Krylov block has vectors lie together: some may hide then."""
    width = BLOCK - 3
    return len(values) > width and bool((values[width:] > 0.98 * values[:-width]).any())
