"""Optimizers of stacks make the steps of torch's own, matrix by matrix."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from kappascope.lab.optimizers import FACTOR_SHARE, Descent, MatrixAdam, Muon
from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import Matrix, last, train
from kappascope.paper.e06_structures import Multiplied


def sgd(model: nn.Module, learning_rate: float, weight_decay: float) -> SGD:
    """The steps of Descent by torch's own optimizer."""
    groups = [
        {"params": [p], "lr": learning_rate * (1 if p.ndim > 2 else FACTOR_SHARE)}
        for p in model.parameters()
    ]
    return SGD(groups, weight_decay=weight_decay)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Matrix, Multiplied])
def test_descent_makes_the_steps_of_torchs_sgd(kind: type[Matrix], decay: float) -> None:
    def learned(optimizer) -> torch.Tensor:
        random = Own(range(2), "sgd").random()
        task, model = Regression(heterogeneous(random, 8)), kind(start(random, 8))
        return last(train(model, optimizer(model, 0.02, decay), task.batches(random), 20)).weight

    torch.testing.assert_close(learned(Descent), learned(sgd), rtol=1e-12, atol=0)


def test_factors_of_rows_and_columns_take_a_tenth_of_the_step() -> None:
    model = Multiplied(torch.ones(1, 2, 3))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    Descent(model, learning_rate=0.5).step()
    assert [p.unique().item() for p in model.parameters()] == pytest.approx([0.5, 0.95, 0.95])


def test_adam_with_one_rate_is_adam_where_a_matrix_has_one_entry() -> None:
    def learned(optimizer) -> torch.Tensor:
        random = Own(range(3), "adam").random()
        task, model = Regression(random.normal(1, 1)), Matrix(random.normal(1, 1))
        return last(train(model, optimizer(model), task.batches(random), 20)).weight

    theirs = learned(lambda model: Adam(model.parameters(), lr=0.001))
    torch.testing.assert_close(learned(MatrixAdam), theirs)


@pytest.mark.parametrize("shape", [(8, 8), (12, 6), (6, 12)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_makes_the_steps_of_torchs_muon(shape: tuple[int, int], decay: float) -> None:
    torch.manual_seed(0)
    origin, gradients = torch.randn(3, *shape), torch.randn(10, 3, *shape)
    stack = nn.ParameterList([nn.Parameter(origin.clone())])
    ours = Muon(stack.parameters(), lr=0.02, weight_decay=decay)
    singles = [nn.Parameter(matrix.clone()) for matrix in origin]
    theirs = torch.optim.Muon(singles, lr=0.02, weight_decay=decay)
    for gradient in gradients:
        stack[0].grad = gradient.clone()
        for single, part in zip(singles, gradient, strict=True):
            single.grad = part.clone()
        ours.step()
        theirs.step()
    moved = (stack[0] - origin).norm().item()
    # torch iterates in bfloat16, of three digits
    assert (stack[0] - torch.stack(list(singles))).norm().item() < 0.02 * moved


def test_muon_moves_a_matrix_of_a_stack_as_it_would_alone() -> None:
    random = torch.Generator().manual_seed(0)
    origin, gradient = torch.randn(2, 3, 9, 6, generator=random, dtype=torch.float64)
    stack, alone = nn.Parameter(origin.clone()), nn.Parameter(origin[1].clone())
    optimizers = Muon([stack], lr=0.1, weight_decay=0.0), Muon([alone], lr=0.1, weight_decay=0.0)
    for step in range(1, 4):
        stack.grad, alone.grad = gradient / step, gradient[1] / step
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack[1], alone)


def test_muons_averages_weigh_as_written() -> None:
    """The complement of 0.95 is 0.05, not what a subtraction of floats leaves."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    weight.grad = torch.eye(2, dtype=torch.float64)
    optimizer = Muon([weight])
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"][0, 0].item() == 0.05


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="call backward before step"):
        Muon([nn.Parameter(torch.zeros(2, 2))]).step()
