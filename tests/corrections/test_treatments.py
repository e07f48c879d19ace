"""What is not finite is refused, what is remembered follows its weight, and steps have bounds."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from correction_examples import MODELS, every, inputs, steps, steps_on
from kappascope.corrections import (
    Hybrid,
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    SingularValueBound,
    SingularValueMultipliers,
    SpectralPenalty,
    SVDCorrection,
)
from kappascope.corrections._treatments import RATE_IF_UNKNOWN, DecoupledStep, OptimizerStep, State
from kappascope.matrix import spectra
from kappascope.model.weights import live_weights


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, dict):
        return [found for inner in value.values() for found in tensors(inner)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize(
    "correction", [NormPin(), SpectralPenalty(0.1, 1.5), SVDCorrection(every=1)], ids=repr
)
def test_what_is_remembered_follows_the_weight_to_its_device(correction) -> None:
    layer = nn.Linear(100, 100)
    optimizer = SGD(layer.parameters(), lr=0.1)
    handle = correction.attach(layer, optimizer)
    steps_on(layer, optimizer, torch.ones(2, 100), 2)
    (treatment,) = handle.treatments
    assert {t.device.type for t in tensors(treatment.memory)} == {"cpu"}
    state = handle.state_dict()
    treatment.leaf = layer.weight.to("meta")  # as a model's weights move
    assert {t.device.type for t in tensors(treatment.memory)} == {"meta"}
    handle.load_state_dict(state)
    assert {t.device.type for t in tensors(treatment.memory)} == {"meta"}


HUGE = 3e38  # near the end of float32


@pytest.mark.parametrize(
    "correction",
    [
        SVDCorrection(
            every=1, rate=1.0, target=lambda w: torch.full((3,), 1e39, dtype=torch.float64)
        ),
        OrthogonalPenalty(1.0, clip=float("inf")),
        Multipliers(rate=1e30),
        SingularValueMultipliers(rate=1e30),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_step_that_would_not_be_finite_is_refused(correction) -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight.data = torch.diag(torch.tensor([HUGE / 1e3, 1.0, 2.0]))
    optimizer = SGD(layer.parameters(), lr=1.0)
    handle = correction.attach(layer, optimizer)
    before = layer.weight.detach().clone()
    leaf = next(p for p in layer.parameters() if p.requires_grad)
    leaf.grad = torch.full_like(leaf, 1e-35)
    with pytest.warns(RuntimeWarning, match=r"was refused: weight would not be finite"):
        optimizer.step()
    assert handle.refused == {"weight": 1}
    torch.testing.assert_close(layer.weight.detach(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        leaf.grad = torch.full_like(leaf, 1e-35)
        optimizer.step()
    assert handle.refused == {"weight": 2}


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", ["bias", "parametrized", "tied"])
def test_a_gradient_that_is_not_finite_leaves_the_weight_unchanged(correction, shape, bad) -> None:
    torch.manual_seed(0)
    model = MODELS[shape]()
    optimizer = AdamW(model.parameters(), lr=0.05)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer)
    optimizer.zero_grad()
    model(inputs(model)).square().mean().backward()
    treatment = handle.treatments[0]
    treatment.leaf.grad[0, 0] = bad
    before = copy.deepcopy((treatment.weight.matrix(), optimizer.state[treatment.leaf]))
    with pytest.warns(RuntimeWarning, match="would not be finite"):
        optimizer.step()
    after = treatment.weight.matrix(), optimizer.state[treatment.leaf]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert handle.refused == {treatment.weight.name: 1}
    assert not treatment.leaf.grad.isfinite().all()  # is there still to be looked at
    steps(model, optimizer, 3)
    assert not torch.equal(treatment.weight.matrix(), before[0])
    assert handle.refused == {treatment.weight.name: 1}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [8, 200])  # by an SVD, and tracked
@pytest.mark.parametrize(
    "correction",
    [
        SpectralPenalty(target=2.0, every=2),
        SingularValueBound(2.0),
        Hybrid(),
        OrthogonalPenalty(1e-3),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_weight_that_is_not_finite_is_left_alone_until_it_is(correction, size, bad) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    twin = copy.deepcopy(layer)
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (layer, twin))
    handle = correction.attach(layer, optimizer)
    leaf = next(p for p in layer.parameters() if p.shape == (size, size))
    good = leaf.detach().clone()
    leaf.data[0, 0] = bad
    with pytest.warns(RuntimeWarning, match="was refused"):
        for _ in range(3):
            leaf.grad = torch.zeros_like(leaf)
            optimizer.step()
    assert handle.refused["weight"] >= 3
    leaf.data.copy_(good)
    with correction.attach(twin, other):
        for model, its in ((layer, optimizer), (twin, other)):
            weight = next(p for p in model.parameters() if p.shape == (size, size))
            weight.grad = torch.zeros_like(weight)
            its.step()
        handle.close()
    torch.testing.assert_close(layer.weight, twin.weight)
    assert not torch.equal(layer.weight, good)


def decay(matrix: Tensor, rate: float, _: State) -> Tensor:
    return -rate * matrix


def treated(layer: nn.Module, change=decay, every: int = 1) -> DecoupledStep:
    return DecoupledStep(nn.Linear, live_weights(layer)[0], change, {}, every=every)


@torch.no_grad()  # as all steps of corrections are
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


@torch.no_grad()  # as all steps of corrections are
def test_an_optimizer_without_a_learning_rate_gets_a_known_one() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    treated(layer).after(OptimizerStep(1, {}))
    torch.testing.assert_close(layer.weight, (1 - RATE_IF_UNKNOWN) * before)


@torch.no_grad()  # as all steps of corrections are
def test_through_a_parametrization_the_weight_moves_no_farther_than_it_was_to() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    layer.parametrizations.weight.original0.data.mul_(10.0)  # long rows: the chain rule overshoots
    before = layer.weight.detach().clone()
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    treated(layer, lambda matrix, rate, _: -rate * gradient).after(OptimizerStep(1, {"lr": 0.5}))
    moved = float(torch.linalg.vector_norm(layer.weight - before))
    assert 0 < moved <= 0.5 * float(torch.linalg.vector_norm(gradient))


@torch.no_grad()  # as all steps of corrections are
def test_what_is_not_finite_or_has_no_decomposition_leaves_the_weight() -> None:
    def fails(matrix: Tensor, rate: float, memory: State) -> Tensor:
        raise spectra.LinAlgError("no convergence")

    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    for change in (lambda matrix, *_: matrix / 0, fails):
        assert not treated(layer, change).after(OptimizerStep(1, {"lr": 0.1}))
    assert treated(layer, lambda *_: None).after(OptimizerStep(1, {"lr": 0.1}))
    assert torch.equal(layer.weight, before)
