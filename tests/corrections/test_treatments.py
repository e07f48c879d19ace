"""What is not finite is refused, and what is remembered follows its weight."""

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
        NormPin(norm=1e39),
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
