"""What a gradient asks of each singular value: g_i = u_i' G v_i, and whether it means it.

To first order a step ``-lr G`` moves sigma_i by ``-lr g_i``, so g_i is the signal that reaches that
value. Its noise is how much it varies between micro-batches, or between steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

MIN_SAMPLES = 3  # of which a spread is told


def signals(
    gradient: Float[Tensor, "out in"],
    left: Float[Tensor, "out k"],
    right: Float[Tensor, "in k"],
) -> Float[Tensor, " k"]:
    """The signal ``u_i' G v_i`` along each of some singular triplets.

    >>> import torch
    >>> signals(torch.tensor([[5.0, 1.0], [2.0, -3.0]]), torch.eye(2), torch.eye(2))
    tensor([ 5., -3.])
    """
    return (left * (gradient.to(left.dtype) @ right)).sum(0)


def signal_to_noise(samples: Sequence[float]) -> float | None:
    """The mean of some signals over their standard deviation; None of fewer than three.

    >>> signal_to_noise([1.0, 2.0, 3.0]), signal_to_noise([1.0, 2.0])
    (2.0, None)
    """
    if len(samples) < MIN_SAMPLES:
        return None
    mean = sum(samples) / len(samples)
    spread = math.sqrt(sum((x - mean) ** 2 for x in samples) / (len(samples) - 1))
    if spread == 0:
        return None if mean == 0 else math.inf
    return abs(mean) / spread
