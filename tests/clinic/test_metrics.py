"""The numbers of the map: what is usual has no colour, and what is unusual has more of it."""

import math

import pytest
import torch

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.examination import Examination
from kappascope.clinic.metrics import METRICS, metric, usual_stable_rank


@pytest.mark.parametrize("shape", [(300, 300), (400, 100), (60, 500)])
def test_chance_is_usual_by_every_metric(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    (row,) = diagnose({"w": torch.randn(shape)}).matrices
    for one in METRICS:
        if one.key != "alpha":  # the tail of a random matrix is no power law
            assert (one.level_of(row) or 0) <= 1, one.key
    assert row.stable_rank == pytest.approx(usual_stable_rank(shape), rel=0.1)


@pytest.mark.parametrize("one", METRICS, ids=lambda one: one.key)
def test_what_is_not_known_has_no_level(one: object) -> None:
    row = Examination("w", (3, 3), "", "ok")
    assert one.level_of(row) is None and one.text(row) == "–"


def test_levels_grow_with_the_distance_from_usual() -> None:
    def levels(key: str, values: list[float]) -> list[int]:
        return [metric(key).level(value) for value in values]

    assert levels("chance", [1, 2, 1e4, 1e-4, math.inf]) == [0, 1, 5, 5, 5]
    assert levels("rank", [1.0, 0.9, 0.1]) == [0, 2, 5]
    assert levels("outliers", [0, 1, 1000]) == [0, 1, 5]
    assert levels("alpha", [2, 4, 6, 7, 30, 0.4]) == [0, 0, 0, 1, 5, 5]
    assert levels("moved", [0, 0.05, 3]) == [0, 2, 4]
