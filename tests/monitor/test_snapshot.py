"""What steps change is put back: values, memory, attributes, containers and random states."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kappascope.monitor._snapshot import restored


def test_a_tensor_is_put_back_in_its_own_memory() -> None:
    weight = nn.Parameter(torch.tensor([1.0, float("nan"), -0.0]))
    weight.grad = gradient = torch.ones(3)
    memory, alias = weight.data_ptr(), weight.data
    with restored([weight]), torch.no_grad():
        weight.data = torch.zeros(3)
        alias.fill_(7.0)
        gradient.zero_()
        weight.grad = None
        weight.requires_grad_(requires_grad=False)
    assert weight.data_ptr() == memory and weight.requires_grad
    assert weight.detach().numpy().tobytes() == np.float32([1, np.nan, -0.0]).tobytes()
    assert weight.grad is gradient and gradient.tolist() == [1, 1, 1]


def test_an_expanded_tensor_is_put_back() -> None:
    base = torch.arange(3.0)
    with restored([base.expand(4, 3)]):
        base.zero_()
    assert base.tolist() == [0, 1, 2]


def test_what_hangs_on_an_optimizer_is_put_back() -> None:
    helper = SimpleNamespace(count=1, history=deque([1, 2], maxlen=2), table=np.ones(2), seen={1})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.helper = helper
    with restored(optimizer):
        helper.count += 1
        helper.history.append(3)
        helper.table[0] = 9
        helper.seen.add(2)
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.state[optimizer.param_groups[0]["params"][0]]["new"] = 1
        optimizer.added = True
    assert (helper.count, list(helper.history), helper.seen) == (1, [1, 2], {1})
    assert helper.table.tolist() == [1, 1] and helper.history.maxlen == 2
    assert optimizer.param_groups[0]["lr"] == 1e-3 and not optimizer.state
    assert not hasattr(optimizer, "added")


def test_a_module_is_entered_through_containers_alone() -> None:
    model = nn.BatchNorm1d(2)
    model.trainer = trainer = SimpleNamespace(step=1)
    with restored(model):
        trainer.step = 2
        model.running_mean.fill_(3.0)
        model.eval()
        model.count = 1
    assert trainer.step == 2  # its own affair
    assert model.running_mean.tolist() == [0, 0] and model.training and not hasattr(model, "count")


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand(()).item()],
)
def test_global_random_states_are_put_back(draw: Any) -> None:
    with restored():
        first = draw()
    assert draw() == first


def test_generators_of_an_optimizer_are_put_back() -> None:
    holder = SimpleNamespace(
        torch=torch.Generator().manual_seed(0),
        numpy=np.random.default_rng(0),
        legacy=np.random.RandomState(0),
        python=random.Random(0),
    )

    def drawn() -> tuple[float, ...]:
        numbers = (holder.numpy.random(), holder.legacy.rand(), holder.python.random())
        return *numbers, torch.rand((), generator=holder.torch).item()

    with restored(holder):
        first = drawn()
    assert drawn() == first


def test_it_is_put_back_after_an_error_too() -> None:
    weight = torch.ones(2)
    with pytest.raises(ZeroDivisionError), restored([weight]):
        weight.zero_()
        raise ZeroDivisionError
    assert weight.tolist() == [1, 1]
