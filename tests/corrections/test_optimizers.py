"""The optimizers that a correction or a monitor is handed, out of what trainers wrap them in."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from correction_examples import every
from kappascope.corrections import Correction, Multipliers, SigmaMaxPenalty, SpectralDecay
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


class SAM(Optimizer):
    """Two steps of its own, of which another optimizer takes the second."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(0.01 * p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()


@every
def test_what_steps_in_two_is_refused_and_the_optimizer_inside_is_corrected(correction) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = SAM(list(layer.parameters()))
    with pytest.raises(TypeError, match=r"SAM steps in two.*optimizer\.base_optimizer"):
        correction.attach(layer, optimizer)
    with correction.attach(layer, optimizer.base_optimizer) as handle:
        for _ in range(3):
            for step in (optimizer.first_step, optimizer.second_step):
                layer.zero_grad()
                layer(x).square().mean().backward()
                step()
        assert handle.metrics()["steps"] == 3 and not handle.refused


class Estimating(SGD):
    """It keeps an estimate, of which "lr" is a multiple, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=1.0)
        self.param_groups[0]["d"] = 1e-3


def idle_weight(correction: Correction, optimizer_of) -> torch.Tensor:
    """A weight after a step with no gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    with correction.attach(layer, optimizer := optimizer_of(layer.parameters())):
        layer.weight.grad = torch.zeros(4, 4)
        optimizer.step()
    return layer.weight.detach()


@pytest.mark.parametrize("correction", [SpectralDecay(every=1), SigmaMaxPenalty(), Multipliers()])
def test_an_estimated_learning_rate_is_followed(correction) -> None:
    found = idle_weight(correction, Estimating)
    assert torch.equal(found, idle_weight(correction, lambda p: SGD(p, lr=1e-3)))
    assert not torch.equal(found, idle_weight(correction, lambda p: SGD(p, lr=1.0)))
