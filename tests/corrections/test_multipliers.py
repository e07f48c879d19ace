"""Factors of rows, columns and singular values multiply, and are learned by the chain rule."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from correction_examples import matrices, steps_on
from kappascope.corrections import (
    Multipliers,
    SingularValueMultipliers,
    scaled,
)


def test_factors_of_one_change_nothing() -> None:
    weight = matrices(3, 4, 5)
    assert torch.equal(scaled(weight, torch.ones(3, 4), torch.ones(3, 5)), weight)


def test_scaling_is_the_product_with_two_diagonals() -> None:
    weight, rows, columns = matrices(2, 4, 5), matrices(2, 4, seed=1), matrices(2, 5, seed=2)
    expected = torch.diag_embed(rows) @ weight @ torch.diag_embed(columns)
    torch.testing.assert_close(scaled(weight, rows, columns), expected)


def test_the_gradients_of_the_factors_are_the_protocols() -> None:
    weight, upstream = matrices(2, 4, 5), matrices(2, 4, 5, seed=3)
    rows, columns = matrices(2, 4, seed=1).requires_grad_(), matrices(2, 5, seed=2).requires_grad_()
    scaled(weight, rows, columns).backward(upstream)
    r, c = rows.detach(), columns.detach()
    torch.testing.assert_close(rows.grad, (upstream * weight * c[:, None, :]).sum(-1))
    torch.testing.assert_close(columns.grad, (upstream * weight * r[:, :, None]).sum(-2))


def test_multipliers_take_the_steps_of_the_chain_rule() -> None:
    layer, x = nn.Linear(3, 2, bias=False).double(), matrices(5, 3)
    weight = layer.weight.detach().clone().requires_grad_()
    r, c = torch.ones(2).double().requires_grad_(), torch.ones(3).double().requires_grad_()
    optimizer = SGD(layer.parameters(), lr=0.1)
    with Multipliers(rate=0.5, weight_decay=0.0).attach(layer, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            (x @ layer.weight.T).square().sum().backward()
            optimizer.step()
            loss = (x @ scaled(weight, r, c).T).square().sum()
            grads = torch.autograd.grad(loss, (weight, r, c))
            with torch.no_grad():
                for value, gradient, rate in zip(
                    (weight, r, c), grads, (0.1, 0.05, 0.05), strict=True
                ):
                    value.sub_(rate * gradient)
        torch.testing.assert_close(layer.weight, scaled(weight, r, c))


def test_factors_of_singular_values_take_the_steps_of_the_chain_rule() -> None:
    for shape in ((3, 5), (5, 3)):
        layer, x = nn.Linear(shape[1], shape[0], bias=False).double(), matrices(7, shape[1])
        weight = layer.weight.detach().clone().requires_grad_()
        wide = weight.detach() if shape[0] < shape[1] else weight.detach().T
        u = torch.linalg.svd(wide, full_matrices=False)[0]
        m = torch.ones(3).double().requires_grad_()
        optimizer = SGD(layer.parameters(), lr=0.01)
        with SingularValueMultipliers(weight_decay=0.0).attach(layer, optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                (x @ layer.weight.T).square().sum().backward()
                optimizer.step()
                turn = u @ torch.diag(m) @ u.T
                made = turn @ weight if shape[0] < shape[1] else weight @ turn
                grads = torch.autograd.grad((x @ made.T).square().sum(), (weight, m))
                with torch.no_grad():
                    for value, gradient in zip((weight, m), grads, strict=True):
                        value.sub_(0.01 * gradient)
            turn = u @ torch.diag(m) @ u.T
            made = turn @ weight if shape[0] < shape[1] else weight @ turn
            torch.testing.assert_close(layer.weight, made)


def test_merging_factors_of_singular_values_midway_keeps_the_function() -> None:
    layer, x = nn.Linear(4, 4, bias=False).double(), matrices(7, 4)
    optimizer = SGD(layer.parameters(), lr=1e-9)
    with SingularValueMultipliers(every=2, rate=1e7).attach(layer, optimizer) as handle:
        steps_on(layer, optimizer, x)
        factors = handle.treatments[0].module.values
        assert (factors - 1).abs().max() > 1e-3
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before)
        assert torch.equal(factors, torch.ones_like(factors))
