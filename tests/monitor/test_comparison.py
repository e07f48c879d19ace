"""One step beside the step that was expected: what rounding explains, and what came in words."""

import pytest
import torch
from torch import Tensor

from kappascope.monitor._comparison import Comparison, cosine, decay_text, flatness
from kappascope.monitor.promises import Candidate
from kappascope.text import number

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def after(weight: Tensor, step: Tensor, decay: float = 0.0) -> Comparison:
    """A step that was taken in the weight's own type."""
    moved = weight * (1 - decay) + step.to(weight)
    came = moved.double() - weight.double()
    return Comparison(weight, step.to(weight), came, -decay * weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_rounding_explains_an_honest_step_and_no_step_twice_as_long(dtype, decay) -> None:
    weight, step = drawn(0, 40, 30).to(dtype), 0.1 * drawn(1, 40, 30)
    seen = after(weight, step, decay)
    expected = Candidate(step - decay * weight.double())
    error, allowed = seen.distance(expected, step.to(dtype) - decay * weight)
    assert error <= allowed
    doubled = after(weight, 2 * step, decay)
    error, allowed = doubled.distance(expected, step.to(dtype) - decay * weight)
    assert error > allowed


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda step, weight: step * 0, "no move"),
        (lambda step, weight: step * 2, f"{number(2.0)} times that step"),
        (
            lambda step, weight: step - 0.05 * weight,
            f"{number(0.05)} of the weight more decay",
        ),
        (lambda step, weight: step / 0, "NaN or Inf"),
    ],
)
def test_what_came_is_said_in_words(step, words: str) -> None:
    weight, expected = drawn(0, 8, 6), 0.1 * drawn(1, 8, 6)
    seen = after(weight, step(expected, weight))
    assert seen.described(expected) == words


def test_only_an_orthogonal_matrix_is_flat() -> None:
    orthogonal = torch.linalg.qr(drawn(2, 6, 6)).Q
    assert flatness(3 * orthogonal) == pytest.approx(1.0)
    assert flatness(drawn(3, 6, 1) @ drawn(4, 1, 6)) == pytest.approx(6**-0.5)


def test_a_cosine_with_nothing_is_zero_and_a_decay_of_rounding_is_none() -> None:
    a = drawn(5, 3, 3)
    assert cosine(a, -2 * a) == pytest.approx(-1.0) and cosine(a, 0 * a) == 0.0
    assert decay_text(1e-6, 0.1) == f"no decay, not by {number(0.1)}"
