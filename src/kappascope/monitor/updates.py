"""What a step really did to a matrix: its size, how much of it was decay, and where it points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix.tracking import Ends
from kappascope.monitor.signal import signals

Matrix = Float[Tensor, "out in"]
# Optimizers that shrink the weight itself, whatever its gradient; others add the decay to that.
DECOUPLED = ("AdamW", "Muon", "Lion", "Adafactor", "SGDW", "AdamWScheduleFree", "NAdamW")


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
    decoupled = group.get("decoupled_weight_decay") or optimizer in DECOUPLED
    return float(rate) * float(decay) if decoupled else None


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
    the weight along itself, signed. Alignments are cosines: with minus the gradient, and with the
    step of the last reading.

    >>> import torch
    >>> w, g = torch.eye(2), torch.ones(2, 2)
    >>> found, step = update_quantities(w, 0.9 * w - 0.1 * g, g, None, decay=0.1)
    >>> {name: round(value, 4) for name, value in found.items()}
    {'update_size': 0.2236, 'update_radial': -0.2, 'update_decay': 0.1, 'update_step': 0.1414,
     'update_alignment_gradient': 1.0}
    """
    weight = before.double()
    change = after.double() - weight
    size = _norm(weight)
    found: dict[str, float] = {}
    if size > 0:
        found["update_size"] = _norm(change) / size
        found["update_radial"] = float((change * weight).sum()) / size**2
    step = change if not decay else change + decay * weight
    if size > 0 and decay is not None:
        found["update_decay"] = decay
        found["update_step"] = _norm(step) / size
    if gradient is not None:
        found |= _named("update_alignment_gradient", cosine(step, -gradient.double()))
    if last is not None:
        found |= _named("update_alignment_last", cosine(step, last.double()))
    return found, step.to(before.dtype if before.dtype == torch.float64 else torch.float32)


def along_ends(change: Matrix, ends: Ends) -> dict[str, Any]:
    """The shares of a change in the leading and trailing right subspaces of the weight.

    By chance either would be the number of vectors over the number of columns.

    >>> import torch
    >>> found = Ends(torch.eye(4), torch.ones(4), torch.eye(4), torch.zeros(4))
    >>> along_ends(torch.diag(torch.tensor([3.0, 0.0, 0.0, 4.0])), found)
    {'update_share_top': 0.36, 'update_share_bottom': 0.64}
    """
    delta = change.double()
    total = float(delta.square().sum())
    if not total > 0 or not math.isfinite(total):
        return {}
    shares = (delta @ ends.right.double()).square().sum(0) / total
    half = len(shares) // 2
    return {
        "update_share_top": float(shares[:half].sum()),
        "update_share_bottom": float(shares[half:].sum()),
    }


def predicted_change(change: Matrix, ends: Ends) -> Float[Tensor, " k"]:
    """The change of each tracked singular value to first order, ``u_i' (after - before) v_i``.

    >>> import torch
    >>> basis = Ends(torch.eye(2), torch.ones(2), torch.eye(2), torch.zeros(2))
    >>> predicted_change(torch.diag(torch.tensor([0.5, -0.25])), basis)
    tensor([ 0.5000, -0.2500])
    """
    return signals(change, ends.left, ends.right)


def turn(before: Float[Tensor, "n k"], after: Float[Tensor, "n k"]) -> float:
    """The angle in radians by which a subspace turned: the largest, of the closest vectors.

    >>> import torch
    >>> turn(torch.eye(3)[:, :1], torch.tensor([[1.0], [1.0], [0.0]]) / 2**0.5)
    0.785...
    """
    b, a = before.double(), after.double()
    outside = torch.linalg.matrix_norm(a - b @ (b.mT @ a), 2)
    return math.asin(min(1.0, float(outside)))


def cosine(a: Tensor, b: Tensor) -> float | None:
    """The cosine of the angle between two tensors; None where one has no direction.

    >>> import torch
    >>> cosine(torch.ones(2), torch.tensor([1.0, 0.0])), cosine(torch.ones(2), torch.zeros(2))
    (0.707..., None)
    """
    sizes = _norm(a) * _norm(b)
    if not 0 < sizes < math.inf:
        return None
    return float((a.double() * b.double()).sum()) / sizes


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
