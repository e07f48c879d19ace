"""Measures of rows: which are chosen, what is said of those that are absent, what is computed."""

from typing import Any

import pytest

from kappascope.lab.measures import (
    compared,
    growth_with_size,
    improvement,
    medians_compared,
    printed,
    select,
    typical,
)
from kappascope.lab.table import Table

PAPER = Table.of(
    {"stream": "paper", "size": d, "seed": k, "component": "row_norms", "error": 1 / d + k}
    for d in (32, 64)
    for k in range(2)
)


def own(**columns: dict[str, float]) -> Table:
    """Seven own trials that have these errors, by value of a column."""
    [(column, errors)] = columns.items()
    return Table.of(
        {"stream": "own", "seed": k, column: value, "error": error}
        for k in range(7)
        for value, error in errors.items()
    )


@pytest.mark.parametrize(
    ("rows", "where", "absent"),
    [
        ([{"seed": 0, "error": 0.1}], {"seed": range(15)}, "seed 1 to 14"),
        (
            [{"stream": "own", "size": 32}],
            {"stream": "own", "size": 512},
            "stream own, size 512",
        ),
        ([{"size": 32}], {"optimizer": "sgd"}, "any optimizer"),
        (
            [{"size": 32, "depth": 1}, {"size": 64, "depth": 2}],
            {"size": (32, 64), "depth": 1},
            "size 64",
        ),
    ],
)
def test_rows_that_are_not_there_are_named(
    rows: list[dict[str, Any]], where: dict[str, Any], absent: str
) -> None:
    with pytest.raises(LookupError) as refused:
        select(Table.of(rows), **where)
    assert str(refused.value) == f"this run has no trials with {absent}"


def test_a_column_that_no_row_has_is_null_in_every_row() -> None:
    assert len(select(PAPER, size=32, intervention=None)) == 2


def test_the_id_of_a_figure_tells_how_it_is_measured() -> None:
    figure = printed("e1/row_norms/d=32/mean", "0.53", "4.1", seed=range(2))
    assert figure.what == "row norms, d=32, mean (4.1)"
    assert figure.measure(PAPER) == 0.53125
    assert printed("e1/row_norms/d=32/trials=1/mean", "0.03", "4.1").measure(PAPER) == 1 / 32


def test_a_setting_without_a_value_is_each_of_its_values() -> None:
    assert printed("e1/row_norms/d/std", "0.5-0.5", "4.1").measure(PAPER) == [0.5, 0.5]


def test_a_measure_takes_the_place_of_the_statistic() -> None:
    assert printed("e1/row_norms/d=64/how many", "2", "4.1", len).measure(PAPER) == 2
    with pytest.raises(ValueError, match="ends in none of mean, std"):
        printed("e1/row_norms/d=64/how many", "2", "4.1")


def test_the_typical_error_is_the_median_of_own_trials() -> None:
    rows = Table.of(
        {"stream": "own", "seed": k, "component": "row_norms", "error": 0.1 * k}
        for k in range(1, 8)
    )
    assert str(typical("row_norms")(rows)) == "median 0.4 [0.1, 0.7] (n = 7)"


def test_arms_are_compared_trial_by_trial() -> None:
    arms = {"component": "spectral_gap"}, {"component": "row_norms"}
    ratio = compared(*arms)(own(component={"row_norms": 0.1, "spectral_gap": 0.05}))
    assert (ratio.value, ratio.n, ratio.what) == (0.5, 7, "median paired ratio")


def test_an_improvement_is_what_is_taken_away_in_per_cent() -> None:
    measure = improvement({"strategy": "svd"}, {"strategy": "standard"})
    assert measure(own(strategy={"standard": 0.4, "svd": 0.1})).value == 75.0


def test_medians_of_other_trials_are_compared() -> None:
    rows = Table.of(
        {"stream": "own", "seed": k, "inputs": name, "error": scale * (k + 1)}
        for name, scale, count in (("white", 1.0, 9), ("digits", 3.0, 15))
        for k in range(count)
    )
    found = medians_compared({"inputs": "digits"}, {"inputs": "white"})(rows)
    assert (found.value, found.n) == (pytest.approx(24 / 5), 9)


def test_the_power_with_which_errors_grow_is_found() -> None:
    sizes = (32, 64, 128)
    rows = Table.of(
        {"stream": "own", "component": "row_norms", "size": d, "seed": k, "error": d**0.5}
        for d in sizes
        for k in range(9)
    )
    found = growth_with_size(stream="own", component="row_norms", size=sizes)(rows)
    assert found.value == pytest.approx(0.5)
