"""The tensors of a reading: what the step asked for, and what of it is known afterwards."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.monitor.source import Captured, Rule, StepTensors
from kappascope.monitor.survey import watched


def around_step(layer: nn.Module, optimizer: Optimizer) -> StepTensors:
    """Take a step and hold what a monitor would."""
    survey = watched(layer)
    for p in layer.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.ndim))
    before = {name: p.detach().clone() for name, p in survey.parameters.items()}
    gradients = {name: p.grad.clone() for name, p in survey.parameters.items()}
    captured = Captured(list(survey.items), set(before), before, gradients)
    optimizer.step()
    group = optimizer.param_groups[0]
    rules = {
        name: Rule(type(optimizer).__name__, group, optimizer.state[p])
        for name, p in survey.parameters.items()
    }
    source = StepTensors(survey, captured, survey.parameters, rules)
    return source.on_host(survey.items, vectors=True)


@pytest.mark.parametrize(
    "kind",
    [
        SGD,
        partial(SGD, weight_decay=0.5),
        partial(SGD, weight_decay=0.5, momentum=0.9),
        partial(SGD, weight_decay=0.5, momentum=0.9, nesterov=True),
        AdamW,
    ],
)
def test_the_intended_step_and_the_decay_are_the_step_that_was_taken(kind: Any) -> None:
    layer = nn.Linear(5, 4)
    source = around_step(layer, kind(layer.parameters(), lr=0.1))
    for name in ("weight", "bias"):
        before, after = source.around(name, "before"), source.around(name, "after")
        step, decay = source.intended(name, lambda tensor: tensor), source.decay(name) or 0.0
        assert before is not None and after is not None and step is not None
        expected = before.double() * (1 - decay) + step
        torch.testing.assert_close(expected.float(), after, rtol=1e-5, atol=1e-6)


def test_vectors_and_units_are_known_by_name() -> None:
    layer = nn.Linear(5, 4)
    source = around_step(layer, SGD(layer.parameters(), lr=0.1))
    assert source.vectors() == ["bias"]
    unit = source.unit_of("weight")
    assert unit is not None and unit.parts[0].name == "weight" and source.unit_of("bias") is None
    assert source.cut(source.survey.items[0], "gradient")["weight"].shape == (4, 5)


@pytest.mark.parametrize(("rate", "rests"), [(0.0, True), (0.1, False)])
def test_nothing_moves_at_a_rate_of_zero(rate: float, rests: bool) -> None:
    layer = nn.Linear(5, 4)
    assert around_step(layer, SGD(layer.parameters(), lr=rate)).is_at_rest("weight") is rests
