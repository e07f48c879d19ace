"""The loop does the paper's updates, and a trial is the same in any company."""

from itertools import repeat

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam

from kappascope.lab.optimizers import Descent
from kappascope.lab.tasks import Own, Paper, Regression, Teacher, heterogeneous, start
from kappascope.lab.training import (
    DeepLinear,
    Matrix,
    Perceptron,
    arrivals,
    floored,
    last,
    outcome,
    rows,
    together,
    train,
)
from kappascope.paper.e06_structures import Multiplied


def numpy_trial(k: int, size: int, steps: int) -> np.ndarray:
    """One trial of experiment 5 as the protocol words it: the oracle."""
    random = np.random.RandomState(42 + 100 * k)
    entries, z = random.randn(size, size), random.randn(size)
    target = np.sqrt(2 / size) * np.exp(0.5 * z)[:, None] * entries
    weight = 0.1 * np.sqrt(2 / size) * random.randn(size, size)
    for _ in range(steps):
        x, e = random.randn(64, size), random.randn(64, size)
        y = x @ target.T + 0.01 * e
        weight = weight - 0.01 * (x @ weight.T - y).T @ x / 64
    return weight


def test_the_loop_makes_the_protocols_updates() -> None:
    random = Paper([0, 2]).random()
    task = Regression(heterogeneous(random, 8))
    model = Matrix(start(random, 8))
    learned = last(train(model, Descent(model), task.batches(random), 50)).weight
    np.testing.assert_allclose(learned[0], numpy_trial(0, 8, 50), rtol=1e-10)
    np.testing.assert_allclose(learned[1], numpy_trial(2, 8, 50), rtol=1e-10)


def test_there_is_a_step_before_between_and_after_the_updates() -> None:
    model = Matrix(torch.zeros(1, 2, 2))
    batch = next(Regression(torch.ones(1, 2, 2)).batches(Own([0], "x").random(dtype=torch.float32)))
    steps = [
        (s.index, s.batch, s.weight.abs().sum() > 0)
        for s in train(model, Descent(model), repeat(batch), 2)
    ]
    assert [(index, seen is not None, bool(moved)) for index, seen, moved in steps] == [
        (0, True, False),
        (1, True, True),
        (2, False, True),
    ]


@pytest.mark.parametrize("size", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_a_trial_is_the_same_to_the_last_bit_in_any_company(size: int, kind: torch.dtype) -> None:
    def learned(seeds: list[int]) -> torch.Tensor:
        random = Own(seeds, "company").random(dtype=kind)
        task, model = Regression(heterogeneous(random, size)), Multiplied(start(random, size))
        return last(train(model, Descent(model), task.batches(random), 5)).weight

    assert torch.equal(learned(list(range(17)))[4], learned([4])[0])


class TestArrivals:
    """What was learned when the loss is the same for all."""

    def found(self, levels: list[float], steps: int = 400) -> tuple[torch.Tensor, dict]:
        random = Own(range(5), "arrivals").random()
        target = heterogeneous(random, 6)
        model, batches = Matrix(start(random, 6)), Regression(target).batches(random)
        loss = lambda weight: (weight - target).square().sum((-2, -1))  # noqa: E731
        return target, arrivals(train(model, Descent(model, 0.1), batches, steps), loss, levels)

    def test_have_the_loss_to_the_last_digits(self) -> None:
        target, found = self.found([0.5, 0.01])
        for level, arrival in found.items():
            loss = (arrival.weight - target).square().sum((-2, -1))
            torch.testing.assert_close(loss, torch.full_like(loss, level))
        assert (found[0.5].step < found[0.01].step).all()

    def test_are_absent_where_the_level_is_never_reached(self) -> None:
        _, found = self.found([1e-30], steps=20)
        assert found[1e-30].step.isnan().all() and found[1e-30].weight.isnan().all()

    def test_are_the_start_where_that_is_low_enough(self) -> None:
        _, found = self.found([1e30])
        assert (found[1e30].step == 0).all()


def test_arms_that_train_together_see_the_same_batches_and_do_not_mix() -> None:
    def learned(rate: float) -> torch.Tensor:
        random = Own(range(3), "arms").random()
        task, model = Regression(heterogeneous(random, 8)), Matrix(start(random, 8))
        return last(
            train(model, SGD(model.parameters(), lr=rate), task.batches(random), 300)
        ).weight

    random = Own(range(3), "arms").random()
    task, origin = Regression(heterogeneous(random, 8)), start(random, 8)

    def arm(rate: float):
        def run(batches):
            model = Matrix(origin)
            return train(model, SGD(model.parameters(), lr=rate), batches, 300)

        return run

    final = last(together({"slow": arm(0.01), "fast": arm(0.02)}, task.batches(random)))
    assert torch.equal(final["slow"].weight, learned(0.01))
    assert torch.equal(final["fast"].weight, learned(0.02))


def test_rows_hold_every_error_and_the_values_that_are_numbers() -> None:
    target = torch.diag_embed(torch.tensor([[4.0, 2.0, 1.0], [8.0, 2.0, 1.0]]))
    found = {row["component"]: row for row in rows(1.5 * target, target, size=3)}
    assert all(row["size"] == 3 and row["error"].shape == (2,) for row in found.values())
    assert found["condition_number"]["value"].tolist() == pytest.approx([4, 8])
    assert found["frobenius_norm"]["error"].tolist() == pytest.approx([0.5, 0.5])
    assert "value" not in found["row_norms"]


def test_an_outcome_adds_both_spectra_and_the_papers_kappa_its_floor() -> None:
    target = torch.diag_embed(torch.tensor([[4.0, 2.0, 0.0]], dtype=torch.float64))
    spectra = {row["which"]: row["values"] for row in outcome(2 * target, target) if "which" in row}
    assert spectra["learned"].tolist() == [[8, 4, 0]] and spectra["target"].tolist() == [[4, 2, 0]]
    (row,) = floored(2 * target, target)
    assert row["error"].item() == pytest.approx(1) and row["target"].item() == pytest.approx(4e10)


def test_a_product_of_layers_is_trained_as_autograd_would() -> None:
    random = Paper([1]).random()
    task = Regression(heterogeneous(random, 6))
    model = DeepLinear([start(random, 6) for _ in range(3)])
    batch = next(task.batches(random))
    batch.backward(model)
    gradients = [layer.grad for layer in model.layers]
    expected = torch.autograd.grad(batch.loss(model.product).sum(), list(model.layers))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_network_with_a_rectifier_learns_its_teacher() -> None:
    random = Paper([0]).random()
    teacher = Perceptron([heterogeneous(random, 8) for _ in range(2)])
    student = Perceptron([start(random, 8) for _ in range(2)])
    optimizer = Adam(student.parameters(), lr=0.01)
    last(train(student, optimizer, Teacher(teacher, 8).batches(random), 1000))
    x = random.normal(100, 8)
    error = (student(x) - teacher(x)).norm() / teacher(x).norm()
    assert error.item() < 0.2
