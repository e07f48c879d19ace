"""Ghosts: trained as their weight is, on gradients without direction."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.lab.optimizers import Muon
from kappascope.monitor.ghosts import RECORDED, Ghosts, GhostSquares
from kappascope.monitor.monitor import Monitor

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.02, betas=(0.9, 0.95), weight_decay=0.5),
    "muon": partial(Muon, lr=0.05, weight_decay=0.2),
}


def weight_and_gradients(count: int = 12) -> tuple[nn.Parameter, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 5, generator=random))
    return weight, torch.randn(count, 4, 5, generator=random)


def train(weight: nn.Parameter, optimizer: Optimizer, gradients: torch.Tensor) -> None:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
class TestEveryOptimizer:
    """What holds for the ghosts of each."""

    def test_a_ghost_is_what_the_optimizer_makes_of_signed_gradients(
        self, make: Callable[..., Optimizer]
    ) -> None:
        weight, gradients = weight_and_gradients()
        alone = [nn.Parameter(weight.detach().clone()) for _ in range(3)]
        optimizer = make([weight])
        with Ghosts({"w": weight}, optimizer, count=3, seed=7) as ghosts:
            train(weight, optimizer, gradients)
        signs = torch.Generator().manual_seed(7)
        drawn = [2 * torch.randint(2, (3,), generator=signs) - 1 for _ in gradients]
        for k, other in enumerate(alone):
            train(
                other,
                make([other]),
                torch.stack([g * s[k] for g, s in zip(gradients, drawn, strict=True)]),
            )
            torch.testing.assert_close(ghosts.weights("w")[k], other.detach())

    def test_training_is_the_same_to_the_bit(self, make: Callable[..., Optimizer]) -> None:
        weight, gradients = weight_and_gradients()
        plain = nn.Parameter(weight.detach().clone())
        train(plain, make([plain]), gradients)
        optimizer = make([weight])
        before = torch.random.get_rng_state()
        with Ghosts({"w": weight}, optimizer):
            train(weight, optimizer, gradients)
        assert torch.equal(weight, plain)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_a_run_that_was_cut_goes_on_with_the_same_ghosts(
        self, make: Callable[..., Optimizer]
    ) -> None:
        weight, gradients = weight_and_gradients()
        optimizer = make([weight])
        with Ghosts({"w": weight}, optimizer) as ghosts:
            train(weight, optimizer, gradients[:5])
            saved = copy.deepcopy((ghosts.state_dict(), optimizer.state_dict(), weight.detach()))
            train(weight, optimizer, gradients[5:])
        again = nn.Parameter(saved[2])
        second = make([again])
        second.load_state_dict(saved[1])
        with Ghosts({"w": again}, second, seed=99) as resumed:
            resumed.load_state_dict(saved[0])
            train(again, second, gradients[5:])
        for one, other in zip(ghosts.weights("w"), resumed.weights("w"), strict=True):
            assert torch.equal(one, other)


def test_a_coherent_gradient_is_found_and_noise_is_not() -> None:
    random = torch.Generator().manual_seed(1)
    coherent, noisy = (nn.Parameter(0.1 * torch.randn(8, 8, generator=random)) for _ in range(2))
    optimizer = AdamW([coherent, noisy], lr=0.01, weight_decay=1.0)
    direction = torch.randn(8, 1, generator=random) @ torch.randn(1, 8, generator=random)
    with Ghosts({"coherent": coherent, "noisy": noisy}, optimizer, count=8) as ghosts:
        for _ in range(200):
            coherent.grad = direction + torch.randn(8, 8, generator=random)
            noisy.grad = torch.randn(8, 8, generator=random)
            optimizer.step()
    found = {c.part: c.p for c in ghosts.compared("coherent", coherent)}
    assert found["log_sigma_1"] < 0.01
    # shares of the norm are skewed, as Student's law is not: the parts on log scales are recorded
    chance = [c.p for c in ghosts.compared("noisy", noisy) if c.part in RECORDED]
    assert min(chance) * len(chance) > 0.05


def test_a_learning_rate_that_changes_is_followed() -> None:
    weight, gradients = weight_and_gradients()
    optimizer = SGD([weight], lr=0.1)
    with Ghosts({"w": weight}, optimizer, count=2) as ghosts:
        train(weight, optimizer, gradients[:1])
        optimizer.param_groups[0]["lr"] = 0.0
        before = ghosts.weights("w")[0].clone()
        train(weight, optimizer, gradients[1:])
    assert torch.equal(ghosts.weights("w")[0], before)


def test_a_scheduler_on_the_real_optimizer_steps_no_weight_twice() -> None:
    weight, gradients = weight_and_gradients()
    optimizer = SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    start = weight.detach().clone()
    with Ghosts({"w": weight}, optimizer, count=2):
        train(weight, optimizer, gradients[:1])
        schedule.step()
    torch.testing.assert_close(weight.detach(), start - 0.1 * gradients[0])


def test_nothing_is_left_when_closed() -> None:
    weight, _ = weight_and_gradients()
    optimizer = SGD([weight], lr=0.1)
    Ghosts({"w": weight}, optimizer).close()
    assert not optimizer._optimizer_step_post_hooks


def test_one_ghost_is_too_few() -> None:
    weight, _ = weight_and_gradients()
    with pytest.raises(ValueError, match="two ghosts or more"):
        Ghosts({"w": weight}, SGD([weight], lr=0.1), count=1)


def test_the_record_of_a_run_tells_what_ghosts_say(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    model = nn.Linear(6, 5, bias=False)
    optimizer = AdamW(model.parameters(), lr=0.02)
    target = torch.randn(6, 5, generator=random)
    with Monitor(tmp_path, every=20, ghosts=4).attach(model, optimizer) as monitor:
        for _ in range(60):
            x = torch.randn(16, 6, generator=random)
            optimizer.zero_grad()
            (model(x) - x @ target).square().mean().backward()
            optimizer.step()
    rows = [row for row in monitor.table().to_pylist() if row["quantity"] == "ghost_p_log_norm"]
    assert [row["step"] for row in rows] == [20, 40, 60]
    assert rows[-1]["value"] < 0.05
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("name", ["sgd", "adamw"])
class TestMeanSquaresOfAllGhosts:
    """What three numbers an entry tell, against every ghost that there can be."""

    def test_they_are_the_mean_over_every_pattern_of_signs(self, name: str) -> None:
        make, steps = OPTIMIZERS[name], 7
        weight, gradients = weight_and_gradients(steps)
        optimizer = make([weight])
        patterns = itertools.product((1.0, -1.0), repeat=steps)
        squares = []
        for signs in patterns:
            ghost = nn.Parameter(weight.detach().clone())
            train(ghost, make([ghost]), gradients * torch.tensor(signs)[:, None, None])
            squares.append(ghost.detach().double().square())
        with GhostSquares({"w": weight}, optimizer) as found:
            train(weight, optimizer, gradients)
        torch.testing.assert_close(found.of("w"), torch.stack(squares).mean(0).float())

    def test_a_resumed_run_has_the_same(self, name: str) -> None:
        weight, gradients = weight_and_gradients()
        optimizer = OPTIMIZERS[name]([weight])
        with GhostSquares({"w": weight}, optimizer) as whole:
            train(weight, optimizer, gradients[:5])
            with GhostSquares({"w": weight}, optimizer) as resumed:
                resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
                train(weight, optimizer, gradients[5:])
        assert torch.equal(whole.of("w"), resumed.of("w"))

    def test_a_rate_that_changes_is_followed(self, name: str) -> None:
        weight, gradients = weight_and_gradients(3)
        optimizer = OPTIMIZERS[name]([weight])
        with GhostSquares({"w": weight}, optimizer) as found:
            optimizer.param_groups[0]["lr"] = 0.0
            before = found.of("w")
            train(weight, optimizer, gradients)
        assert torch.equal(found.of("w"), before)


@pytest.mark.parametrize(
    "make",
    [
        OPTIMIZERS["muon"],
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(AdamW, lr=0.1, amsgrad=True),
        partial(torch.optim.Adam, lr=0.1),
    ],
    ids=["muon", "nesterov", "amsgrad", "adam"],
)
def test_mean_squares_of_other_optimizers_are_refused(make: Callable[..., Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="train Ghosts instead"):
        GhostSquares({"w": weight}, make([weight]))
