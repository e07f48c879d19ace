"""Two seeds decide nothing."""

import math

from kappascope.lab.statistics import over_seeds


def test_two_seeds_decide_nothing() -> None:
    assert over_seeds([0.1, 0.2]).interval is None
    assert over_seeds([0.1, 0.2, math.nan, 0.3]).interval is None
