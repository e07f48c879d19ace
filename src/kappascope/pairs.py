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
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import panels, spectra

State = dict[str, Any]

SMALL = 96  # up to here an SVD costs less than the calls it would save
BLOCK = 4  # vectors at either end: the wanted one, and neighbours that it mixes with
# How much a step brings in to the last left vector; the error it leaves is a fraction of that.
SETTLED = {True: 0.1, False: 1.0}  # by a stale factorization, and by one of this very matrix
HOPELESS = 2.0  # of the first step by a stale factorization: a second one would seldom do
LIMIT = 12  # steps of a call; a matrix whose smallest values are equal has no vector to settle on
FIRST = 8  # steps of the first call, at least: it starts from random vectors
MARGINS = (1.02, 1.2)  # on the largest square as found from below; tried in turn
# Calls that factorize at once after a stale factorization was of no use. Twice as many each time,
# and one less whenever one was of use.
RESTLESS, MOST_RESTLESS = 16, 128


@dataclass(frozen=True)
class Ends:
    """The first and the last singular triplet of each matrix of a stack, in this order.

    >>> found = ends(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> found.values
    tensor([3., 1.])
    >>> found.left.abs()
    tensor([[1., 0.],
            [0., 0.],
            [0., 1.]])
    """

    left: Float[Tensor, "*stack out 2"]
    values: Float[Tensor, "*stack 2"]
    right: Float[Tensor, "*stack in 2"]

    def combined(self, weights: Float[Tensor, "*stack 2"]) -> Float[Tensor, "*stack out in"]:
        """``w1 u1 v1' + w2 un vn'``.

        >>> ends(torch.diag(torch.tensor([3.0, 1.0]))).combined(torch.tensor([5.0, 7.0]))
        tensor([[5., 0.],
                [0., 7.]])
        """
        if self.left.ndim == 2:  # one product: no large intermediates
            return (self.left * weights) @ self.right.mT
        first, last = (weights[..., i, None, None] for i in (0, 1))
        left, right = self.left, self.right.mT
        return first * left[..., :1] * right[..., :1, :] + last * left[..., 1:] * right[..., 1:, :]


def ends(matrix: Float[Tensor, "*stack out in"], memory: State | None = None) -> Ends:
    """Both ends of the spectrum; with a ``memory``, from where the last call left it.

    Without a memory, for stacks and for small matrices they are exact: from an SVD, or for stacks
    of square matrices from what is as good and takes half the time. The memory is a dictionary of
    tensors that this function alone reads and writes.

    >>> memory = {}
    >>> weight = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    >>> found, exact = ends(weight, memory), ends(weight)
    >>> torch.allclose(found.values, exact.values, rtol=0.01)
    True
    """
    if matrix.ndim > 2 and matrix.shape[-1] == matrix.shape[-2] and matrix.dtype == torch.float64:
        return _of_squares(matrix)
    if memory is None or matrix.ndim > 2 or min(matrix.shape) <= SMALL:
        return _of_all(matrix)
    # squares are taken: neither they nor their sums may overflow, or vanish
    scale = 1.0 if 0.1 < float(torch.linalg.vector_norm(matrix)) < 1e6 else _largest(matrix)
    if not math.isfinite(scale):  # before the memory takes it up
        raise spectra.LinAlgError("a matrix that is not finite has no singular values")
    matrix = matrix if scale == 1.0 else matrix / scale
    if matrix.shape[0] >= matrix.shape[1]:
        found = _track(matrix, memory)
        return Ends(found.left, found.values * scale, found.right)
    found = _track(matrix.mT, memory)
    return Ends(found.right, found.values * scale, found.left)


def _largest(matrix: Float[Tensor, "out in"]) -> float:
    """The largest entry, or one if there is none."""
    low, high = matrix.aminmax()
    return max(-float(low), float(high)) or 1.0


def _of_all(matrix: Float[Tensor, "*stack out in"]) -> Ends:
    """Both ends of the whole decomposition."""
    u, s, vt = spectra.decomposition(matrix)
    outer = torch.tensor([0, s.shape[-1] - 1], device=s.device)
    return Ends(u[..., outer], s[..., outer], vt.mT[..., outer])


def _of_squares(a: Float[Tensor, "*stack n n"]) -> Ends:
    """Both ends by the Gram matrices' eigenvectors, the last ones sharpened by inverse iteration.

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
    found = Ends(images / values[..., None, :], values, outer)
    lost = ~(rest < 1e-6 * values[..., 1:]).all(-1)
    if lost.any():
        whole = _of_all(a[lost])
        for part in ("left", "values", "right"):
            getattr(found, part)[lost] = getattr(whole, part)
    return found


def _unit_columns(x: Float[Tensor, "*stack n 1"]) -> Float[Tensor, "*stack n 1"]:
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)


def within(matrix: Float[Tensor, "*stack out in"], kappa: float, memory: State) -> bool:
    """Whether every condition number is proven to be at most ``kappa``, cheaply.

    With b a little above the largest singular value, ``b^2 - W'W`` and ``W'W - (b / kappa)^2`` have
    Cholesky factorizations only if all singular values lie between b / kappa and b. Small matrices
    and stacks are left to the SVD.

    >>> within(torch.eye(200), kappa=2.0, memory={})
    True
    """
    if matrix.ndim > 2 or min(matrix.shape) <= SMALL:
        return False
    a = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    # squares are compared: of the digits, as many as kappa^2 has are lost
    a = a if kappa**2 * len(a) * torch.finfo(a.dtype).eps < 0.1 else a.double()
    gram = panels.gram(a)
    largest = _largest_square(a, memory)
    return any(
        _positive(-gram, margin * largest) and _positive(gram, -margin * largest / kappa**2)
        for margin in MARGINS
    )


def _largest_square(a: Float[Tensor, "q p"], memory: State) -> float:
    """About the largest eigenvalue of A'A, from below, by a block of vectors kept warm."""
    block = memory["top"].to(a) if "top" in memory else _begun(a)["top"]
    for _ in range(3 if "top" in memory else 8):
        block = torch.linalg.qr((block @ a.mT @ a).mT)[0].mT
    largest = float(torch.linalg.matrix_norm(block @ a.mT, 2)) ** 2
    if math.isfinite(largest):
        memory["top"] = block
    return largest


def _positive(lower: Float[Tensor, "p p"], shift: float) -> bool:
    """Whether a symmetric matrix, given by its lower triangle, is positive when shifted."""
    shifted = lower.clone()
    shifted.diagonal().add_(shift)
    return int(torch.linalg.cholesky_ex(shifted)[1]) == 0


def _track(a: Float[Tensor, "q p"], memory: State) -> Ends:
    """One question about a tall matrix."""
    least = 1
    if "top" not in memory:
        memory |= _begun(a) | _factorized(a)
        least = FIRST
    elif memory["restless"]:
        _refresh(a, memory)
        memory["restless"] -= 1
    for step in range(1, LIMIT + 1):
        found, first, last = _improved(a, memory)
        settled = SETTLED[memory["stale"]]
        if step >= least and last < settled and first < SETTLED[True]:
            break
        if memory["stale"] and last > (settled if step > 1 else HOPELESS):
            _refresh(a, memory)
            memory["restless"] = memory["patience"]
            memory["patience"] = min(2 * memory["patience"], MOST_RESTLESS)
    if memory["stale"]:  # and good enough
        memory["patience"] = max(memory["patience"] - 1, RESTLESS)
    memory["stale"] = True  # for the matrix of the next call
    return found


def _refresh(a: Float[Tensor, "q p"], memory: State) -> None:
    """Factorize this very matrix, and let its inverse turn the lower block once."""
    memory |= _factorized(a)
    memory["bottom"] = _unit(_preconditioned(memory["bottom"], memory))


def _improved(a: Float[Tensor, "q p"], memory: State) -> tuple[Ends, float, float]:
    """A Rayleigh-Ritz step at either end, and how much either left vector took from it.

    Vectors are rows here: twice as fast to multiply as columns.
    """
    blocks = torch.cat([memory["top"], memory["bottom"]])
    image = blocks @ a.mT
    rest = image @ a - blocks * image.square().sum(1, keepdim=True)
    proposed = torch.cat([rest[:BLOCK], _preconditioned(rest[BLOCK:], memory)])
    joined = torch.stack([blocks, proposed]).unflatten(1, (2, BLOCK)).transpose(0, 1).flatten(1, 2)
    bases = torch.linalg.qr(joined.mT)[0].mT  # an orthonormal basis of either end
    images = (bases.flatten(0, 1) @ a.mT).unflatten(0, (2, -1))
    u, s, wt = spectra.decomposition(images.mT)
    memory["top"], memory["bottom"] = wt[0, :BLOCK] @ bases[0], wt[1, -BLOCK:] @ bases[1]
    left = torch.stack([u[0, :, 0], u[1, :, -1]], dim=-1)
    right = torch.stack([memory["top"][0], memory["bottom"][-1]], dim=-1)
    new = torch.stack([wt[0, 0, BLOCK:] @ images[0, BLOCK:], wt[1, -1, BLOCK:] @ images[1, BLOCK:]])
    values, tiny = torch.stack([s[0, 0], s[1, -1]]), torch.finfo(s.dtype).tiny
    largest, smallest = (max(value, tiny) for value in values.tolist())
    first, last = torch.linalg.vector_norm(new, dim=1).tolist()
    # of the first vector, what it is worth in a gradient, where the last has kappa times its weight
    return Ends(left, values, right), first * smallest / largest**2, last / smallest


def _unit(rows: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / size.clamp(min=torch.finfo(rows.dtype).tiny)


def _begun(a: Float[Tensor, "q p"]) -> State:
    """Random blocks, from a generator of our own."""
    generator = torch.Generator().manual_seed(0)
    size = a.shape[1], 2 * BLOCK
    drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    top, bottom = torch.linalg.qr(drawn.to(a))[0].mT.split(BLOCK)
    counts = {"restless": 0, "patience": RESTLESS}
    return {"top": top.clone(), "bottom": bottom.clone(), **counts}


def _factorized(a: Float[Tensor, "q p"]) -> State:
    """Of a square matrix the LU factors, of a tall one the Cholesky factor of its Gram matrix.

    Both only precondition, so zero pivots may be replaced by tiny ones.
    """
    info = torch.finfo(a.dtype)
    if a.shape[0] == a.shape[1]:
        flipped = a.is_contiguous()  # LAPACK stores columns: the transpose is read as it lies there
        lu, pivots, _ = torch.linalg.lu_factor_ex(a.mT if flipped else a)
        diagonal, tiny = lu.diagonal(), info.eps * 1e-5  # of a matrix that was scaled
        if not float(torch.linalg.vector_norm(diagonal, -torch.inf)) >= tiny:
            diagonal[diagonal.abs() < tiny] = tiny
        return {"factor": lu, "pivots": pivots, "flipped": flipped, "stale": False}
    gram = a.mT @ a
    size = gram.diagonal().amax().clamp(min=info.tiny / info.eps)
    for lift in (0.0, 8 * info.eps, 1e3 * info.eps, 1.0):  # the last succeeds
        lifted = gram + lift * size * torch.eye(len(gram)).to(gram)
        factor, failed = torch.linalg.cholesky_ex(lifted)
        if not failed:
            break
    return {"factor": factor, "stale": False}


def _preconditioned(x: Float[Tensor, "k p"], memory: State) -> Float[Tensor, "k p"]:
    """The direction of about ``(A'A)^-1`` of every row, by the factorization of an earlier A."""
    columns, factor = x.mT, memory["factor"]
    if "pivots" in memory:
        solve, flipped = partial(torch.linalg.lu_solve, factor, memory["pivots"]), memory["flipped"]
        half = _unit(solve(columns, adjoint=not flipped).mT).mT  # or the next could overflow
        return solve(half, adjoint=flipped).mT
    # torch.cholesky_solve copies the factor, which takes four times as long as this
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
