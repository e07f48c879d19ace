"""Caps and bands hold for singular values of what is stored, and move no other value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import nn
from torch.optim import AdamW

from correction_examples import idle, ill_conditioned, matrices, steps_on
from kappascope.corrections import SingularValueBand, SpectralCap
from kappascope.matrix.orthogonal import LEAST_SOFT_PART


@given(st.integers(0, 1000), st.floats(0.05, 3.0))
def test_a_hard_cap_clips_every_value_and_keeps_the_vectors(seed, cap) -> None:
    weight = matrices(4, 6, seed=seed)
    found = SpectralCap(cap).corrected(weight)
    expected = torch.linalg.svdvals(weight).clamp(max=cap)
    torch.testing.assert_close(torch.linalg.svdvals(found), expected)
    for product in (found @ weight.mT, weight.mT @ found):
        torch.testing.assert_close(product, product.mT)


@given(st.integers(0, 1000), st.floats(0.05, 3.0))
def test_a_soft_cap_takes_the_largest_to_the_limit_and_keeps_the_order(seed, cap) -> None:
    weight = matrices(6, 4, seed=seed)
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    found = SpectralCap(cap, soft=True).corrected(weight)
    along = (u.T @ found @ vt.T).diagonal()
    torch.testing.assert_close(along[0], s[0].clamp(max=cap))
    assert (along.diff() <= 1e-12).all() and (along <= s * (1 + 1e-12)).all()
    if s[0] <= cap:
        assert torch.equal(found, weight)
    elif cap > LEAST_SOFT_PART * s[0]:  # one passage of the polynomial, its strength from a solver
        part = cap / float(s[0])
        a = brentq(lambda a: (1 - a) + a * (1 - a) ** 3 - part, 0, 1 / 3)
        x = s / s[0]
        first = x - a * x**3
        torch.testing.assert_close(along, s[0] * (first + a * first**3), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_a_cap_by_shape_grows_with_outputs_and_falls_with_inputs(shape) -> None:
    found = SpectralCap(1.0, by_shape=True).corrected(10 * matrices(*shape))
    largest = torch.linalg.matrix_norm(found, 2)
    assert float(largest) == pytest.approx((shape[0] / shape[1]) ** 0.5)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("size", [8, 150])
def test_a_cap_holds_at_every_step_of_training(size, soft) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(size, size, bias=False), torch.randn(32, size)
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    before = torch.linalg.matrix_norm(layer.weight.detach(), 2)
    with SpectralCap(soft=soft).attach(layer, optimizer):
        for _ in range(10):
            optimizer.zero_grad()
            (layer(x) - 9 * x).square().mean().backward()
            optimizer.step()
            largest = torch.linalg.matrix_norm(layer.weight.detach(), 2)
            assert largest <= before * (1 + (1e-3 if soft else 1e-6))
    assert largest > 0.9 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_hard_cap_holds_of_what_is_stored_in_16_bits(dtype) -> None:
    layer = ill_conditioned(120, 120).to(dtype)
    idle(layer, SpectralCap(0.5), 1)
    assert torch.linalg.matrix_norm(layer.weight.detach().double(), 2) <= 0.5


@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (120, 130)])
def test_a_band_holds_and_is_the_nearest_matrix(shape) -> None:
    layer = ill_conditioned(*shape)
    u, s, vt = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    idle(layer, SingularValueBand(0.1, 0.6), 1)
    along = u.T @ layer.weight.detach() @ vt.T
    torch.testing.assert_close(along, torch.diag(s.clamp(0.1, 0.6)), atol=1e-10, rtol=0)


def test_a_weight_within_its_band_is_left_to_the_bit() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(120, 120, bias=False))
    plain = nn.Linear(120, 120, bias=False)
    plain.weight.data = layer.weight.detach().clone()
    idle(plain, SingularValueBand(0.5, 2.0), 2)
    assert torch.equal(plain.weight, layer.weight)


def test_a_band_acts_when_it_is_time() -> None:
    layer, x = ill_conditioned(4, 4), matrices(8, 4)
    optimizer = AdamW(layer.parameters(), lr=1e-4)
    with SingularValueBand(0.5, 2.0, every=3).attach(layer, optimizer):
        steps_on(layer, optimizer, x, 2)
        assert torch.linalg.svdvals(layer.weight.detach())[-1] < 0.1
        steps_on(layer, optimizer, x, 1)
        assert torch.linalg.svdvals(layer.weight.detach())[-1] > 0.499


def test_a_cap_that_is_not_given_is_what_there_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with SpectralCap().attach(model, optimizer) as handle:
        assert "zero at first" in handle.left_out["1.weight"]
    with SpectralCap(1.0).attach(model, optimizer) as handle:
        assert handle.weights == ("0.weight", "1.weight")
