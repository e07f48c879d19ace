"""Series and marks of a figure: what is counted, how it is coloured, and what keeps apart."""

import re

import numpy as np
import pytest
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


def inverted(channels: list[float]) -> list[float]:
    """What a dark page makes of a colour: invert(0.93) hue-rotate(180deg), as CSS defines them."""
    light = np.clip(0.93 - 0.86 * np.array(channels) / 255, 0, 1)
    turn = np.array(
        [[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]]
    )  # the matrix of a turn by 180 degrees
    return (255 * np.clip(turn @ light, 0, 1)).tolist()


LETTERS = {*COLOURS.values(), *drawing.SPARE, *drawing.SHADES, drawing.INK, drawing.FAINT}


@pytest.mark.parametrize("colour", sorted(LETTERS))
def test_letters_can_be_read_by_day_and_by_night(colour: str) -> None:
    text = drawing.readable(colour)
    channels = [float(int(text[i : i + 2], 16)) for i in (1, 3, 5)]
    paper = {"light": [0xFD, 0xFC, 0xF9], "dark": [0x17, 0x17, 0x16]}

    def contrast(ours: list[float], ground: list[float]) -> float:
        pair = sorted(drawing.luminance(each) for each in (ours, ground))
        return (pair[1] + 0.05) / (pair[0] + 0.05)

    assert contrast(channels, paper["light"]) >= 4.5
    assert contrast(inverted(channels), paper["dark"]) >= 4.5


def test_a_mark_tells_its_text_as_text() -> None:
    figure = drawing.blank(1, 1)
    drawing.tell(figure.axes[0], 1.0, 1.0, 'a "quoted" <b> & more')
    document = drawing.svg(figure)
    assert '<title>a "quoted" &lt;b&gt; &amp; more</title>' in document
    assert 'a "quoted" <b> & more' in drawing.alt_text(figure.axes[0])


def test_an_inlined_drawing_has_names_of_its_own_and_no_style() -> None:
    figure = drawing.blank(1, 1)
    figure.axes[0].plot([1, 2], [1, 2])
    page = drawing.inlined(drawing.svg(figure), "one")
    assert "style=" not in page and "<style" not in page
    assert set(re.findall(r'id="([^"]*)"', page)) >= set(re.findall(r'href="#([^"]*)"', page))
    assert all(name.startswith("one-") for name in re.findall(r'\bid="([^"]*)"', page))


def test_panels_of_one_quantity_share_its_axis() -> None:
    figure = drawing.blank(3, 3)
    for axes, end in zip(figure.axes, (10.0, 1000.0, 5.0), strict=True):
        axes.plot([1, 2], [1.0, end])
        axes.set(yscale="log")
        axes.set_ylabel("error" if end > 5 else "other")
    drawing.share_axes(figure.axes)
    first, second, third = (axes.get_ylim() for axes in figure.axes)
    assert first == second != third
    ticks = [len(axes.get_yticks()) for axes in figure.axes[:2]]
    assert ticks[0] == ticks[1] < 9
