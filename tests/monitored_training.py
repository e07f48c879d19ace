"""Small models and loops that are trained with and without a monitor."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention with fused projections, a perceptron, norms and dropout."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.fc2(self.dropout(torch.relu(self.fc1(self.norm(x)))))


def transformer(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, width), Block(width), Block(width), nn.Linear(width, 11))


def odd_model() -> nn.Module:
    """Dropout, batch norm, spectral norm, a parametrization, tied and frozen weights."""
    tied = nn.Linear(8, 8, bias=False)
    again = nn.Linear(8, 8, bias=False)
    again.weight = tied.weight
    frozen = nn.Linear(8, 8)
    frozen.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(11, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.2),
        tied,
        nn.ReLU(),
        again,
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        frozen,
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Linear(8, 11),
    )


def batches(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(12, 11, generator=random), torch.randint(11, (12,), generator=random)


def texts(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        text = torch.randint(11, (4, 7), generator=random)
        yield text[:, :-1], text[:, 1:]


def loss_of(model: nn.Module, given: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(given).flatten(0, -2), target.flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    each: Callable[[Tensor], object] = lambda loss: None,
) -> None:
    for given, target in data:
        optimizer.zero_grad()
        loss = loss_of(model, given, target)
        loss.backward()
        optimizer.step()
        each(loss)


def state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Any]:
    """Everything that a run can leave behind: weights, buffers, optimizers, random states."""
    found: list[Any] = [copy.deepcopy(model.state_dict())]
    found += [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    return [*found, torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(a, Tensor):
        equal = torch.equal(a, b) or (bool(a.isnan().any()) and str(a) == str(b))
        return a.dtype == b.dtype and equal
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
