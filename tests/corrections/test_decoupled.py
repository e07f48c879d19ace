"""A decoupled step: when it is taken, how far it goes, and what stops it."""

import pytest
import torch
from torch import Tensor, nn

from kappascope.corrections.decoupled import RATE_IF_UNKNOWN, DecoupledStep
from kappascope.corrections.treatments import OptimizerStep, State
from kappascope.matrix import spectra
from kappascope.model.weights import live_weights


def decay(matrix: Tensor, rate: float, _: State) -> Tensor:
    return -rate * matrix


@pytest.fixture(autouse=True)
def as_within_a_step():
    with torch.no_grad():  # as all steps of corrections are
        yield


def treated(layer: nn.Module, change=decay, every: int = 1) -> DecoupledStep:
    return DecoupledStep(nn.Linear, live_weights(layer)[0], change, {}, every=every)


@pytest.mark.parametrize("every", [1, 3])
def test_it_acts_at_the_first_step_and_every_so_many_with_as_many_times_the_rate(every) -> None:
    layer = nn.Linear(3, 2, bias=False)
    start = layer.weight.detach().clone()
    step = treated(layer, every=every)
    sizes = []
    for index in range(6):
        assert step.after(OptimizerStep(index + 1, {"lr": 0.1}))
        sizes.append(float((layer.weight / start).mean()))
    factors = [(1 - 0.1 * every) ** (index // every + 1) for index in range(6)]
    assert sizes == pytest.approx(factors, rel=1e-5) and step.count == 6 // every


def test_an_optimizer_without_a_learning_rate_gets_a_known_one() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    treated(layer).after(OptimizerStep(1, {}))
    torch.testing.assert_close(layer.weight, (1 - RATE_IF_UNKNOWN) * before)


def test_through_a_parametrization_the_weight_moves_no_farther_than_it_was_to() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    layer.parametrizations.weight.original0.data.mul_(10.0)  # long rows: the chain rule overshoots
    before = layer.weight.detach().clone()
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    treated(layer, lambda matrix, rate, _: -rate * gradient).after(OptimizerStep(1, {"lr": 0.5}))
    moved = float(torch.linalg.vector_norm(layer.weight - before))
    assert 0 < moved <= 0.5 * float(torch.linalg.vector_norm(gradient))


def test_what_is_not_finite_or_has_no_decomposition_leaves_the_weight() -> None:
    def fails(matrix: Tensor, rate: float, memory: State) -> Tensor:
        raise spectra.LinAlgError("no convergence")

    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    for change in (lambda matrix, *_: matrix / 0, fails):
        assert not treated(layer, change).after(OptimizerStep(1, {"lr": 0.1}))
    assert treated(layer, lambda *_: None).after(OptimizerStep(1, {"lr": 0.1}))
    assert torch.equal(layer.weight, before)
