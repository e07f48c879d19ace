"""Places among draws, p-values and the three answers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from kappascope.theory.beyond import (
    BEYOND,
    NOISE,
    UNDECIDED,
    PartComparison,
    answered,
    compared_with_draws,
    compared_with_few,
    place,
)


@pytest.mark.parametrize("values", [40, 3, 1], ids=["continuous", "three values", "one value"])
def test_places_are_uniform_however_many_values_are_equal(values: int) -> None:
    random = np.random.default_rng(0)
    samples = random.integers(values, size=(2000, 20)).astype(float)
    places = [place(row[0], row[1:], random) for row in samples]
    assert scipy.stats.kstest(places, "uniform").pvalue > 0.001


@given(st.floats(-10, 10), st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_a_place_lies_between_none_and_all(value: float, draws: list[float]) -> None:
    u = place(value, draws, np.random.default_rng(0))
    below = sum(d < value for d in draws)
    not_above = sum(d <= value for d in draws)
    assert below / (len(draws) + 1) <= u <= (not_above + 1) / (len(draws) + 1)


def test_few_draws_are_judged_as_students_law_says() -> None:
    ghosts = np.array([1.0, 2.0, 3.0, 4.0])
    found = compared_with_few("log_norm", 9.0, ghosts, "ghosts")
    spread = ghosts.std(ddof=1) * np.sqrt(1 + 1 / 4)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf((9.0 - 2.5) / spread, 3))


def test_ghosts_that_are_all_alike_leave_no_doubt() -> None:
    assert compared_with_few("effective_rank", 1.0, [1.0, 1.0, 1.0], "ghosts").p == 1.0
    assert compared_with_few("effective_rank", 0.5, [1.0, 1.0, 1.0], "ghosts").p < 1e-12


def example(value: float, spread: float, p: float) -> PartComparison:
    return PartComparison("log_norm", value, 0.0, -spread, spread, p, "a null")


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (example(1.0, 0.01, 0.001), BEYOND),
        (example(0.02, 0.01, 0.001), NOISE),  # surely another value, and as surely next to it
        (example(0.0, 0.5, 0.9), UNDECIDED),  # noise may be anywhere
        (example(0.05, 0.08, 0.001), UNDECIDED),
        (example(0.3, 0.3, 0.2), UNDECIDED),
    ],
)
def test_every_answer_has_its_rule(found: PartComparison, answer: str) -> None:
    assert answered([found])[0].answer == answer


def test_of_many_parts_of_noise_few_are_called_beyond_it() -> None:
    random = np.random.default_rng(1)
    falsely = 0
    for _ in range(100):
        draws = random.standard_normal((50, 200))
        found = [
            compared_with_draws("log_norm", row[0], row[1:], "a null", random) for row in draws
        ]
        falsely += any(each.answer == BEYOND for each in answered(found))
    assert falsely < 15  # 5 of 100 expected; above 14 by a chance of 1e-4
