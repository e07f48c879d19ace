"""The scale on which two sets of vectors are equally far out, which bounds their inner products.

For any positive M, |q'k|^2 is at most q'Mq times k'M^-1 k. The M for which the largest of both are
least makes the bound at most d times the largest |q'k|^2 (John's theorem).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

WEIGHINGS = 60  # of points, each bringing the bound nearer to its least: the last change a percent


def balanced(
    q: Float[Tensor, "many size"], k: Float[Tensor, "others size"]
) -> tuple[Tensor, Tensor]:
    """Return a root S of the best M for some q and k, and its inverse transposed.

    Points that are far out by M (or by its inverse) get more weight, until all that count are
    equally far: M is the geometric mean of what their second moments ask for.

    >>> root, inverse = balanced(torch.eye(2).double(), 9 * torch.eye(2).double())
    >>> root.square().diagonal(), torch.allclose(root @ inverse, torch.eye(2).double())
    (tensor([9.0000, 9.0000], dtype=torch.float64), True)
    """
    p, r = torch.full((len(q),), 1 / len(q)).double(), torch.full((len(k),), 1 / len(k)).double()
    for _ in range(WEIGHINGS):
        first, second = (_moment(points, weights) for points, weights in ((q, p), (k, r)))
        root = _power(first, 0.5)
        inverse = _power(first, -0.5)
        mean = inverse @ _power(root @ second @ root, 0.5) @ inverse
        ours = (q @ mean * q).sum(1)
        theirs = (k @ torch.linalg.inv(mean) * k).sum(1)
        p, r = p * ours / (p @ ours), r * theirs / (r @ theirs)
    return _power(mean, 0.5), _power(mean, -0.5)


def _moment(points: Tensor, weights: Tensor) -> Tensor:
    moment = (points * weights[:, None]).T @ points
    # directions in which nothing lies are kept apart from zero
    return moment + 1e-9 * moment.trace() / len(moment) * torch.eye(len(moment)).double()


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp(min=1e-300) ** exponent) @ vectors.mT
