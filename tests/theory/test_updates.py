"""One step of an optimizer, against torch's own."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Muon, Optimizer

from kappascope.theory import (
    adam_leading_change,
    adam_update,
    blind_change,
    full_gradient_change,
    muon_update,
    newton_schulz,
    sgd_update,
    singular_value_change,
)

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said when flags are set


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def stepped(
    weight: Tensor, gradient: Tensor, optimizer: type[Optimizer], **options: float
) -> Tensor:
    """What the optimizer adds to the weight."""
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    # Muon multiplies in bfloat16, which oneDNN does with instructions some machines only announce
    with torch.backends.mkldnn.flags(enabled=False):
        optimizer([parameter], **options).step()
    return parameter.detach() - weight


def moved(weight: Tensor, update: Tensor) -> Tensor:
    return torch.linalg.svdvals(weight + update) - torch.linalg.svdvals(weight)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_singular_values_move_as_their_first_order_says(shape: tuple[int, int]) -> None:
    weight, update = normal(*shape), 1e-5 * normal(*shape, seed=1)
    expected = singular_value_change(weight, update)
    torch.testing.assert_close(moved(weight, update), expected, rtol=1e-2, atol=1e-8)


def test_stacks_are_taken_matrix_by_matrix() -> None:
    weight, update = normal(3, 6, 4), normal(3, 6, 4, seed=1)
    each = [singular_value_change(w, u) for w, u in zip(weight, update, strict=True)]
    torch.testing.assert_close(singular_value_change(weight, update), torch.stack(each))


def test_first_steps_are_those_of_torch() -> None:
    weight, gradient = normal(8, 6), normal(8, 6, seed=1)
    sgd = stepped(weight, gradient, SGD, lr=0.01)
    torch.testing.assert_close(sgd, sgd_update(gradient, 0.01))
    adam = stepped(weight, gradient, Adam, lr=0.001)
    torch.testing.assert_close(adam, adam_update(gradient, 0.001), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_muon_moves_every_singular_value_of_the_gradient_alike(shape: tuple[int, int]) -> None:
    gradient, rate = normal(*shape), 0.02
    update = stepped(torch.zeros(shape).double(), gradient, Muon, lr=rate, weight_decay=0.0)
    scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
    s = torch.linalg.svdvals(update) / scale
    assert s.max() < 1.25  # Newton and Schulz's five steps, in bfloat16
    assert s.median() == pytest.approx(0.9, abs=0.25)
    exact = muon_update(gradient, rate)
    torch.testing.assert_close(torch.linalg.svdvals(exact) / scale, torch.ones_like(s))
    cosine = (update * exact).sum() / update.norm() / exact.norm()
    assert cosine > 0.97


def test_muon_of_torch_moves_by_the_newton_schulz_values() -> None:
    u, v = (torch.linalg.qr(normal(32, 32, seed=seed)).Q for seed in (1, 2))
    s = torch.logspace(0, -5, 32, dtype=torch.float64)  # from leading to lost
    gradient = u @ torch.diag(s) @ v.mT
    update = stepped(torch.zeros(32, 32).double(), gradient, Muon, lr=1.0, weight_decay=0.0)
    along = -(u * (update @ v)).sum(0)
    expected = newton_schulz(s / s.norm())
    torch.testing.assert_close(along, expected, rtol=0, atol=0.12)  # bfloat16 has 8 bits
    assert (expected[s > 1e-2] > 0.6).all()
    assert (expected[s < 1e-4] < 0.1).all()


def test_sgd_moves_by_the_gradients_own_singular_values_and_muon_does_not() -> None:
    u, v = (torch.linalg.qr(normal(8, 8, seed=seed)).Q for seed in (1, 2))
    s = torch.logspace(0, -3, 8, dtype=torch.float64)
    target, weight = u @ torch.diag(s) @ v.mT, 0.5 * u @ torch.diag(s) @ v.mT
    sgd = full_gradient_change(weight, target, 0.01)
    torch.testing.assert_close(sgd, 0.01 * 0.5 * s)  # relative to sigma: alike for all
    muon = singular_value_change(weight, muon_update(weight - target, 1e-4))
    torch.testing.assert_close(muon, torch.full_like(s, 1e-4))


def test_a_blind_update_moves_singular_values_at_random() -> None:
    rate, size = 1e-6, 48
    for update in (adam_update, muon_update):
        changes = []
        for seed in range(20):
            step = update(normal(size, size, seed=100 + seed), rate)
            changes.append(singular_value_change(normal(size, size, seed=seed), step))
        deviation = float(torch.stack(changes).std())
        assert deviation == pytest.approx(float(blind_change(step)), rel=0.1)
    assert float(blind_change(step)) == pytest.approx(rate / math.sqrt(size), rel=1e-6)


def test_adam_favours_the_leading_direction_of_a_large_matrix() -> None:
    u, v = normal(200, 1), normal(100, 1, seed=1)
    gradient = -u @ v.mT
    update = stepped(torch.zeros(200, 100).double(), gradient, Adam, lr=1e-3)
    along = (u.mT @ update @ v).item() / float(u.norm() * v.norm())
    assert along == pytest.approx(adam_leading_change((200, 100), 1e-3), rel=0.1)
    assert along > 50 * 1e-3
