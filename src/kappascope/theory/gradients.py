"""Gradients through many layers: what ill-conditioned layers do to them.

Through W = W_N ... W_1 a gradient g goes back as W' g. Each layer multiplies its norm by something
between its smallest and largest singular value, so directions can part by the product of the
kappas. For layers of independent normal entries the typical factors are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import polygamma, psi
from torch import Tensor

from kappascope.matrix import spectra

Array = NDArray[np.float64]


def gradient_bounds(layers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Bound |W' g| / |g| by the products of sigma_min and of sigma_max over the layers.

    Square layers, or such that narrow towards the input. The greatest over the least is the product
    of the layers' kappas: well-conditioned layers cannot make gradients vanish in one direction and
    explode in another, ill-conditioned ones can, with scale 1 each.

    >>> import torch
    >>> low, high = gradient_bounds([torch.diag(torch.tensor([2.0, 0.5]))] * 3)
    >>> low, high
    (tensor(0.1250, dtype=torch.float64), tensor(8., dtype=torch.float64))
    """
    values = [spectra.singular_values(layer) for layer in layers]
    low, high = values[0][..., -1], values[0][..., 0]
    for s in values[1:]:
        low, high = low * s[..., -1], high * s[..., 0]
    return low, high


def lyapunov_exponents(size: int, gain: float = 1.0) -> Array:
    """Return growth of log sigma_k per layer, log gain + (log(2/d) + psi((d - k + 1) / 2)) / 2.

    Newman 1986, for square layers with entries of deviation gain / sqrt(d).

    >>> lyapunov_exponents(64)[[0, 1, -1]].round(3)
    array([-0.008, -0.016, -2.715])
    """
    k = np.arange(1, size + 1)
    return np.asarray(math.log(gain) + (math.log(2 / size) + psi((size - k + 1) / 2)) / 2)


def log_gradient_norm(size: int, depth: int, gain: float = 1.0) -> tuple[float, float]:
    """Return mean, N times the first exponent, and deviation of log(|W' g| / |g|).

    The deviation is sqrt(N psi'(d/2)) / 2. Both are exact at every depth, since each layer
    multiplies by an independent chi / sqrt(d). A gain other than 1 explodes or vanishes
    exponentially; so does a gain of 1 in the end, as -N / (2 d).

    >>> mean, deviation = log_gradient_norm(64, depth=50)
    >>> round(mean, 3), round(deviation, 3)
    (-0.393, 0.63)
    """
    exponent = float(lyapunov_exponents(size, gain)[0])
    return depth * exponent, math.sqrt(depth * float(polygamma(1, size / 2))) / 2


def log_kappa_rate(size: int) -> float:
    """Return the growth of log kappa of a product per layer: (psi(d/2) - psi(1/2)) / 2.

    About log(1.89 sqrt(d)).
    Exponential in depth at any gain. A single layer has log kappa = log d + 1.537 on average
    (`GaussianNull`); each further one adds about half of log d.

    >>> round(log_kappa_rate(64), 2), round(math.log(1.89 * 64**0.5), 2)
    (2.71, 2.72)
    """
    first, *_, last = lyapunov_exponents(size)
    return float(first - last)
