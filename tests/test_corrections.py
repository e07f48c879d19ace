"""Corrections do what their formulas say, on one matrix as on a stack."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kappascope.corrections import (
    condition_penalty,
    floored_condition_number,
    scaled,
    toward_spectrum,
)


def matrices(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_moving_all_the_way_gives_the_other_spectrum_and_keeps_the_vectors() -> None:
    weight, goal = matrices(2, 4, 6), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    moved = toward_spectrum(weight, goal, step=1.0)
    torch.testing.assert_close(torch.linalg.svdvals(moved), goal.expand(2, 4))
    # the same left and right vectors: both products are symmetric
    for product in (moved @ weight.mT, weight.mT @ moved):
        torch.testing.assert_close(product, product.mT)


def test_a_singular_value_is_never_moved_below_the_floor() -> None:
    moved = toward_spectrum(torch.eye(2, dtype=torch.float64), torch.tensor([1.0, -50.0]))
    assert torch.linalg.svdvals(moved)[1].item() == pytest.approx(1e-10, rel=1e-3)
