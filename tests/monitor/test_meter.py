"""The meter: what is measured of an item, and what is remembered between readings."""

from typing import Any

import pytest
import torch
from torch import nn

from kappascope.monitor.meter import Meter
from kappascope.monitor.source import Captured, StepTensors
from kappascope.monitor.survey import Survey, watched


def reading(
    survey: Survey, before: torch.Tensor | None = None, gradient: torch.Tensor | None = None
) -> StepTensors:
    """What is known after a step of the only layer of a model."""
    items = list(survey.items)
    captured = None
    if before is not None and gradient is not None:
        captured = Captured(items, {"weight"}, {"weight": before}, {"weight": gradient})
    rules: dict[str, Any] = {"weight": _NoRule()}
    source = StepTensors(survey, captured, survey.parameters, rules)
    return source.on_host(items, vectors=False)


class _NoRule:
    optimizer, group, state = "Unknown", {}, {}


def test_what_has_not_changed_is_not_measured_again() -> None:
    layer = nn.Linear(5, 4, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset(), 10), survey.items[0]
    assert meter.measured(item, reading(survey), 0)["weight"]["sigma_max"] > 0
    assert meter.measured(item, reading(survey), 1) == {}
    layer.weight.data[0, 0] += 1.0
    assert meter.measured(item, reading(survey), 2)["weight"]["sigma_max"] > 0


def test_a_row_is_dead_after_three_readings_without_a_gradient_that_it_once_had() -> None:
    layer = nn.Linear(5, 4, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"signal"}), 10), survey.items[0]
    counts = []
    for step in range(5):
        gradient = torch.ones(4, 5)
        gradient[0] = 0.0  # never had one
        gradient[1] = float(step == 0)  # had one once
        source = reading(survey, layer.weight.detach().clone(), gradient)
        counts.append(meter.measured(item, source, step)["weight"]["dead_rows"])
    assert counts == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_row_that_is_often_silent_is_dead_after_twice_its_longest_silence() -> None:
    layer = nn.Linear(5, 4, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"signal"}), 10), survey.items[0]
    counts = []
    for step, is_active in enumerate([1, 0, 0, 1, 0, 0, 0, 0, 0]):
        gradient = torch.ones(4, 5)
        gradient[1] = float(is_active)
        source = reading(survey, layer.weight.detach().clone(), gradient)
        counts.append(meter.measured(item, source, step)["weight"]["dead_rows"])
    assert counts == [0.0] * 7 + [1.0, 1.0]  # two at first, so four


def test_the_change_of_the_ends_is_that_of_the_singular_values() -> None:
    layer = nn.Linear(6, 6, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"update"}), 10), survey.items[0]
    gradient, values = torch.ones(6, 6), []
    for step in range(2):
        before = layer.weight.detach().clone()
        layer.weight.data.mul_(1.5)
        row = meter.measured(item, reading(survey, before, gradient), step)["weight"]
        values.append(torch.linalg.svdvals(layer.weight.detach().double()))
    changes = dict(row["sigma_change"])
    torch.testing.assert_close(changes[0.0], float(values[1][0] - values[0][0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        changes[1.0], float(values[1][-1] - values[0][-1]), rtol=1e-3, atol=0
    )


def test_a_change_that_is_far_smaller_than_the_value_is_foretold() -> None:
    """A step along the ends of a few roundings' size: what the old vectors say is the change."""
    layer = nn.Linear(40, 30, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"update"}), 10), survey.items[0]
    gradient = torch.ones(30, 40)
    meter.measured(item, reading(survey, layer.weight.detach().clone(), gradient), 0)
    before = layer.weight.detach().clone()
    u, _, vt = torch.linalg.svd(before.double(), full_matrices=False)
    layer.weight.data.copy_(before + (1e-6 * (u[:, :1] @ vt[:1])).float())
    row = meter.measured(item, reading(survey, before, gradient), 1)["weight"]
    moved = layer.weight.detach().double() - before.double()
    expected = float(u[:, 0] @ moved @ vt[0])
    assert dict(row["sigma_change_predicted"])[0.0] == pytest.approx(expected, rel=1e-3)


def test_ends_are_right_along_a_run_that_jumps_and_loses_its_rank() -> None:
    """Also where the quick way is refused: beyond what float32 resolves, and at rank deficiency."""
    layer = nn.Linear(340, 400, bias=False)
    survey, random = watched(layer), torch.Generator().manual_seed(0)
    meter, item = Meter(frozenset({"signal", "update"}), 10**6), survey.items[0]
    u, s, vt = torch.linalg.svd(layer.weight.detach().double(), full_matrices=False)
    log = torch.logspace(0, -6.5, 340).double()
    courses = [s, 1.001 * s, 1e4 * s, log, s, torch.where(torch.arange(340) < 300, s, 0.0), s]
    for step, values in enumerate(courses):
        before = layer.weight.detach().clone()
        layer.weight.data.copy_((u * values) @ vt)
        gradient = torch.randn(400, 340, generator=random)
        row = meter.measured(item, reading(survey, before, gradient), step)["weight"]
        held = layer.weight.detach().double()
        left, exact, right = torch.linalg.svd(held, full_matrices=False)
        places = {"sigma_max": 0, "sigma_2": 1, "sigma_min": -1}
        assert all(abs(row[name] / float(exact[i]) - 1) < 1e-6 for name, i in places.items())
        expected = left[:, 0] @ gradient.double() @ right[0]
        assert dict(row["signal"])[0.0] == pytest.approx(float(expected), rel=1e-3)


def test_what_is_forgotten_begins_anew() -> None:
    layer = nn.Linear(5, 4, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"signal"}), 10), survey.items[0]
    meter.measured(item, reading(survey), 0)
    assert meter.memory.keys() == {"weight"}
    meter.forget(["weight", "another"])
    assert not meter.memory
