"""Names are meant literally, patterns mean whatever fits."""

from __future__ import annotations

import re
from functools import partial

import pytest
from torch import nn

from correction_examples import Tied, perceptron
from kappascope.corrections.selection import MeantWeights
from kappascope.model.weights import live_weights


def selected(where, model: nn.Module) -> list[str]:
    weights = live_weights(model)
    names = [name for weight in weights for name, *_ in weight.uses]
    found = MeantWeights.of(where, names)
    return [weight.name for weight in weights if found.uses(weight) is not None]


@pytest.mark.parametrize(
    "where",
    [
        "0.weight",
        "0.*",
        re.compile("^0"),
        lambda name: name[0] == "0",
        lambda name, module: module.in_features == 4,
        lambda name, start="0": name.startswith(start),
        partial(lambda start, name: name.startswith(start), "0"),
        "0.weight".__eq__,
        ["0.weight", re.compile("never|0")],
        {"0.weight"},
    ],
)
def test_every_way_to_mean_a_weight(where) -> None:
    assert selected(where, perceptron()) == ["0.weight"]


def test_a_name_is_told_from_a_pattern() -> None:
    model = perceptron()
    weight = live_weights(model)[0]
    names = ["0.weight", "2.weight"]
    assert MeantWeights.of("0.weight", names).names_it(weight)
    assert not MeantWeights.of("0.*", names).names_it(weight)


def test_a_tied_weight_comes_with_the_uses_that_are_meant() -> None:
    weights = live_weights(Tied())
    names = [name for weight in weights for name, *_ in weight.uses]
    found = [MeantWeights.of("head.*", names).uses(weight) for weight in weights]
    assert [each.name for each in found if each is not None] == ["head.weight"]
