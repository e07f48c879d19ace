"""Parametrizations go without a trace, alone or among others."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD

from correction_examples import answers, every, inputs, perceptron, steps
from kappascope.corrections import (
    Multipliers,
)


@every
def test_copies_outlive_the_handle_and_it_them(correction) -> None:
    model = perceptron()
    handle = correction.attach(model, optimizer := SGD(model.parameters(), lr=0.05))
    steps(model, optimizer, 2)
    average, twin = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
    third, expected = copy.deepcopy(twin), answers(model)
    for layer in twin:
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    handle.close()
    for each in (model, average, twin, third, copy.deepcopy(third)):
        torch.testing.assert_close(answers(each), expected)
    for plain in (model, twin):
        assert torch.equal(answers(pickle.loads(pickle.dumps(plain))), answers(plain))
    with correction.attach(twin, other := SGD(twin.parameters(), lr=0.05)):
        steps(twin, other)
    torch.testing.assert_close(answers(third), expected)


def test_closing_leaves_what_others_parametrized_meanwhile() -> None:
    model = nn.Linear(4, 3)
    handle = Multipliers().attach(model, SGD(model.parameters()))
    parametrize.register_parametrization(model, "bias", nn.Tanh())
    twin, expected = copy.deepcopy(model), model(inputs(model))
    handle.close()
    assert dict(model.named_parameters()).keys() == {"weight", "parametrizations.bias.original"}
    assert torch.equal(model(inputs(model)), expected)
    assert torch.equal(twin(inputs(twin)), expected)
    again = Multipliers().attach(model, SGD(model.parameters()))
    assert torch.equal(twin(inputs(twin)), expected)
    again.close()
    assert torch.equal(model(inputs(model)), expected)
