"""Penalties have the gradients of their formulas, and training under them leads where they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from correction_examples import idle, ill_conditioned, kappa_of, matrices
from kappascope.corrections import (
    OrthogonalPenalty,
    SpectralPenalty,
    condition_penalty,
    floored_condition_number,
)
from kappascope.matrix import spectra


@given(st.integers(0, 1000), st.sampled_from([(3, 3), (4, 6), (6, 4)]))
def test_the_penaltys_gradient_is_that_of_its_formula(seed: int, shape: tuple[int, int]) -> None:
    weight = matrices(*shape, seed=seed).requires_grad_()
    goal = torch.tensor(5.0, dtype=torch.float64)
    kappa = floored_condition_number(torch.linalg.svdvals(weight))
    penalty = 0.005 * ((kappa + 1).log() - (goal + 1).log()) ** 2
    (expected,) = torch.autograd.grad(penalty, weight)
    found = condition_penalty(weight.detach(), goal, clip=float("inf"))
    torch.testing.assert_close(found, expected)


def test_the_penaltys_gradient_is_clipped_per_matrix() -> None:
    small = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    stack = torch.stack([small, torch.eye(2, dtype=torch.float64)])
    norms = torch.linalg.matrix_norm(condition_penalty(stack, torch.tensor([2.0, 1.0])))
    assert norms.tolist() == pytest.approx([1.0, 0.0], abs=1e-10)


@pytest.mark.parametrize("target", [10.0, None, lambda weight: torch.tensor([3.0, 2.0, 1.0])])
def test_the_penalty_lowers_the_distance_from_its_limits(target) -> None:
    penalty = SpectralPenalty(0.1, target=target)
    layer = ill_conditioned(3, 3)
    before = penalty.penalty(layer.weight).item()
    after = penalty.penalty(idle(layer, penalty, 300).weight).item()
    assert before > 0 and after < 0.05 * before


def test_within_its_band_the_penalty_changes_nothing() -> None:
    layer = ill_conditioned()
    before = layer.weight.detach().clone()
    penalty = SpectralPenalty(1.0, target=spectra.singular_values)  # the initial spectrum
    assert torch.equal(idle(layer, penalty, 5).weight, before)


def test_the_penaltys_backward_is_the_clipped_closed_gradient() -> None:
    weight = matrices(3, 4, 5).requires_grad_()
    known = torch.tensor([2.0, 1.5, 1.2, 1.0], dtype=torch.float64)
    penalty = SpectralPenalty(0.005, target=lambda _: known, band=0.0)
    penalty.penalty(weight).sum().backward()
    goal = floored_condition_number(known)
    torch.testing.assert_close(weight.grad, condition_penalty(weight.detach(), goal))


@pytest.mark.parametrize("spectral", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (2, 5, 3)])
def test_the_orthogonal_penaltys_gradient_is_that_of_its_formula(spectral, shape) -> None:
    weight = matrices(*shape).requires_grad_()
    found = OrthogonalPenalty(1e-3, spectral=spectral, clip=float("inf")).penalty(weight)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    tall = weight if shape[-2] >= shape[-1] else weight.mT
    rest = tall.mT @ tall - torch.eye(tall.shape[-1])
    square = rest.square().sum((-2, -1))
    formula = 1e-3 * (torch.linalg.matrix_norm(rest, 2) if spectral else square)
    (expected,) = torch.autograd.grad(formula.sum(), weight)
    torch.testing.assert_close(found, formula)
    torch.testing.assert_close(gradient, expected)


def test_the_orthogonal_penalty_leads_to_orthogonal_matrices() -> None:
    for correction in (OrthogonalPenalty(0.1), OrthogonalPenalty(0.1, spectral=True)):
        layer = idle(ill_conditioned(3, 3), correction, 1000)
        assert kappa_of(layer.weight) < 1.3


def test_a_penalty_reaches_a_weight_through_what_makes_it() -> None:
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    vector = layer.parametrizations.weight[0]._u.clone()
    idle(layer, SpectralPenalty(0.1, target=1.5), 100)
    assert torch.equal(layer.parametrizations.weight[0]._u, vector)  # reading it moves nothing
    assert kappa_of(layer.weight) < 3
