"""A direction of pinned size turns, and what multiplies it learns the scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from correction_examples import matrices, perceptron, steps
from kappascope.corrections import MagnitudeDirection, RowNormPin, SpectralNormalization
from kappascope.lab.training import Matrix


def test_the_direction_keeps_its_norm_while_the_weight_changes_its_own() -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.05)
    norms = [model[i].weight.detach().norm() for i in (0, 2)]
    with MagnitudeDirection().attach(model, optimizer) as handle:
        steps(model, optimizer, 10)
        directions = [t.direction for t in handle.treatments if hasattr(t, "direction")]
        torch.testing.assert_close([d.norm() for d in directions], norms, rtol=1e-5, atol=0)
        trained = [model[i].weight.detach().norm() for i in (0, 2)]
    assert all(abs(a / b - 1) > 1e-2 for a, b in zip(trained, norms, strict=True))
    assert [model[i].weight.detach().norm() for i in (0, 2)] == trained


def test_rows_of_a_direction_may_be_pinned_each() -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    rows = model[0].weight.detach().norm(dim=1)
    with MagnitudeDirection(pin=RowNormPin()).attach(model, optimizer) as handle:
        steps(model, optimizer, 10)
        direction = next(t.direction for t in handle.treatments if hasattr(t, "direction"))
    torch.testing.assert_close(direction.norm(dim=1), rows)


@pytest.mark.parametrize("size", [6, 150])
def test_a_held_gain_keeps_the_spectral_norm(size) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    before = torch.linalg.matrix_norm(layer.weight.detach(), 2)
    optimizer, x = AdamW(layer.parameters(), lr=0.01), torch.randn(32, size)
    with SpectralNormalization(rate=0.0).attach(layer, optimizer):
        for _ in range(10):
            optimizer.zero_grad()
            (layer(x) - x).square().mean().backward()
            optimizer.step()
    after = torch.linalg.matrix_norm(layer.weight.detach(), 2)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=0)


def test_a_learned_gain_is_the_spectral_norm_over_the_initial_one() -> None:
    torch.manual_seed(0)
    model = perceptron()
    before = torch.linalg.matrix_norm(model[0].weight.detach(), 2)
    optimizer = SGD(model.parameters(), lr=0.2)
    with SpectralNormalization().attach(model, optimizer) as handle:
        steps(model, optimizer, 20)
        gain = next(t.module.rows for t in handle.treatments if hasattr(t, "module"))
        assert gain.shape == (1,) and abs(float(gain) - 1) > 1e-2
        after = torch.linalg.matrix_norm(model[0].weight.detach(), 2)
        torch.testing.assert_close(after, gain.detach()[0] * before, rtol=1e-5, atol=0)


def test_every_matrix_of_a_stack_has_a_gain_of_its_own() -> None:
    stack = Matrix(matrices(3, 4, 4))
    optimizer = SGD(stack.parameters(), lr=0.1)
    with SpectralNormalization().attach(stack, optimizer) as handle:
        (stack() * torch.tensor([1.0, 2.0, 3.0])[:, None, None]).square().sum().backward()
        optimizer.step()
        gains = next(t.module.rows for t in handle.treatments if hasattr(t, "module"))
        assert gains.shape == (3, 1) and len({round(float(g), 6) for g in gains}) == 3


def test_the_pure_form_scales_to_the_gain() -> None:
    found = SpectralNormalization().corrected(matrices(3, 4, 5), gain=2.0)
    norms = torch.linalg.matrix_norm(found, 2)
    torch.testing.assert_close(norms, torch.full_like(norms, 2.0))
