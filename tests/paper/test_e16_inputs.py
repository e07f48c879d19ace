"""Experiment 16: inputs that are not white."""

import torch

from kappascope.lab.inputs import INPUTS
from kappascope.lab.tasks import Own, heterogeneous
from kappascope.paper.e16_inputs import by_direction


def test_experiment_16_takes_errors_apart_by_the_directions_of_the_inputs() -> None:
    target = heterogeneous(Own([0], "apart").random(), 8)
    source = INPUTS["power law"](8)
    found = list(by_direction(0 * target, target, source))
    assert [row["place"] for row in found] == list(range(8))
    for row in found:
        torch.testing.assert_close(row["value"], torch.ones(1, dtype=torch.float64))
    assert found[0]["variance"] > found[7]["variance"] > 0
