"""Forms of saved states: what fits is accepted, and every other value is named."""

from typing import Any

import pytest
import torch

from kappascope.corrections import _state

FORM = {
    "norm": torch.ones(3),
    "order": torch.arange(4),
    "wait": 0,
    "is_begun": False,
    "step": 0.0,
    "ends": {"values": torch.ones(2, dtype=torch.float64)},
}
GOOD = {
    "norm": torch.full((3,), 7.0),
    "order": torch.tensor([3, 0, 1, 2]),
    "wait": 4,
    "is_begun": True,
    "step": torch.tensor(2.0),
    "ends": {"values": torch.zeros(2, dtype=torch.float64)},
}


def test_a_state_of_the_form_is_accepted() -> None:
    _state.check_form("the memory", GOOD, FORM)
    without_ends = {key: value for key, value in GOOD.items() if key != "ends"}
    _state.check_form("the memory", without_ends, FORM, optional=["ends"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("norm", torch.ones(4), r"shape \(3,\)"),
        ("norm", torch.ones(3, dtype=torch.float64), "torch.float32"),
        ("norm", torch.ones(3, device="meta"), "on the meta device"),
        ("norm", torch.tensor([1.0, float("nan"), 1.0]), "finite"),
        ("norm", [1.0, 1.0, 1.0], "a list of 3"),
        ("order", torch.tensor([0, 1, 2, 4]), "from 0 to 3"),
        ("wait", -1, "a whole number"),
        ("wait", 1.5, "a whole number"),
        ("wait", True, "a whole number"),
        ("is_begun", 1, "True or False"),
        ("step", torch.tensor(-1.0), "at least 0"),
        ("step", 2.0, "a count in a tensor"),
        ("ends", {}, "without 'values'"),
        ("ends", {"values": GOOD["ends"]["values"], "more": 1}, "with 'more'"),
    ],
)
def test_every_other_value_is_refused_by_its_name(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        _state.check_form("the memory", GOOD | {key: value}, FORM)
    assert f"the memory['{key}']" in str(error.value) and "\n" not in str(error.value)


def test_a_copy_shares_no_memory_with_the_state() -> None:
    copy = _state.copied(GOOD)
    copy["ends"]["values"].fill_(9.0)
    copy["norm"].zero_()
    assert GOOD["ends"]["values"].eq(0).all() and GOOD["norm"].eq(7).all()
