"""Experiment 7: depth (Section 4.7)."""

import itertools

import pytest
import torch

from experiment_rows import EXPERIMENTS, mean, numbers, prints, run
from kappascope.lab.tasks import Own, Paper
from kappascope.paper.e07_depth import DEPTHS, LEVEL, in_order, unit_rows


@pytest.mark.parametrize(
    ("depth", "error", "kappa", "overall"),
    [(1, "0.24", 1510, "0.05"), (2, "653", 242_566, "0.22"), (3, "13167", 4.8e6, "0.26")],
)
def test_experiment_7_prints_its_digits(depth: int, error: str, kappa: float, overall: str) -> None:
    found = run(7, Paper(range(10)), network="linear", depth=depth, size=64)
    name = "floored_condition_number"
    assert prints(mean(found, layer=0, component=name), error)
    assert mean(found, "value", layer=0, component=name) == pytest.approx(kappa, rel=4e-3)
    assert prints(mean(found, layer=0, component="overall_matrix"), overall)


def test_experiment_7_prints_its_digits_with_a_rectifier() -> None:
    found = run(7, Paper(range(10)), network="relu", depth=2, size=64)
    first, second = ({"layer": i, "component": "condition_number"} for i in (1, 2))
    assert prints(mean(found, "value", **first), "2719")
    assert prints(mean(found, "value", **second), "6060")
    assert prints((mean(found, **first) + mean(found, **second)) / 2, "9.1")
    assert prints((mean(found, "target", **first) + mean(found, "target", **second)) / 2, "1136")
    assert prints(mean(found, layer=0, component="overall_matrix"), "0.57")


def test_experiment_7_intervenes_on_the_condition_numbers_of_the_layers() -> None:
    setting = {"network": "linear", "depth": 3, "size": 8, "intervention": "orthogonal start"}
    rows = EXPERIMENTS[7].trials(Own([0, 1], "turned"), **setting)
    first = list(itertools.islice((row for row in rows if row["layer"] > 0), 3))
    for row in first:
        assert row["epoch"] == 0
        torch.testing.assert_close(row["value"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("depth", DEPTHS)
def test_experiment_7_looks_at_products_before_training_and_at_one_error(depth: int) -> None:
    about = {"network": "linear", "depth": depth, "size": 12, "intervention": "equal rate"}
    found = run(7, Own(range(2), "equal rate"), **about)
    start = numbers(found, component="overall_matrix", epoch=0)
    torch.testing.assert_close(start, torch.ones(2).double(), atol=0.1, rtol=0)
    assert (numbers(found, component="overall_matrix", epoch=300) < 0.9 * start).all()
    arrived = numbers(found, component="overall_matrix", level=LEVEL)
    torch.testing.assert_close(arrived, torch.full((2,), LEVEL).double(), equal_nan=True)
    assert not arrived.isnan().any()


def test_hidden_units_may_be_scaled_and_ordered_at_will() -> None:
    random = Own([0, 1], "gauge").random()
    target = unit_rows(random.normal(5, 5), random.normal(5, 5))
    scale, order = random.normal(5).exp(), torch.tensor([2, 0, 4, 1, 3])
    first = (scale[..., None] * target[0])[:, order]
    second = (target[1] / scale[..., None, :])[..., order]
    for ours, theirs in zip(in_order(unit_rows(first, second), target), target, strict=True):
        torch.testing.assert_close(ours, theirs)
