"""Changes to how weight matrices are learned, as pure functions on ``(..., out, in)``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

FLOOR = 1e-10  # the paper's guard against a vanishing singular value; it shows in its digits


def scaled(
    weight: Float[Tensor, "*stack out in"],
    rows: Float[Tensor, "*stack out"],
    columns: Float[Tensor, "*stack in"],
) -> Float[Tensor, "*stack out in"]:
    """``diag(rows) W diag(columns)``: learnable multipliers (Velikanov et al. 2026).

    >>> scaled(torch.ones(2, 2), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
    tensor([[ 1., 10.],
            [ 2., 20.]])
    """
    return rows[..., None] * weight * columns[..., None, :]


def floored_condition_number(
    singular_values: Float[Tensor, "*stack rank"],
) -> Float[Tensor, "*stack"]:
    """The paper's kappa: the smallest singular value is raised by 1e-10.

    >>> floored_condition_number(torch.tensor([2.0, 0.0], dtype=torch.float64))
    tensor(2.0000e+10, dtype=torch.float64)
    """
    return singular_values[..., 0] / (singular_values[..., -1] + FLOOR)


def condition_penalty(
    weight: Float[Tensor, "*stack out in"],
    condition_number: Float[Tensor, "*stack"],
    strength: float = 0.005,
    clip: float = 1.0,
) -> Float[Tensor, "*stack out in"]:
    """Gradient of ``strength * (log(kappa + 1) - log(condition_number + 1))**2``, clipped.

    Only the extreme singular values matter to kappa, so it lies along ``u1 v1'`` and ``ud vd'``; its
    Frobenius norm is at most ``clip``. The defaults, and the ones inside the logarithms, are the
    paper's.

    >>> condition_penalty(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor(2.0)).abs().max()
    tensor(0.)
    """
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    kappa, last = floored_condition_number(s), s[..., -1] + FLOOR
    excess = (kappa + 1).log() - (condition_number + 1).log()
    slope = 2 * strength * excess / (kappa + 1)  # of the penalty, with respect to kappa
    # d kappa / d s1 = 1 / sd and d kappa / d sd = -kappa / sd
    at_first, at_last = slope / last, -slope * kappa / last
    shrink = clip / torch.hypot(at_first, at_last).clamp(min=clip)
    return (
        (shrink * at_first)[..., None, None] * u[..., :, :1] * vt[..., :1, :]
        + (shrink * at_last)[..., None, None] * u[..., :, -1:] * vt[..., -1:, :]
    )


def toward_spectrum(
    weight: Float[Tensor, "*stack out in"],
    singular_values: Float[Tensor, "*stack rank"],
    step: float = 0.1,
) -> Float[Tensor, "*stack out in"]:
    """The same singular vectors with singular values moved a part of the way to others.

    >>> toward_spectrum(torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([4.0, 1.0]), step=0.5)
    tensor([[3.5000, 0.0000],
            [0.0000, 1.0000]])
    """
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    moved = torch.lerp(s, singular_values, step).clamp(min=FLOOR)
    return (u * moved[..., None, :]) @ vt
