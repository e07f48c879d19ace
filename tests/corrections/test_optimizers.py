"""The optimizers that a correction or a monitor is handed, out of what trainers wrap them in."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from kappascope.corrections.optimizers import understood_optimizers, unwrapped_optimizer


def plain() -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_the_optimizer_inside_accelerates_wrapper_is_meant() -> None:
    accelerate = pytest.importorskip("accelerate")
    optimizer = plain()
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert wrapped is not optimizer and unwrapped_optimizer(wrapped) is optimizer


def test_the_optimizer_inside_lightnings_wrapper_is_meant() -> None:
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = plain()
    assert unwrapped_optimizer(optimizers.LightningOptimizer(optimizer)) is optimizer


def test_an_optimizer_that_steps_another_on_its_own_is_itself() -> None:
    class Lookahead(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    outer = Lookahead(plain())
    assert understood_optimizers([outer, plain()])[0] is outer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "got NoneType: a Trainer has none before create_optimizer"),
        ([], "got list of nothing"),
        ([1, "a"], "got list of int, str"),
        ((None,), "got tuple of NoneType: a Trainer has none"),
    ],
)
def test_anything_else_is_an_error_that_says_what_came(given: object, words: str) -> None:
    with pytest.raises(TypeError, match=words) as error:
        understood_optimizers(given)
    assert "\n" not in str(error.value)
