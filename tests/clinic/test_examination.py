"""The row of one matrix: what follows from its numbers, and the spread of its norms."""

import torch

from kappascope.clinic.examination import Examination, Spread


def test_spread_of_nothing_but_zeros_has_no_variation() -> None:
    assert Spread.of(torch.zeros(3, dtype=torch.float64)) == Spread(0.0, 0.0, 0.0, None)


def test_a_spread_may_be_of_more_norms_than_torch_has_quantiles_of() -> None:
    assert Spread.of(torch.ones(1, dtype=torch.float64).expand(2**24 + 1)).median == 1.0


def test_chance_is_told_as_it_was_examined_and_not_worked_out_again() -> None:
    numbers = {"condition_number": 6.0, "null_condition_number": 2.0, "resolved": True}
    row = Examination("w", (640, 480), "float32", "ok", **numbers)
    assert row.ratio == 3.0
