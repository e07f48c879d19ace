"""Alerts: each trouble once, and none of what was so from the start."""

from typing import Any

from kappascope.monitor.alerts import Watch


def names(watch: Watch, step: int, **found: Any) -> list[str]:
    return [alert.name for alert in watch.reading(step, {"w": found})]


def test_a_row_that_dies_is_told_once_and_one_dead_at_the_start_never() -> None:
    watch, dead = Watch(), [(0.0, 1.0), (0.5, 1.0), (1.0, 0.0)]
    assert names(watch, 0, row_norms=[(0.0, 1.0), (0.5, 1.0), (1.0, 0.5)]) == []
    assert names(watch, 1, row_norms=dead) == ["dead-row"]
    assert names(watch, 2, row_norms=dead) == []
    born = Watch()
    assert names(born, 0, row_norms=dead) == names(born, 1, row_norms=dead) == []


def test_rank_collapse() -> None:
    watch = Watch()
    assert names(watch, 0, effective_rank=64.0, stable_rank=20.0) == []
    assert names(watch, 1, effective_rank=60.0, stable_rank=8.0) == []
    assert names(watch, 2, effective_rank=31.0, stable_rank=8.0) == ["rank-collapse"]


ROWS = [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0)]


def spectrum(first: float, others: float) -> dict[str, Any]:
    """The readings of a matrix with 20 other singular values of one size."""
    square = first**2 + 20 * others**2
    found = {"frobenius_norm": square**0.5, "stable_rank": square / first**2}
    return found | {"effective_rank": 21.0, "row_norms": ROWS}


def test_a_rank_collapses_late_and_fast_where_the_other_directions_fade() -> None:
    fast, slow, product = Watch(), Watch(), Watch()
    for i in range(60):
        assert names(slow, i, **spectrum(1.0, 0.99**i)) == []
        head = spectrum(1.0, 0.95**i)
        del head["row_norms"]
        assert names(product, i, **head) == []  # a head may specialize
    for i in range(40):
        assert names(fast, i, **spectrum(1.0, 1.0)) == []
    told = [names(fast, 40 + i, **spectrum(1.0, 0.95**i)) for i in range(60)]
    assert [name for each in told for name in each] == ["rank-collapse"]


def test_one_direction_is_left_where_the_others_have_faded() -> None:
    watch = Watch()
    assert names(watch, 0, **spectrum(1.0, 1.0)) == []
    assert names(watch, 1, **spectrum(1.0, 0.1)) == ["rank-collapse"]


def test_a_direction_that_is_learned_from_a_small_start_is_no_collapse() -> None:
    head, watch = Watch(), Watch()
    for i in range(60):
        assert names(head, i, **spectrum(0.3 + i, 0.3 + 0.01 * i)) == []
        # as every head of a GPT that begins with deviations of 0.02
        assert names(watch, i, frobenius_norm=0.1 * 1.15 ** min(i, 20), effective_rank=16.0) == []


def test_a_norm_that_runs_away_and_one_that_grows_from_zero() -> None:
    watch = Watch()
    found = [names(watch, i, frobenius_norm=2.0**i) for i in range(12)]
    assert [name for each in found for name in each] == ["norm-runaway"]
    adapter = Watch()  # begins at zero, and grows ever more slowly
    assert not any(names(adapter, i, frobenius_norm=float(i) ** 0.5) for i in range(200))


def test_some_dead_units_are_no_news_and_a_quarter_of_the_rows_is() -> None:
    facts = {"w": {"shape": [100, 30]}}
    watch = Watch()
    assert not list(watch.reading(0, {"w": {"dead_rows": 10.0}}, facts))
    (alert,) = watch.reading(1, {"w": {"dead_rows": 25.0}}, facts)
    assert alert.name == "dead-row" and "25 rows" in alert.text


def test_a_float32_bias_that_hears_nothing_is_no_news_and_one_of_16_bits_is() -> None:
    facts = {n: {"kind": "vector", "shape": [8], "dtype": n} for n in ("float32", "bfloat16")}
    watch, rows = Watch(), {name: {"swallowed": 0.9} for name in facts}
    told = [alert for step in (0, 1) for alert in watch.reading(step, rows, facts)]
    assert [(alert.name, alert.matrix) for alert in told] == [("swallowed", "bfloat16")]


def test_kappa_beyond_the_dtype_only_where_it_rose() -> None:
    watch = Watch()
    first = {"condition_number": 50.0, "condition_number_low": 45.0, "condition_number_high": 60.0}
    near = {"condition_number": 90.0, "condition_number_low": 70.0, "condition_number_high": 200.0}
    far = {"condition_number": 2e3, "condition_number_low": 1e3, "condition_number_high": 1e9}
    assert names(watch, 0, **first) == names(watch, 1, **near) == []
    assert names(watch, 2, **far) == ["unresolved"]


def test_one_alert_names_all_matrices_with_the_same_trouble() -> None:
    (alert,) = Watch().reading(7, {name: {"non_finite": 2.0} for name in "abcde"})
    assert alert.matrix == "a" and alert.text.startswith("a, b, c and 2 more: 2 entries are NaN")
    assert "(step 7)" in alert.text


def test_swallowed_updates_are_told_at_the_second_reading() -> None:
    watch = Watch()
    assert names(watch, 0, swallowed=0.9) == []
    assert names(watch, 1, swallowed=0.1) == []
    assert names(watch, 2, swallowed=0.9) == []
    assert names(watch, 3, swallowed=0.9) == ["swallowed"]
