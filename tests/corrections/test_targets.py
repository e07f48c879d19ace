"""A target is a number, a tensor, a state dict or a function; anything else is an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from correction_examples import idle, ill_conditioned, perceptron
from kappascope.corrections import (
    SpectralPenalty,
    SVDCorrection,
)


def test_a_reference_may_be_a_state_dict() -> None:
    reference = ill_conditioned(seed=3).state_dict()
    layer = nn.Linear(6, 6, bias=False).double()
    idle(layer, SVDCorrection(every=1, rate=1.0, target=reference), 1)
    values = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(values, torch.linalg.svdvals(reference["weight"]))
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match=r"no 0\.weight; it has weight"):
        SpectralPenalty(target=reference).attach(model, SGD(model.parameters()))


@pytest.mark.parametrize("number", [2, np.float32(2), np.int64(2), torch.tensor(2.0)], ids=repr)
def test_whatever_is_a_number_bounds_kappa(number) -> None:
    weight = ill_conditioned().weight.detach()
    for found, plain in (
        (SpectralPenalty(1.0, number).penalty(weight), SpectralPenalty(1.0, 2.0).penalty(weight)),
        (
            SVDCorrection(target=number).corrected(weight),
            SVDCorrection(target=2.0).corrected(weight),
        ),
    ):
        assert torch.equal(found, plain)


def test_a_tensor_of_singular_values_is_a_target() -> None:
    known = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    for target in (known, lambda _: known):
        layer = idle(ill_conditioned(3, 3), SVDCorrection(every=1, rate=1.0, target=target), 1)
        torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), known)
    weight = ill_conditioned(3, 3).weight
    both = [SpectralPenalty(1.0, target).penalty(weight) for target in (known, lambda _: known)]
    assert both[0] == both[1] > 0
    model = perceptron()
    with pytest.raises(ValueError, match=r"0\.weight has 4 singular values, the target 3"):
        SVDCorrection(target=known).attach(model, SGD(model.parameters()))


@pytest.mark.parametrize("target", ["2", [2.0], nn.Linear(2, 2)], ids=["text", "list", "module"])
@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
def test_what_is_no_target_is_an_error(kind, target) -> None:
    with pytest.raises(TypeError, match="expected the target to be a number, a tensor"):
        kind(target=target)


def test_a_function_may_give_singular_values_as_an_array() -> None:
    weight = ill_conditioned(3, 3).weight.detach()
    for array in (np.array([3.0, 2.0, 1.0]), [3.0, 2.0, 1.0]):
        found = SVDCorrection(rate=1.0, target=lambda _, array=array: array).corrected(weight)
        values = torch.linalg.svdvals(found)
        torch.testing.assert_close(values, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
@pytest.mark.parametrize(
    "values", [[], [1.0, 2.0, 3.0], [2.0, torch.nan, 1.0], [torch.inf, 1.0, 1.0]], ids=repr
)
def test_values_that_are_no_spectrum_are_an_error(kind, values) -> None:
    told = "expected the target's singular values to be finite numbers, the largest first; got"
    layer = ill_conditioned(3, 3)
    with pytest.raises(ValueError, match=told):
        kind(target=torch.tensor(values))
    with pytest.raises(ValueError, match=told):
        kind(target=lambda _: values).attach(layer, SGD(layer.parameters()))


@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
def test_a_function_that_gives_no_spectrum_is_an_error(kind) -> None:
    layer = ill_conditioned(3, 3)
    with pytest.raises(TypeError, match="singular values from the target's function; got NoneType"):
        kind(target=lambda _: None).attach(layer, SGD(layer.parameters()))
    with pytest.raises(ValueError, match=r"the largest first; got 3\.0"):
        kind(target=lambda _: 3.0).attach(layer, SGD(layer.parameters()))
    with pytest.raises(ValueError, match=r"to fit weight of shape \(3, 3\); got \(2, 3\)"):
        kind(target=torch.ones(2, 3)).attach(layer, SGD(layer.parameters()))
    reference = {"weight": torch.full((3, 3), torch.nan)}
    with pytest.raises(ValueError, match="to be finite numbers"):
        kind(target=reference).attach(layer, SGD(layer.parameters()))
