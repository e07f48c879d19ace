"""Series and marks of a figure: what is counted, how it is coloured, and what keeps apart."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.test_figures import NOTHING, row

from kappascope.lab import drawing
from kappascope.lab.drawing import COLOURS, Series, with_common_zero
from kappascope.lab.figures import error_lines, sheet, strips
from kappascope.lab.table import Table

GAP = 0.078  # between two labels at the ends of lines, in heights of a panel


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).map(sorted))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    heights = drawing._apart(wanted, GAP)
    assert (np.diff(heights) > GAP - 1e-9).all()
    assert np.isclose(np.mean(heights), np.mean(wanted))


def test_labels_that_do_not_touch_stay_where_they_are() -> None:
    np.testing.assert_allclose(drawing._apart([0.1, 0.5, 0.9], GAP), [0.1, 0.5, 0.9])


def test_a_long_line_is_thinned_to_a_hundred_points_with_both_ends() -> None:
    places, values = drawing.thinned(np.arange(1.0, 5001.0))
    assert len(places) <= 100 and (places[0], places[-1]) == (1, 5000)
    np.testing.assert_array_equal(places, values)


def test_a_tail_is_kept_trial_by_trial() -> None:
    errors, shares = drawing.survival(np.arange(1.0, 2001.0))
    assert list(errors[-100:]) == list(np.arange(1901.0, 2001.0))
    assert (np.diff(shares) < 0).all() and np.isclose(shares[-1], 1 / 2000)


def test_values_that_are_not_finite_are_counted() -> None:
    rows = Table.of(row(k, e) for k, e in enumerate([1.0, np.nan, np.inf, 2.0]))
    figure = sheet(error_lines("row_norms", by="size"))(rows, NOTHING)
    assert "n = 2, 2 not finite" in figure.get_supxlabel()


def test_a_ratio_is_taken_trial_by_trial() -> None:
    rows = Table.of(
        row(k, error, component=name)
        for k in range(3)
        for name, error in (("condition_number", 6.0 * (k + 1)), ("row_norms", k + 1.0))
    )
    series = Series.of(rows, "condition_number / row_norms", "size")
    assert series.trials.tolist() == [[6.0], [6.0], [6.0]]


def test_levels_stand_in_the_order_asked_for() -> None:
    rows = Table.of(row(k, 1.0, strategy=s) for s in ("a", "b", "c") for k in range(3))
    [axes] = sheet(strips("row_norms", by="strategy", strategy=("c", "a")))(rows, NOTHING).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a"]


def test_components_have_colours_of_their_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_series_on_one_axis_share_the_mark_that_stands_for_zero() -> None:
    rows = Table.of(row(k, error) for k, error in enumerate([0.0, 0.02, 3.0]))
    [series] = with_common_zero([Series.of(rows, "row_norms", "size")])
    assert series.least == 0.01 and series.shown.min() == 0.01


def test_a_level_without_a_finite_trial_has_no_mean_beside_levels_that_have() -> None:
    series = Series("row_norms", "#000000", (32, 64), np.array([[1.0, np.nan], [3.0, np.nan]]))
    np.testing.assert_array_equal(series.means, [2.0, np.nan])
