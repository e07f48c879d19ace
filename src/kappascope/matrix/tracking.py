"""The outermost singular triplets of a weight that moves a little between two questions.

A penalty on kappa needs two singular values and their vectors at every step, and a full SVD would
cost more than the step. Here both ends are tracked: a small block of right vectors each, improved
by one Rayleigh-Ritz step on the current matrix, the lower block with an LU (or, of a tall matrix,
Cholesky) factorization of an *earlier* one as preconditioner. The correction that this
preconditioner proposes estimates the error; where it is too large, another step is taken, and
where that does not help the factorization is stale and made anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import _blas, spectra
from kappascope.matrix._gram import gram
from kappascope.matrix.ends import Ends
from kappascope.matrix.threads import steady

State = dict[str, Any]

SVD_UP_TO = 96  # rows or columns: an SVD costs less than the calls it would save
BLOCK_SIZE = 4  # vectors at either end: the wanted one, and neighbours that it mixes with
# How much of a step may be new to the last left vector: the error it leaves is a fraction of that.
STALE_SETTLES_BELOW = 0.1  # by a factorization of an earlier matrix
FRESH_SETTLES_BELOW = 1.0  # by one of this very matrix
STALE_FAILS_ABOVE = 2.0  # in the first step by an earlier one: a second step would seldom do
MAX_STEPS = 12  # of a call; a matrix whose smallest values are equal has no vector to settle on
MIN_FIRST_STEPS = 8  # of the first call: it starts from random vectors
LIFTED_VECTORS = 16  # of which up to half are raised
LIFTING_ITERATIONS = 4  # by which a value half as large as the next ones is settled
MIN_LIFTED_KAPPA = 10.0  # below, the nearest matrix within a bound lowers the largest values too
MAX_POWER_STEPS = 60  # of a block towards the largest value; an SVD costs about as much
POWER_SETTLES_BELOW = 1e-3  # residual of the first triplet; the value's error is of its square
RESOLVED_SQUARES = 0.1  # error of a square beside the smallest one, up to which it is told apart
SQUARE_MARGINS = (1.02, 1.06, 1.2)  # on the largest square as found from below; tried in turn
# Calls that factorize at once after a stale factorization was of no use. Twice as many each time,
# and one less whenever one was of use.
MIN_FRESH_CALLS, MAX_FRESH_CALLS = 16, 128


@dataclass(frozen=True)
class ExtremeTriplets:
    """The first and the last singular triplet of each matrix of a stack, in this order.

    >>> triplets = extreme_triplets(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> triplets.values
    tensor([3., 1.])
    >>> triplets.left.abs()
    tensor([[1., 0.],
            [0., 0.],
            [0., 1.]])
    """

    left: Float[Tensor, "*stack out 2"]
    values: Float[Tensor, "*stack 2"]
    right: Float[Tensor, "*stack in 2"]

    def combined(self, weights: Float[Tensor, "*stack 2"]) -> Float[Tensor, "*stack out in"]:
        """Return the sum ``w1 u1 v1' + w2 un vn'`` with these weights.

        >>> triplets = extreme_triplets(torch.diag(torch.tensor([3.0, 1.0])))
        >>> triplets.combined(torch.tensor([5.0, 7.0]))
        tensor([[5., 0.],
                [0., 7.]])
        """
        if self.left.ndim == 2:  # one product: no large intermediates
            return (self.left * weights) @ self.right.mT
        first, last = (weights[..., i, None, None] for i in (0, 1))
        left, right = self.left, self.right.mT
        return first * left[..., :1] * right[..., :1, :] + last * left[..., 1:] * right[..., 1:, :]


@steady
def extreme_triplets(
    matrix: Float[Tensor, "*stack out in"], memory: State | None = None
) -> ExtremeTriplets:
    """Return both ends of the spectrum; with a ``memory``, from where the last call left it.

    Without a memory, for stacks and for small matrices they are exact: from an SVD, or for stacks
    of square float64 matrices from a method that is as good and takes half the time. The memory is
    a dictionary of tensors and numbers that this function alone reads and writes.

    >>> memory = {}
    >>> weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    >>> tracked, exact = extreme_triplets(weight, memory), extreme_triplets(weight)
    >>> torch.allclose(tracked.values, exact.values, rtol=0.01)
    True
    """
    if matrix.ndim > 2 and matrix.shape[-1] == matrix.shape[-2] and matrix.dtype == torch.float64:
        return _by_inverse_iteration(matrix)
    if memory is None or matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return _by_svd(matrix)
    matrix, scale = _squarable(matrix)
    if matrix.shape[0] >= matrix.shape[1]:
        tracked = _track(matrix, memory)
        return ExtremeTriplets(tracked.left, tracked.values * scale, tracked.right)
    tracked = _track(matrix.mT, memory)
    return ExtremeTriplets(tracked.right, tracked.values * scale, tracked.left)


def memory_form(matrix: Float[Tensor, "*stack out in"]) -> State:
    """Describe what the memory of a matrix holds after a call: tensors by shape and type.

    Pivots lie between the least and the largest of those given here.

    >>> sorted(memory_form(torch.ones(200, 100)))
    ['bottom', 'factor', 'patience', 'restless', 'stale', 'top']
    """
    size = min(matrix.shape[-2:])
    if matrix.ndim > 2 or size <= SVD_UP_TO:
        return {}
    block, factor = ((rows, size) for rows in (BLOCK_SIZE, size))
    shapes = {"top": block, "bottom": block, "factor": factor}
    form = {name: matrix.new_empty(shape, device="meta") for name, shape in shapes.items()}
    counts: State = {"restless": 0, "patience": 0, "stale": False}
    if matrix.shape[0] == matrix.shape[1]:
        counts |= {"pivots": torch.arange(1, size + 1, dtype=torch.int32), "flipped": False}
    return form | counts


def _squarable(matrix: Float[Tensor, "out in"]) -> tuple[Float[Tensor, "out in"], float]:
    """Return a matrix over a number, so that squares neither overflow nor vanish, and that number.

    Refused if it is not finite, before a memory takes it up.
    """
    scale = 1.0 if 0.1 < float(torch.linalg.vector_norm(matrix)) < 1e6 else _largest(matrix)
    if not math.isfinite(scale):
        raise spectra.LinAlgError("a matrix that is not finite has no singular values")
    return matrix.detach() if scale == 1.0 else matrix.detach() / scale, scale


def _largest(matrix: Float[Tensor, "out in"]) -> float:
    """Return the largest entry, or one if there is none."""
    low, high = matrix.aminmax()
    return max(-float(low), float(high)) or 1.0


def _by_svd(matrix: Float[Tensor, "*stack out in"]) -> ExtremeTriplets:
    """Return both ends of the whole decomposition."""
    u, s, vt = spectra.decomposition(matrix)
    outer = torch.tensor([0, s.shape[-1] - 1], device=s.device)
    return ExtremeTriplets(u[..., outer], s[..., outer], vt.mT[..., outer])


def _by_inverse_iteration(a: Float[Tensor, "*stack n n"]) -> ExtremeTriplets:
    """Find both ends by the Gram matrices' eigenvectors, sharpened by inverse iteration.

    Matrices with which that does not settle, where squaring has left nothing of the last vector,
    are decomposed instead; the others are not, or their digits would depend on their company.
    """
    v = torch.linalg.eigh(a.mT @ a).eigenvectors
    first, last = v[..., -1:], v[..., :1]
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    for _ in range(2):  # what squaring leaves, eps kappa^2, falls to its square and to nothing
        left = _unit_columns(torch.linalg.lu_solve(lu, pivots, last, adjoint=True))
        last = _unit_columns(torch.linalg.lu_solve(lu, pivots, left))
    outer = torch.cat([first, last], -1)
    images = a @ outer  # both at once: with one column, a stack of one matrix has other digits
    values = torch.linalg.vector_norm(images, dim=-2)
    rest = torch.linalg.vector_norm(a.mT @ left - values[..., None, 1:] * last, dim=-2)
    triplets = ExtremeTriplets(images / values[..., None, :], values, outer)
    lost = ~(rest < 1e-6 * values[..., 1:]).all(-1)
    if lost.any():
        anew = _by_svd(a[lost])
        for part in ("left", "values", "right"):
            getattr(triplets, part)[lost] = getattr(anew, part)
    return triplets


def _unit_columns(x: Float[Tensor, "*stack n 1"]) -> Float[Tensor, "*stack n 1"]:
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)


@steady
def largest_triplet(
    matrix: Float[Tensor, "*stack out in"], memory: State | None = None
) -> tuple[Float[Tensor, "*stack out"], Float[Tensor, "*stack"], Float[Tensor, "*stack in"]]:
    """The first singular triplet ``u, s, v``; with a ``memory``, from where the last call left it.

    Without a memory, for stacks and for small matrices it is that of an SVD. With one it comes from
    a small block of vectors, multiplied by ``A'A`` until the residual is below a thousandth of the
    value, which then lies closer still; where that takes too long, from an SVD.

    >>> u, s, v = largest_triplet(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> s, u.abs(), v.abs()
    (tensor(3.), tensor([1., 0., 0.]), tensor([1., 0., 0.]))
    """
    if memory is None or matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return _first_of_svd(matrix)
    a, scale = _squarable(matrix)
    tall = a if a.shape[0] >= a.shape[1] else a.mT
    block = memory["top"].to(a) if "top" in memory else _random_blocks(tall)["top"]
    for _ in range(MAX_POWER_STEPS):
        block = torch.linalg.qr((block @ tall.mT @ tall).mT)[0].mT
        image = block @ tall.mT
        u, s, wt = spectra.decomposition(image.mT)
        block = wt @ block
        left, value, right = u[:, 0], s[0], block[0]
        rest = torch.linalg.vector_norm(left @ tall - value * right)
        if bool(rest <= POWER_SETTLES_BELOW * value):
            memory["top"] = block
            ends = (left, right) if tall is a else (right, left)
            return ends[0], value * scale, ends[1]
    memory["top"] = block
    return _first_of_svd(matrix)


def _first_of_svd(matrix: Float[Tensor, "*stack out in"]) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = spectra.decomposition(matrix)
    return u[..., 0], s[..., 0], vt[..., 0, :]


def largest_form(matrix: Float[Tensor, "*stack out in"]) -> State:
    """What the memory of :func:`largest_triplet` holds after a call: a tensor by shape and type.

    >>> largest_form(torch.ones(200, 100))["top"].shape
    torch.Size([4, 100])
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return {}
    return {"top": matrix.new_empty((BLOCK_SIZE, min(matrix.shape)), device="meta")}


@steady
def lies_between(matrix: Float[Tensor, "*stack out in"], low: float, high: float) -> bool:
    """Whether all singular values are proven to lie between two values, cheaply.

    ``high^2 - W'W`` and ``W'W - low^2`` have Cholesky factorizations only if they do. Small
    matrices and stacks are left to the SVD.

    >>> lies_between(torch.eye(200), 0.5, 2.0), lies_between(torch.eye(200), 1.5, 2.0)
    (True, False)
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return False
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    ratio = high / low if low else 1.0
    square = gram(_in_digits_for_squares(tall / high, ratio))
    if _blas.Cholesky.of(-square, -1.0).indefinite:
        return False
    return not low or not _blas.Cholesky.of(square, 1 / ratio**2).indefinite


@steady
def lowered(
    matrix: Float[Tensor, "*stack out in"], limit: Float[Tensor, "*stack"]
) -> Float[Tensor, "*stack out in"]:
    """The singular values above a limit replaced by it: the nearest matrix within that.

    The Gram matrix of the shorter side tells the largest values as well as an SVD does, several
    times sooner, and only their vectors are needed.

    >>> lowered(torch.diag(torch.tensor([4.0, 1.0])), torch.tensor(2.0))
    tensor([[2., 0.],
            [0., 1.]])
    """
    tall = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT
    scale = tall.abs().amax((-2, -1)).clamp(min=torch.finfo(tall.dtype).tiny)
    if not bool(torch.isfinite(scale).all()):
        raise spectra.LinAlgError("a matrix that is not finite has no singular values")
    a = tall / scale[..., None, None]
    squares, v = torch.linalg.eigh(a.mT @ a)
    values = squares.clamp(min=0).sqrt() * scale[..., None]
    ceiling = limit.to(values)[..., None]
    lost = torch.where(values > ceiling, 1 - ceiling / values, 0.0)
    some = lost.reshape(-1, lost.shape[-1]).any(0)  # of a stack, those that one matrix has lost
    top = v[..., some]
    new = tall - ((tall @ top) * lost[..., None, some]) @ top.mT
    return new if tall is matrix else new.mT


@steady
def within(matrix: Float[Tensor, "*stack out in"], kappa: float, memory: State) -> bool:
    """Tell whether every condition number is proven to be at most ``kappa``, cheaply.

    With b a little above the largest singular value, ``b^2 - W'W`` and ``W'W - (b / kappa)^2`` have
    Cholesky factorizations only if all singular values lie between b / kappa and b. Small matrices
    and stacks are left to the SVD.

    >>> within(torch.eye(200), kappa=2.0, memory={})
    True
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return False
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    # most weights are far inside, which fewer digits can prove sooner
    resolved = 0.99 * math.sqrt(RESOLVED_SQUARES / (len(tall) * torch.finfo(tall.dtype).eps))
    if 1 < resolved < kappa and _proven(tall, resolved, memory, tall.dtype):
        return True
    return _proven(_in_digits_for_squares(tall, kappa), kappa, memory, tall.dtype)


def _proven(a: Float[Tensor, "q p"], kappa: float, memory: State, kept: torch.dtype) -> bool:
    square, largest = gram(a), _largest_square(a, memory, kept)

    def positive(lower: Float[Tensor, "p p"], shift: float) -> bool:
        return not _blas.Cholesky.of(lower, shift).indefinite

    for margin in SQUARE_MARGINS:
        if not positive(square, margin * largest / kappa**2):
            return False  # nor with a larger margin
        if positive(-square, -margin * largest):
            return True
    return False


@steady
def lifted(
    matrix: Float[Tensor, "*stack out in"], kappa: float, slack: float, memory: State
) -> Float[Tensor, "*stack out in"] | None:
    """The few singular values raised that keep kappa above a bound, if that is proven to do.

    The smallest triplets come from inverse iteration by one Cholesky factorization, values below
    the bound are raised to a little (``slack``) inside of it, and :func:`within` has to prove the
    result. The nearest matrix would also lower the largest values, by a part of about
    ``1 / kappa**2``, so small kappas are left to the SVD, as is all for which this does not do.

    >>> weight = torch.diag(torch.cat([torch.ones(199), torch.tensor([1e-3])]))
    >>> float(lifted(weight, 20.0, 0.05, {})[-1, -1])
    0.053...
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO or kappa < MIN_LIFTED_KAPPA:
        return None
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    a = _in_digits_for_squares(tall, kappa)
    square, largest = gram(a), _largest_square(a, memory, tall.dtype)
    factor = _blas.Cholesky.of(square, -torch.finfo(a.dtype).eps * largest)
    above = (margin * largest for margin in SQUARE_MARGINS)
    bound = next((b for b in above if not _blas.Cholesky.of(-square, -b).indefinite), None)
    if factor.indefinite or bound is None:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(a.shape[1], LIFTED_VECTORS, generator=generator, dtype=torch.float64)
    block = drawn.to(a)
    for _ in range(LIFTING_ITERATIONS):
        block = torch.linalg.qr(factor.solve(block.contiguous()))[0]
    u, s, wt = spectra.decomposition(a @ block)
    floor = math.sqrt(bound) * (1 + slack) / kappa
    low = int((s < floor).sum())
    if not 0 < low <= LIFTED_VECTORS // 2:  # of the others the block is too poor
        return None
    change = (u[:, -low:] * (floor - s[-low:])) @ (wt[-low:] @ block.mT)
    new = tall + change.to(tall)
    if not within(new, kappa, memory):
        return None
    return new if tall is matrix else new.mT


def bound_form(matrix: Float[Tensor, "*stack out in"]) -> State:
    """Return what the memory of :func:`within` holds after a call: a tensor by its shape and type.

    >>> bound_form(torch.ones(200, 100))["top"].shape
    torch.Size([4, 100])
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SVD_UP_TO:
        return {}
    blank = matrix.new_empty((max(matrix.shape), min(matrix.shape)), device="meta")
    return {"top": blank[:BLOCK_SIZE]}


def _in_digits_for_squares(a: Float[Tensor, "q p"], kappa: float) -> Float[Tensor, "q p"]:
    """In a type to compare squares in: of the digits, as many as kappa^2 has are lost."""
    return a if kappa**2 * len(a) * torch.finfo(a.dtype).eps < RESOLVED_SQUARES else a.double()


def _largest_square(a: Float[Tensor, "q p"], memory: State, kept: torch.dtype) -> float:
    """About the largest eigenvalue of A'A, from below, by a block of vectors kept warm."""
    block = memory["top"].to(a) if "top" in memory else _random_blocks(a)["top"]
    for _ in range(2 if "top" in memory else 8):
        block = torch.linalg.qr((block @ a.mT @ a).mT)[0].mT
    largest = float(torch.linalg.matrix_norm(block @ a.mT, 2)) ** 2
    if math.isfinite(largest):
        memory["top"] = block.to(kept)
    return largest


def _track(a: Float[Tensor, "q p"], memory: State) -> ExtremeTriplets:
    """Return both ends of a tall matrix, by as many steps as it takes from those in ``memory``."""
    least = 1
    if "top" not in memory:
        memory |= _random_blocks(a) | _factorized(a)
        least = MIN_FIRST_STEPS
    elif memory["restless"]:
        _refresh(a, memory)
        memory["restless"] -= 1
    for step in range(1, MAX_STEPS + 1):
        triplets, first, last = _improved(a, memory)
        settled = STALE_SETTLES_BELOW if memory["stale"] else FRESH_SETTLES_BELOW
        if step >= least and last < settled and first < STALE_SETTLES_BELOW:
            break
        if memory["stale"] and last > (settled if step > 1 else STALE_FAILS_ABOVE):
            _refresh(a, memory)
            memory["restless"] = memory["patience"]
            memory["patience"] = min(2 * memory["patience"], MAX_FRESH_CALLS)
    if memory["stale"]:  # and good enough
        memory["patience"] = max(memory["patience"] - 1, MIN_FRESH_CALLS)
    memory["stale"] = True  # for the matrix of the next call
    return triplets


def _refresh(a: Float[Tensor, "q p"], memory: State) -> None:
    """Factorize this very matrix, and let its inverse turn the lower block once."""
    memory |= _factorized(a)
    memory["bottom"] = _unit(_preconditioned(memory["bottom"], memory))


def _improved(a: Float[Tensor, "q p"], memory: State) -> tuple[ExtremeTriplets, float, float]:
    """Return a Rayleigh-Ritz step at either end, and how much either left vector took from it.

    Vectors are rows here: twice as fast to multiply as columns.
    """
    blocks = torch.cat([memory["top"], memory["bottom"]])
    image = blocks @ a.mT
    rest = image @ a - blocks * image.square().sum(1, keepdim=True)
    proposed = torch.cat([rest[:BLOCK_SIZE], _preconditioned(rest[BLOCK_SIZE:], memory)])
    joined = (
        torch.stack([blocks, proposed]).unflatten(1, (2, BLOCK_SIZE)).transpose(0, 1).flatten(1, 2)
    )
    bases = torch.linalg.qr(joined.mT)[0].mT  # an orthonormal basis of either end
    images = (bases.flatten(0, 1) @ a.mT).unflatten(0, (2, -1))
    u, s, wt = spectra.decomposition(images.mT)
    memory["top"], memory["bottom"] = wt[0, :BLOCK_SIZE] @ bases[0], wt[1, -BLOCK_SIZE:] @ bases[1]
    left = torch.stack([u[0, :, 0], u[1, :, -1]], dim=-1)
    right = torch.stack([memory["top"][0], memory["bottom"][-1]], dim=-1)
    new = torch.stack(
        [
            wt[0, 0, BLOCK_SIZE:] @ images[0, BLOCK_SIZE:],
            wt[1, -1, BLOCK_SIZE:] @ images[1, BLOCK_SIZE:],
        ]
    )
    values, tiny = torch.stack([s[0, 0], s[1, -1]]), torch.finfo(s.dtype).tiny
    largest, smallest = (max(value, tiny) for value in values.tolist())
    first, last = torch.linalg.vector_norm(new, dim=1).tolist()
    # of the first vector, what it is worth in a gradient, where the last has kappa times its weight
    return ExtremeTriplets(left, values, right), first * smallest / largest**2, last / smallest


def _unit(rows: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / size.clamp(min=torch.finfo(rows.dtype).tiny)


def _random_blocks(a: Float[Tensor, "q p"]) -> State:
    """Random blocks to begin with, from a generator of our own."""
    generator = torch.Generator().manual_seed(0)
    size = a.shape[1], 2 * BLOCK_SIZE
    drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    top, bottom = torch.linalg.qr(drawn.to(a))[0].mT.split(BLOCK_SIZE)
    counts = {"restless": 0, "patience": MIN_FRESH_CALLS}
    return {"top": top.clone(), "bottom": bottom.clone(), **counts}


def _factorized(a: Float[Tensor, "q p"]) -> State:
    """Return the LU factors of a square matrix, or the Cholesky factor of a tall one's Gram matrix.

    Both only precondition, so zero pivots may be replaced by tiny ones.
    """
    info = torch.finfo(a.dtype)
    if a.shape[0] == a.shape[1]:
        flipped = a.is_contiguous()  # LAPACK is column-major: a row-major matrix is not copied
        lu = _blas.LU.of(a.mT if flipped else a)
        diagonal, tiny = lu.factors.diagonal(), info.eps * 1e-5  # of a matrix that was scaled
        if not float(torch.linalg.vector_norm(diagonal, -torch.inf)) >= tiny:
            diagonal[diagonal.abs() < tiny] = tiny
        return {"factor": lu.factors, "pivots": lu.pivots, "flipped": flipped, "stale": False}
    square = gram(a)
    size = max(float(square.diagonal().amax()), info.tiny / info.eps)
    for lift in (0.0, 8 * info.eps, 1e3 * info.eps, 1.0):  # the last succeeds
        cholesky = _blas.Cholesky.of(square, shift=-lift * size)
        if not cholesky.indefinite:
            break
    return {"factor": cholesky.factor, "stale": False}


def _preconditioned(x: Float[Tensor, "k p"], memory: State) -> Float[Tensor, "k p"]:
    """Return the direction of about ``(A'A)^-1`` of every row, by factors of an earlier A."""
    columns, factor = x.mT, memory["factor"]
    if "pivots" not in memory:
        return _blas.Cholesky(factor, indefinite=False).solve(columns).mT
    lu, flipped = _blas.LU(factor, memory["pivots"], singular=False), memory["flipped"]
    half = _unit(lu.solve(columns, transposed=not flipped).mT).mT  # or the next could overflow
    return lu.solve(half, transposed=flipped).mT


# --- several vectors at either end, for whoever asks what happens along them ----------------------

TOP_POWERS = 4  # of W'W in the Krylov space that sharpens the first vectors
MAX_SHARPENING_STEPS = 4  # of the last vectors, each by the factorization of tracking
SHARP_BELOW = 0.1  # of the estimate, which is five to ten times what a vector is off


@steady
def ends(matrix: Float[Tensor, "out in"], memory: State) -> Ends:
    """Find both ends of a spectrum with vectors to look along, from where the last call left them.

    >>> weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    >>> found, s = ends(weight, {}), torch.linalg.svdvals(weight)
    >>> torch.allclose(found.values[[0, -1]], s[[0, -1]], rtol=1e-3)
    True
    """
    size = min(matrix.shape)
    count = min(BLOCK_SIZE, max(size // 2, 1))
    if size <= SVD_UP_TO:
        u, s, vt = spectra.decomposition(matrix)
        outer = torch.cat([torch.arange(count), torch.arange(size - count, size)])
        if size == 1:
            outer = outer[:1].repeat(2)
        return Ends(u[:, outer], s[outer], vt.mT[:, outer], torch.zeros(len(outer)).to(s))
    extreme_triplets(matrix, memory)  # which raises where an entry is not finite
    a = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    memory["top"] = _sharpened_top(a, memory["top"])
    top = _outer(a, memory["top"], first=True)
    for _ in range(MAX_SHARPENING_STEPS):
        bottom = _outer(a, memory["bottom"], first=False)
        if float(bottom.errors[-1]) < SHARP_BELOW:
            break
        kept = memory["top"]
        _improved(a, memory)
        memory["top"] = kept
    first, last = top.sliced(slice(None, count)), bottom.sliced(slice(-count, None))
    found = first.then(last)
    return found if a is matrix else found.transposed()


def _sharpened_top(a: Float[Tensor, "q p"], block: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
    """The first right vectors of a Krylov space that a block of rows spans."""
    powers = [block]
    for _ in range(TOP_POWERS):
        powers.append(_unit(powers[-1] @ a.mT @ a))
    basis = torch.linalg.qr(torch.cat(powers).mT)[0].mT
    coefficients, _ = _ritz(basis @ a.mT)
    return coefficients[:, :BLOCK_SIZE].mT.to(basis) @ basis


def _ritz(images: Float[Tensor, "k q"]) -> tuple[Float[Tensor, "k k"], Float[Tensor, " k"]]:
    """The right vectors, in a basis with these images, and the singular values, largest first."""
    rows = images.double()
    squares, c = torch.linalg.eigh(rows @ rows.mT)
    return c.flip(1), squares.flip(0).clamp(min=0).sqrt()


def _outer(a: Float[Tensor, "q p"], block: Float[Tensor, "k p"], first: bool) -> Ends:
    """The triplets of a block of rows at one end, with what their residuals say of them."""
    images = block @ a.mT
    c, values = _ritz(images)
    c, s = c.to(block), values.to(block)
    right, left = c.mT @ block, (c.mT @ images) / s.clamp(min=torch.finfo(s.dtype).tiny)[:, None]
    rest = torch.linalg.vector_norm(left @ a - right * s[:, None], dim=1)
    # the innermost of the block stands for all values beyond it; it has no estimate of its own
    gap = (s - s[-1]).abs() if first else (s - s[0]).abs()
    errors = (rest / gap.clamp(min=torch.finfo(s.dtype).tiny)).clamp(max=1.0)
    return Ends(left.mT, s, right.mT, errors)
