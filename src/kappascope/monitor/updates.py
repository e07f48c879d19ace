"""What a step really did to a matrix: its size, how much of it was decay, and where it points."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix.ends import Ends
from kappascope.model.weights import precise

Matrix = Float[Tensor, "out in"]
# Optimizers that shrink the weight itself, whatever its gradient; others add the decay to that.
DECOUPLED = re.compile(
    r"(Paged)?(AdamW|Lion)(8bit|32bit)?|Muon|Adafactor|SGDW|AdamWScheduleFree|NAdamW"
)


def decoupled_decay(optimizer: str, group: Mapping[str, Any]) -> float | None:
    """The share of the weight that a step takes away, or None where decay goes with the gradient.

    >>> decoupled_decay("AdamW", {"lr": 0.1, "weight_decay": 0.5})
    0.05
    >>> decoupled_decay("SGD", {"lr": 0.1, "weight_decay": 0.5}) is None
    True
    """
    rate, decay = group.get("lr"), group.get("weight_decay", 0.0)
    if rate is None or decay is None:
        return None
    if not decay:
        return 0.0
    said = group.get("decoupled_weight_decay", group.get("weight_decouple"))
    is_decoupled = said if said is not None else DECOUPLED.fullmatch(optimizer) is not None
    return float(rate) * float(decay) if is_decoupled else None


def update_quantities(
    before: Matrix,
    after: Matrix,
    gradient: Matrix | None,
    last: Matrix | None,
    decay: float | None,
) -> tuple[dict[str, float], Matrix]:
    """The sizes and directions of ``after - before``, and the step in it, decay taken out.

    ``update_size`` is relative to the weight. ``update_decay`` is the part of that which the stated
    decay makes, and ``update_step`` what is left without it. ``update_radial`` is the change of
    the weight along itself, signed; ``gradient_norm`` is absolute. Alignments are cosines: with
    minus the gradient, and with the step of the last reading.

    >>> import torch
    >>> w, g = torch.eye(2), torch.ones(2, 2)
    >>> found, step = update_quantities(w, 0.9 * w - 0.1 * g, g, None, decay=0.1)
    >>> {name: round(value, 4) for name, value in found.items()}
    {'update_size': 0.2236, 'update_radial': -0.2, 'update_decay': 0.1, 'update_step': 0.1414,
     'gradient_norm': 2.0, 'update_alignment_gradient': 1.0}
    """
    weight = precise(before).flatten()  # in float32 the difference of neighbours is exact
    change = precise(after).flatten() - weight
    size = _norm(weight)
    quantities: dict[str, float] = {}
    if size > 0:
        quantities["update_size"] = _norm(change) / size
        quantities["update_radial"] = _dot(change, weight) / size**2
    step = change if not decay else change.add_(weight, alpha=decay)
    length = _norm(step) if decay or not size else quantities["update_size"] * size
    if size > 0 and decay is not None:
        quantities["update_decay"] = decay
        quantities["update_step"] = length / size
    for name, other, sign in (("gradient", gradient, -1.0), ("last", last, 1.0)):
        if other is not None:
            flat = precise(other).flatten()
            sizes = length * (own := _norm(flat))
            quantities |= {"gradient_norm": own} if name == "gradient" else {}
            if 0 < sizes < math.inf:
                aligned = sign * _dot(step, flat) / sizes
                quantities[f"update_alignment_{name}"] = max(-1.0, min(1.0, aligned))
    return quantities, step.reshape(before.shape)


def along_ends(change: Matrix, ends: Ends) -> dict[str, Any]:
    """The shares of a change in the leading and trailing right subspaces of the weight.

    By chance either would be the number of vectors over the number of columns.

    >>> import torch
    >>> found = Ends(torch.eye(4), torch.ones(4), torch.eye(4), torch.zeros(4))
    >>> along_ends(torch.diag(torch.tensor([3.0, 0.0, 0.0, 4.0])), found)
    {'update_share_top': 0.36, 'update_share_bottom': 0.64}
    """
    delta = precise(change)
    total = _norm(delta.flatten()) ** 2
    if not total > 0 or not math.isfinite(total):
        return {}
    shares = (delta @ ends.right.to(delta)).double().square().sum(0) / total
    half = len(shares) // 2
    return {
        "update_share_top": float(shares[:half].sum()),
        "update_share_bottom": float(shares[half:].sum()),
    }


def turn(before: Float[Tensor, "n k"], after: Float[Tensor, "n k"]) -> float:
    """The angle in radians by which a subspace turned: the largest, of the closest vectors.

    >>> import torch
    >>> turn(torch.eye(3)[:, :1], torch.tensor([[1.0], [1.0], [0.0]]) / 2**0.5)
    0.785...
    """
    b, a = before.double(), after.double()
    outside = torch.linalg.matrix_norm(a - b @ (b.mT @ a), 2)
    return math.asin(min(1.0, float(outside)))


def alignment(a: Tensor, b: Tensor) -> float | None:
    """The cosine of the angle between two tensors; None where one has no direction.

    >>> import torch
    >>> alignment(torch.ones(2), torch.tensor([1.0, 0.0])), alignment(torch.ones(2), torch.zeros(2))
    (0.707..., None)
    """
    a, b = precise(a).flatten(), precise(b).flatten()
    sizes = _norm(a) * _norm(b)
    return max(-1.0, min(1.0, _dot(a, b) / sizes)) if 0 < sizes < math.inf else None


def _norm(flat: Tensor) -> float:
    """The norm of a vector, whose squares may leave float32."""
    square = float(torch.dot(flat, flat))
    if 1e-30 < square < 1e30:
        return math.sqrt(square)
    return float(torch.linalg.vector_norm(flat.double()))


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b.to(a)))
