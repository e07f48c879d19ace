"""An orthogonal start: no correction of training, but of what it begins with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kappascope.corrections._selection import MeantWeights, NothingToCorrect, Where
from kappascope.model.tensors import refuse_meta
from kappascope.model.weights import LiveWeight, live_weights, precise, unwrapped, why_no_map


@torch.no_grad()
def orthogonal_start(
    model: nn.Module,
    where: Where | None = None,
    exclude: Where | None = None,
    *,
    gain: float | None = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[str, ...]:
    """Set every map to a random orthogonal matrix times ``gain``; the names of what was set.

    In a deep linear network all modes are then learned in a time that does not grow with depth, for
    the product of such matrices has a kappa of one (Saxe et al. 2014). A matrix with more rows than
    columns has orthonormal columns, one with fewer orthonormal rows; of a convolution it is the
    matrix of output channels by everything else. With a gain of ``None`` every matrix keeps the
    Frobenius norm it has. ``where`` and ``exclude`` select as they do for corrections: a name has
    to be possible, a pattern skips what is not.

    >>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> orthogonal_start(model)
    ('0.weight', '2.weight')
    >>> torch.allclose(model[0].weight.T @ model[0].weight, torch.eye(3), atol=1e-6)
    True
    """
    refuse_meta(model)
    weights = live_weights(unwrapped(model))
    names = [name for weight in weights for name, *_ in weight.uses]
    meant = None if where is None else MeantWeights.of(where, names)
    excluded = None if exclude is None else MeantWeights.of(exclude, names, "exclude=")
    chosen = []
    for weight in weights:
        uses = weight if meant is None else meant.uses(weight)
        if uses is None or (excluded is not None and excluded.uses(weight) is not None):
            continue
        named = meant is not None and meant.names_it(weight)
        reason = _why_not(weight) or (None if named else why_no_map(uses))
        if reason is None:
            chosen.append(weight)
        elif named:
            raise ValueError(f"{weight.name} cannot be set: {reason}; leave it out of where=")
    if not chosen:
        wrong = "no weight that could be orthogonal"
        raise NothingToCorrect(2, type(model).__name__, wrong, "choose others by where=")
    for weight in chosen:
        matrix = weight.matrix()
        new = _orthogonal(matrix, generator)
        size = torch.linalg.matrix_norm(precise(matrix), keepdim=True)
        kept = size / torch.linalg.matrix_norm(new, keepdim=True)
        weight.write((new * (kept if gain is None else gain)).to(matrix.dtype))
    return tuple(weight.name for weight in chosen)


def _why_not(weight: LiveWeight) -> str | None:
    if not weight.leaves[-1].is_floating_point() or weight.matrix().numel() == 0:
        return "it has no entries to set"
    return None if weight.writable() else "it is made of other tensors, without an inverse"


def _orthogonal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random matrix with orthonormal rows or columns, each such as likely as any other."""
    *stack, rows, columns = like.shape
    tall = (*stack, max(rows, columns), min(rows, columns))
    drawn = torch.randn(tall, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return (q if rows >= columns else q.mT).to(precise(like))
