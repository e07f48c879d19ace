"""Penalties have the gradients of their formulas, and training under them leads where they say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW

from correction_examples import idle, ill_conditioned, kappa_of, matrices
from kappascope.corrections import (
    OrthogonalPenalty,
    PaperPenalty,
    SigmaMaxPenalty,
    SpectralPenalty,
    condition_penalty,
    floored_condition_number,
)
from kappascope.matrix import spectra, tracking


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
    literal = torch.stack(  # the clip is relative to each matrix's largest value
        [
            condition_penalty(w, goal, clip=float(torch.linalg.matrix_norm(w, 2)))
            for w in weight.detach()
        ]
    )
    torch.testing.assert_close(weight.grad, literal)


def test_the_papers_penalty_is_clipped_absolutely() -> None:
    weight = matrices(3, 4, 5).requires_grad_()
    known = torch.tensor([2.0, 1.5, 1.2, 1.0], dtype=torch.float64)
    PaperPenalty(0.005, target=lambda _: known).penalty(weight).sum().backward()
    goal = floored_condition_number(known)
    torch.testing.assert_close(weight.grad, condition_penalty(weight.detach(), goal))


OPTIMIZERS = {
    "SGD": SGD,
    "momentum": lambda p, rate: SGD(p, rate, momentum=0.9, nesterov=True),
    "Adam": lambda p, rate: AdamW(p, rate, weight_decay=0.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("target", [1.0, 30.0, None, lambda weight: torch.linspace(9, 1, 5)])
@given(
    scale=st.floats(-3, 3).map(lambda x: 10**x),
    rate=st.floats(-5, 1).map(lambda x: 10**x),
    strength=st.floats(-4, 2).map(lambda x: 10**x),
    seed=st.integers(0, 100),
)
def test_no_step_of_the_penalty_overshoots(
    optimizer, target, *, scale, rate, strength, seed
) -> None:
    layer = ill_conditioned(5, 5, seed=seed)
    layer.weight.data *= scale
    penalty = SpectralPenalty(strength, target=target)
    stepper = OPTIMIZERS[optimizer](layer.parameters(), rate)
    with penalty.attach(layer, stepper):
        u, s, vt = torch.linalg.svd(layer.weight.detach())
        for taken in range(3):
            layer.weight.grad = torch.zeros_like(layer.weight)
            before = penalty.penalty(layer.weight.detach())
            kappa_before = kappa_of(layer.weight)
            stepper.step()
            kappa_after = kappa_of(layer.weight)
            assert penalty.penalty(layer.weight.detach()) <= before + 1e-9 * (before + 1)
            if isinstance(target, float):
                assert kappa_after >= min(target, kappa_before) * (1 - 1e-6)
            if not taken:
                along = (u.T @ layer.weight.detach() @ vt.T).diagonal()
                assert along[-1] <= along[0] * (1 + 1e-6)  # the smallest is not the largest
        assert torch.linalg.svdvals(layer.weight.detach())[0] <= s[0] * (1 + 1e-9)


@pytest.mark.parametrize("spectral", [True, False])
@given(
    scale=st.floats(-3, 3).map(lambda x: 10**x),
    rate=st.floats(-5, 1).map(lambda x: 10**x),
    strength=st.floats(-4, 2).map(lambda x: 10**x),
)
def test_no_step_of_the_orthogonal_penalty_passes_one(spectral, scale, rate, strength) -> None:
    layer = ill_conditioned(4, 5)
    layer.weight.data *= scale
    u, s, vt = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    idle(layer, OrthogonalPenalty(strength, spectral), 1, rate)
    after = (u.T @ layer.weight.detach() @ vt.T).diagonal()
    assert ((after - 1) * (s - 1) >= -1e-9).all()
    assert ((after - 1).abs() <= (s - 1).abs() * (1 + 1e-9) + 1e-12).all()


def test_adam_does_not_turn_the_penalty_into_another_step() -> None:
    ends = []
    for make in OPTIMIZERS.values():
        layer = ill_conditioned(6, 6)
        optimizer = make(layer.parameters(), 0.01)
        with SpectralPenalty(0.01, target=20.0).attach(layer, optimizer):
            for _ in range(5):
                layer.weight.grad = torch.zeros_like(layer.weight)
                optimizer.step()
        ends.append(layer.weight.detach())
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_one_step_on_a_weight_of_usual_scale_leaves_the_order_of_its_directions() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    layer.weight.data *= 0.3 / torch.linalg.matrix_norm(layer.weight.data, 2)
    u, s, vt = torch.linalg.svd(layer.weight.detach())
    idle(layer, SpectralPenalty(0.1, target=3.0), 1, rate=0.5)
    along = (u.T @ layer.weight.detach() @ vt.T).diagonal()
    assert along[-1] < along[0]
    literal = nn.Linear(64, 64, bias=False)
    literal.weight.data = (u * s) @ vt
    idle(literal, PaperPenalty(0.1, target=3.0), 1, rate=0.5)
    along = (u.T @ literal.weight.detach() @ vt.T).diagonal()
    assert along[-1] > along[0]  # what the paper's form does


@pytest.mark.parametrize("shape", [(120, 120), (128, 300)])
@pytest.mark.parametrize("speed", [2e-4, 1e-3, 5e-3])
def test_the_smallest_value_of_a_drifting_weight_is_known_within_a_tenth(shape, speed) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    optimizer = SGD(layer.parameters(), lr=1.0)
    seen, original = [], tracking.extreme_triplets

    def watched(matrix, memory=None):
        found = original(matrix, memory)
        seen.append((float(found.values[-1]), float(torch.linalg.svdvals(matrix)[-1])))
        return found

    penalty = SpectralPenalty(1e-9, target=1.5, every=5)
    with pytest.MonkeyPatch.context() as patch, penalty.attach(layer, optimizer):
        patch.setattr(tracking, "extreme_triplets", watched)
        for _ in range(60):
            noise = torch.randn(shape)
            layer.weight.grad = speed * layer.weight.detach().norm() / noise.norm() * noise
            optimizer.step()
    assert len(seen) == 12
    assert all(abs(known / true - 1) < 0.1 for known, true in seen)


@given(strength=st.floats(0.01, 100.0), rate=st.floats(1e-4, 10.0))
def test_the_penalty_of_the_largest_value_is_followed_for_as_long_as_the_rate_says(
    strength, rate
) -> None:
    layer = ill_conditioned(4, 6)
    u, s, vt = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    idle(layer, SigmaMaxPenalty(strength), 1, rate)
    after = (u.T @ layer.weight.detach() @ vt.T).diagonal()
    torch.testing.assert_close(after[0], s[0] * math.exp(-strength * rate), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(after[1:], s[1:])


def test_the_gradient_of_the_penalty_of_the_largest_value_is_that_of_its_formula() -> None:
    weight = matrices(2, 4, 5).requires_grad_()
    found = SigmaMaxPenalty(0.3).penalty(weight)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    formula = 0.15 * torch.linalg.matrix_norm(weight, 2).square()
    (expected,) = torch.autograd.grad(formula.sum(), weight)
    torch.testing.assert_close(found, formula)
    torch.testing.assert_close(gradient, expected)


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


def test_a_state_from_before_the_penalty_was_kept_is_loaded() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = OrthogonalPenalty(strength=1e-3, spectral=False).attach(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert any("penalty" in name for name in handle.metrics())
    state = handle.state_dict()
    for treatment in state["treatments"]:
        del treatment["memory"]["penalty"]
    handle.load_state_dict(state)
    assert not any("penalty" in name for name in handle.metrics())
