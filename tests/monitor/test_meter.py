"""The meter: what is measured of an item, and what is remembered between readings."""

from typing import Any

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


def test_what_is_forgotten_begins_anew() -> None:
    layer = nn.Linear(5, 4, bias=False)
    survey = watched(layer)
    meter, item = Meter(frozenset({"signal"}), 10), survey.items[0]
    meter.measured(item, reading(survey), 0)
    assert meter.memory.keys() == {"weight"}
    meter.forget(["weight", "another"])
    assert not meter.memory
