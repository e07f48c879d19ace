"""Experiment 17: low rank, and what the data do not show."""

import pytest

from experiment_rows import numbers, run
from kappascope.lab.tasks import Own


@pytest.mark.parametrize("depth", [1, 3])
def test_experiment_17_fills_in_unseen_entries_only_in_depth(depth: int) -> None:
    found = run(17, Own([0, 1, 2], "fill"), size=16, data="entries")
    unseen = numbers(found, depth=depth, component="unseen")
    assert (unseen > 0.9).all() if depth == 1 else (unseen < 0.7).all()
    assert (numbers(found, depth=depth, component="seen") < 0.1).all()
