"""The ring of the last norms."""

import pytest
import torch

from kappascope.monitor.ring import Ring, first_to_move


def test_it_forgets_and_has_no_norm_of_what_came_later() -> None:
    ring = Ring(3)
    for step in range(1, 6):
        names = ("a", "b") if step > 4 else ("a",)
        ring.add(step, {name: torch.full((4,), float(step)) for name in names})
    entry = ring.entry(5)
    assert entry["steps"] == [3, 4, 5] and entry["norms"]["a"] == [6.0, 8.0, 10.0]
    assert entry["norms"]["b"] == [None, None, 10.0]


def test_norms_of_16_bit_weights_are_not_rounded_to_16_bits() -> None:
    ring = Ring(1)
    ring.add(1, {"w": torch.full((1000, 1000), 1.0).bfloat16()})
    assert ring.entry(1)["norms"]["w"] == [1000.0]


def test_norms_of_float64_weights_beside_others() -> None:
    ring = Ring(1)
    ring.add(1, {"w": torch.full((4,), 0.1).double(), "v": torch.full((9,), 1.0).bfloat16()})
    assert ring.entry(1)["norms"] == {"w": [pytest.approx(0.2)], "v": [3.0]}


def test_of_several_optimizers_it_has_every_step_once_and_a_pause_is_no_move() -> None:
    ring = Ring(60)
    for step in range(30):
        ring.add(step, {"w": _with_gradient(9.0 if step >= 25 else 1.0)})
        if step % 3 == 0:
            ring.add(step, {"v": _with_gradient(1.0)})
    entry = ring.entry(29)
    assert entry["steps"] == list(range(30)) and entry["norms"]["v"][:4] == [2.0, None, None, 2.0]
    assert entry["text"] == "the gradient of w left its usual size first: at step 25"


def _with_gradient(size: float) -> torch.Tensor:
    tensor = torch.ones(4, requires_grad=True)
    tensor.grad = torch.full((4,), size)
    return tensor


def test_nothing_moved_where_nothing_left_its_usual_size() -> None:
    steady = {"w": [1.0, 1.5, 0.8] * 10}
    assert first_to_move(list(range(30)), steady, {}) == ""


def test_gradients_that_are_not_finite_have_moved() -> None:
    series = {"w": [1.0] * 10 + [float("nan")] * 2, "v": [1.0] * 12}
    told = first_to_move(list(range(12)), series, {})
    assert told == "the gradient of w left its usual size first: at step 10"
