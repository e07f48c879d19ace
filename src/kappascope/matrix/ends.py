"""Both ends of a spectrum with their vectors: found in float32, corrected and verified in float64.

The Gram matrix and its tridiagonal form take half the time in float32, and they show the whole
spectrum: every square lies within ``BLUR`` of where the form has it, so nothing is missed at
an end whose block of vectors spans more than that. The vectors are right to a few digits; their
Rayleigh-Ritz values in float64, and what float64 residuals say of these, are right to eight. What
the squares blur at the lower end is corrected through float32 factors of the matrix. Where a check
fails, :class:`~kappascope.matrix._gram.Unresolved` is raised, and the caller takes the long way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import _blas, _krylov
from kappascope.matrix._gram import (
    TOLERANCE,
    Gram,
    Unresolved,
    count_below,
    count_below_in_float32,
)

# Of the largest square: how far one may lie from an eigenvalue of the float32 form. The most met
# was 21 roundings, of a constant matrix; of weights it is one or two.
BLUR = 24 * torch.finfo(torch.float32).eps
KEPT_VECTORS = 4  # at either end, for whoever asks what happens along them
BLOCK_VECTORS = 5  # one more at either end, that separates them from the rest


@dataclass(frozen=True)
class Ends:
    """The outermost singular triplets: some of the first, then as many of the last.

    ``errors`` estimates the sine of the angle by which each right vector is off: its residual over
    the distance to the nearest value that is not among those of its end.

    >>> eye = torch.eye(2)
    >>> Ends(eye, torch.tensor([2.0, 1.0]), eye, torch.zeros(2)).values
    tensor([2., 1.])
    """

    left: Float[Tensor, "out k"]
    values: Float[Tensor, " k"]
    right: Float[Tensor, "in k"]
    errors: Float[Tensor, " k"]

    def sliced(self, kept: slice) -> Ends:
        """Return some of the triplets."""
        return Ends(*(part[..., kept] for part in vars(self).values()))

    def then(self, last: Ends) -> Ends:
        """Return these triplets and some further ones of the same matrix."""
        pairs = zip(vars(self).values(), vars(last).values(), strict=True)
        return Ends(*(torch.cat(pair, -1) for pair in pairs))

    def scaled(self, exponent: int, dtype: torch.dtype) -> Ends:
        """Return the ends of ``2**exponent`` times the matrix, in a precision."""
        values = torch.ldexp(self.values, torch.tensor(exponent))
        left, right, errors = (part.to(dtype) for part in (self.left, self.right, self.errors))
        return Ends(left, values.to(dtype), right, errors)

    def transposed(self) -> Ends:
        """Return the ends of the transpose."""
        return replace(self, left=self.right, right=self.left)


@_krylov.failures_unresolved()
def both_ends(a: Float[Tensor, "q p"], threshold: float) -> tuple[_krylov.Extremes, Ends]:
    """Find both ends of a tall, scaled, finite matrix of float64, and count its small values.

    >>> a = torch.diag(torch.linspace(3, 1, 40)).double()
    >>> extremes, ends = both_ends(a, threshold=0.01)
    >>> round(extremes.largest, 6), round(extremes.smallest, 6), extremes.below, len(ends.values)
    (3.0, 1.0, 0, 8)
    """
    rough = Gram(a, torch.float32)
    form = _blas.Tridiagonal.of(rough.lower)
    squares, vectors = form.ends(BLOCK_VECTORS)
    first_squares, last_squares = squares[:BLOCK_VECTORS], squares[BLOCK_VECTORS:]
    blur = BLUR * float(last_squares[-1])
    if min(first_squares[-1] - first_squares[0], last_squares[-1] - last_squares[0]) < 2 * blur:
        raise Unresolved("more values at an end than float32 tells apart")
    both = _krylov.Triplets.within(a, vectors)  # one pass over the matrix for both ends
    top, bottom = both.sliced(slice(None, BLOCK_VECTORS)), both.sliced(slice(BLOCK_VECTORS, None))
    if not top.largest_squares.uncertainty(2) < 2 * TOLERANCE:
        raise Unresolved("residual of the largest singular values")
    bottom, _ = _krylov.last_triplets(rough, bottom)
    largest, second, smallest = (float(v) for v in (*top.values[:2], bottom.values[-1]))
    cut = threshold * largest
    below = 0
    if smallest <= cut * (1 + 1e-6):
        seen = max(abs(last_squares[-1] - largest**2), abs(first_squares[0] - smallest**2))
        below = _counted(form, rough, cut, 4 * seen + blur / 4)
    method = "tridiagonal float32, corrected"
    ends = _outer(top, slice(None, KEPT_VECTORS), innermost=-1).then(
        _outer(bottom, slice(-KEPT_VECTORS, None), innermost=0)
    )
    return _krylov.Extremes(largest, second, smallest, below, False, method), ends


def _counted(form: _blas.Tridiagonal, rough: Gram, cut: float, margin: float) -> int:
    """Count the singular values up to ``cut``: by the form, or where one is too near by inertia.

    The margin is four times the error seen at the ends, and some roundings: errors between are of
    the same kind.
    """
    least, most = (form.count_up_to(cut * cut + side * margin) for side in (-1, 1))
    if least == most:
        return least
    below = count_below_in_float32(rough, cut)
    return count_below(Gram(rough.matrix, torch.float64), cut) if below is None else below


def _outer(block: _krylov.Triplets, kept: slice, innermost: int) -> Ends:
    """Return the kept triplets of a block; its innermost value stands for all beyond it."""
    gaps = (block.values - block.values[innermost]).abs().clamp(min=1e-300)
    errors = (torch.linalg.vector_norm(block.rest, dim=0) / gaps).clamp(max=1.0)
    return Ends(block.left, block.values, block.right, errors).sliced(kept)
