"""Pins hold the norms of matrices, rows and columns, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from correction_examples import MODELS, matrices, perceptron, steps
from kappascope.corrections import ColumnNormPin, NormPin, RowNormPin
from kappascope.lab.training import Matrix
from kappascope.refusal import Refusal


@pytest.mark.parametrize("shape", ["bias", "conv", "parametrized"])
def test_the_pin_holds_the_norm(shape) -> None:
    model = MODELS[shape]()
    optimizer = AdamW(model.parameters(), lr=0.05)
    layers = [m for m in model if hasattr(m, "weight")]
    before = [m.weight.detach().norm() for m in layers]
    twin = copy.deepcopy(model)
    steps(twin, AdamW(twin.parameters(), lr=0.05), 5)
    with NormPin().attach(model, optimizer):
        steps(model, optimizer, 5)
    after = [m.weight.detach().norm() for m in layers]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=0)
    free = [m.weight.detach().norm() for m in twin if hasattr(m, "weight")]
    assert any(abs(a - b) > 1e-3 for a, b in zip(free, before, strict=True))


def test_pinning_one_matrix_of_a_stack_leaves_the_others_scale_to_them() -> None:
    stack = Matrix(matrices(3, 4, 4))
    norms = torch.linalg.matrix_norm(stack.weight.detach())
    with NormPin().attach(stack, optimizer := SGD(stack.parameters(), lr=0.1)):
        stack().square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(torch.linalg.matrix_norm(stack.weight.detach()), norms)


def test_a_pinned_norm_has_all_digits_of_the_weight() -> None:
    assert abs(NormPin(0.1).corrected(matrices(3, 3)).norm() - 0.1) < 1e-16


@pytest.mark.parametrize(("pin", "side"), [(RowNormPin, -1), (ColumnNormPin, -2)])
def test_row_and_column_pins_hold_each_norm_through_training(pin, side) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.05)
    before = [torch.linalg.vector_norm(model[i].weight.detach(), dim=side) for i in (0, 2)]
    start = model[0].weight.detach().clone()
    with pin().attach(model, optimizer):
        steps(model, optimizer, 5)
    after = [torch.linalg.vector_norm(model[i].weight.detach(), dim=side) for i in (0, 2)]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)
    assert not torch.allclose(model[0].weight, start)


@pytest.mark.parametrize(("pin", "side"), [(RowNormPin, -1), (ColumnNormPin, -2)])
def test_a_given_norm_is_reached_by_every_row_or_column_of_a_stack(pin, side) -> None:
    weight = matrices(3, 4, 5)
    found = pin(norm=2.0).corrected(weight)
    norms = torch.linalg.vector_norm(found, dim=side)
    torch.testing.assert_close(norms, torch.full_like(norms, 2.0))
    cosine = torch.cosine_similarity(found, weight, dim=side)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


@pytest.mark.parametrize("pin", [NormPin, RowNormPin, ColumnNormPin])
def test_a_weight_that_begins_at_zero_is_left_out_unless_a_norm_is_given(pin) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pin().attach(model, optimizer) as handle:
        assert handle.weights == ("0.weight",)
        assert "zero at first" in handle.left_out["1.weight"]
    with pin(norm=1.0).attach(model, optimizer) as handle:
        assert handle.weights == ("0.weight", "1.weight")


def test_a_norm_beyond_the_dtype_is_refused_when_attached() -> None:
    layer = nn.Linear(3, 3, bias=False)
    with pytest.raises(Refusal, match="no weight of float32 can have a norm of 1e\\+39"):
        NormPin(norm=1e39).attach(layer, SGD(layer.parameters(), lr=1.0))
