"""Gradients and singular values through many layers, against bounds and random matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kappascope.lab.tasks import Own
from kappascope.theory import (
    gradient_bounds,
    log_gradient_norm,
    log_kappa_rate,
    lyapunov_exponents,
)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_gradients_stay_within_their_bounds(seed: int, depth: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    layers = [torch.randn(5, 5, generator=draw, dtype=torch.float64) for _ in range(depth)]
    gradient = torch.randn(5, generator=draw, dtype=torch.float64)
    back = gradient
    for layer in reversed(layers):
        back = layer.mT @ back
    low, high = gradient_bounds(layers)
    assert low * (1 - 1e-9) <= back.norm() / gradient.norm() <= high * (1 + 1e-9)


def random_products(size: int, depth: int, count: int, gain: float) -> torch.Tensor:
    random = Own(range(count), f"product {size} {depth}").random()
    whole = torch.eye(size, dtype=torch.float64)
    for _ in range(depth):
        whole = gain / size**0.5 * random.normal(size, size) @ whole
    return whole


@pytest.mark.parametrize("gain", [0.8, 1.0, 1.5])
def test_gradient_norm_has_its_mean_and_spread_at_every_depth(gain: float) -> None:
    whole = random_products(16, 12, count=2000, gain=gain)
    logs = whole[:, 0].norm(dim=-1).log()  # W' e_1
    mean, deviation = log_gradient_norm(16, 12, gain)
    assert float(logs.mean()) == pytest.approx(mean, abs=4 * deviation / 2000**0.5)
    assert float(logs.std()) == pytest.approx(deviation, rel=0.1)


def test_singular_values_of_a_deep_product_grow_with_the_exponents() -> None:
    """By QR, layer by layer: a product of a hundred has lost its small ones to rounding."""
    size, depth, random = 5, 400, np.random.default_rng(1)
    turn, logs = np.eye(size), np.zeros(size)
    for _ in range(depth):
        turn, r = np.linalg.qr(random.normal(size=(size, size)) / size**0.5 @ turn)
        logs += np.log(np.abs(np.diag(r)))
    np.testing.assert_allclose(logs / depth, lyapunov_exponents(size), atol=0.25)
    spread = (logs[0] - logs[-1]) / depth
    assert spread == pytest.approx(log_kappa_rate(size), abs=0.25)


def test_kappa_of_a_random_product_grows_exponentially_with_depth() -> None:
    size = 8
    logs = []
    for depth in (6, 9):  # kappa stays below 1e12
        s = torch.linalg.svdvals(random_products(size, depth, 400, gain=1.0))
        logs.append(float((s[:, 0] / s[:, -1]).log().mean()))
    assert (logs[1] - logs[0]) / 3 == pytest.approx(log_kappa_rate(size), rel=0.1)


def test_orthogonal_layers_pass_gradients_unchanged() -> None:
    layers = [torch.linalg.qr(torch.randn(6, 6).double()).Q for _ in range(20)]
    low, high = gradient_bounds(layers)
    assert float(low) == pytest.approx(1)
    assert float(high) == pytest.approx(1)
