"""How one step of an optimizer moves singular values: to first order, d sigma_i = u_i' dW v_i.

SGD moves sigma_i by its own gradient; Adam's first step is the sign of every entry, Muon's is the
orthogonal factor of the gradient: along its own directions every singular value moves alike.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import spectra


def singular_value_change(
    weight: Float[Tensor, "*stack out in"], update: Float[Tensor, "*stack out in"]
) -> Float[Tensor, "*stack rank"]:
    """u_i' dW v_i: what an update adds to each singular value, largest first.

    Up to |dW|^2 over the gap between singular values.

    >>> weight = torch.diag(torch.tensor([3.0, 1.0]))
    >>> singular_value_change(weight, torch.tensor([[0.1, 5.0], [0.0, -0.2]]))
    tensor([ 0.1000, -0.2000])
    """
    u, _, vt = spectra.decomposition(weight)
    return torch.einsum("...oi,...oj,...ij->...i", u, update.to(u), vt)


def sgd_update(gradient: Tensor, learning_rate: float = 0.01) -> Tensor:
    """Return the step of plain gradient descent: - h G.

    >>> sgd_update(torch.tensor([[2.0]]))
    tensor([[-0.0200]])
    """
    return -learning_rate * gradient


def adam_update(gradient: Tensor, learning_rate: float = 0.001) -> Tensor:
    """- h sign(G): Adam's first step, for entries above its epsilon of 1e-8.

    The bias-corrected averages are G and G^2 then; the step does not know the gradient's size.

    >>> adam_update(torch.tensor([[3.0, -1e-4, 0.0]]))
    tensor([[-0.0010,  0.0010, -0.0000]])
    """
    return -learning_rate * gradient.sign()


def muon_update(gradient: Float[Tensor, "*stack out in"], learning_rate: float = 0.001) -> Tensor:
    """- h U V' sqrt(max(1, out / in)) of G = U S V': Muon's step with an exact orthogonal factor.

    ``torch.optim.Muon`` approximates it, by :func:`~kappascope.matrix.orthogonal.newton_schulz`.

    >>> muon_update(torch.diag(torch.tensor([100.0, 0.01]))).round(decimals=6)
    tensor([[-0.0010, -0.0000],
            [-0.0000, -0.0010]])
    """
    u, _, vt = spectra.decomposition(gradient)
    out, inputs = gradient.shape[-2:]
    return (-learning_rate * math.sqrt(max(1.0, out / inputs)) * (u @ vt)).to(gradient)


def full_gradient_change(
    weight: Tensor, target: Tensor, learning_rate: float = 0.01
) -> Float[Tensor, "*stack rank"]:
    """SGD's change for the full gradient W - W*: - h (sigma_i - u_i' W* v_i).

    Divided by sigma_i it is alike for all where W = c W*: h (1/c - 1). The small ones do not get a
    weaker signal, only a smaller one.

    >>> target = torch.diag(torch.tensor([4.0, 0.01]))
    >>> full_gradient_change(0.5 * target, target) / torch.tensor([2.0, 0.005])
    tensor([0.0100, 0.0100])
    """
    return singular_value_change(weight, sgd_update(weight - target, learning_rate))


def blind_change(update: Float[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
    """Return the deviation of u' dW v for unrelated directions: |dW|_F / sqrt(out in).

    Adam's entries are h, so every singular value diffuses by h; Muon's by h / sqrt(longer side).

    >>> gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> blind_change(adam_update(gradient)), blind_change(muon_update(gradient))
    (tensor(0.0010), tensor(0.0001))
    """
    entries = update.shape[-2] * update.shape[-1]
    return torch.linalg.matrix_norm(update) / math.sqrt(entries)


def adam_leading_change(shape: tuple[int, int], learning_rate: float = 0.001) -> float:
    """Return what Adam's first step adds along a gradient u v': (2 / pi) h sqrt(out in).

    u' sign(u v') v = sum|u_i| sum|v_j|, and normal entries have sum|u_i| = sqrt(2 out / pi). Muon
    adds h there as everywhere: Adam favours the leading direction of a large matrix.

    >>> round(adam_leading_change((64, 64)), 4)
    0.0407
    """
    return 2 / math.pi * learning_rate * math.sqrt(shape[0] * shape[1])
