"""Experiment 18: a taxonomy of components."""

import pytest

from kappascope.lab.statistics import Estimate
from kappascope.paper.e18_taxonomy import learned


@pytest.mark.parametrize(
    ("low", "high", "name"),
    [
        (0.01, 0.04, "well"),
        (0.1, 0.2, "moderately"),
        (0.3, 9.0, "poorly"),
        (0.04, 0.06, "on the border"),
        (0.2, 0.3, "on the border"),
    ],
)
def test_experiment_18_classes_a_component_by_its_whole_interval(
    low: float, high: float, name: str
) -> None:
    assert learned(Estimate((low + high) / 2, low, high, 64, "median")) == name
