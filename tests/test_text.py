"""Numbers and names as a reader wants them."""

import pytest

from kappascope.text import clean, first_few, number, plural, words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.5, "−0.500"),
        (999.6, "1,000"),
        (0.0009999, "0.00100"),
        (1e-300, "1.00×10⁻³⁰⁰"),
    ],
)
def test_numbers_have_sensible_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_name_keeps_what_is_not_known() -> None:
    assert words("adamw_svd_rate") == "AdamW SVD rate"
    assert words(1e-300) == "10⁻³⁰⁰"


def test_a_list_that_is_short_enough_is_complete() -> None:
    assert first_few(["a", "b", "c"]) == "a, b, c"
    assert first_few([]) == ""


def test_none_are_several() -> None:
    assert plural(0, "matrix", "matrices") == "0 matrices"


def test_no_character_can_move_the_cursor_or_turn_the_direction() -> None:
    assert clean("a\n\x1b[2J\u202eb") == "a??[2J?b"
