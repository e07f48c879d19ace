"""Update rules for stacks of small models and for networks.

The first dimension of a stack's parameters counts trials; every rule here treats each matrix of a
stack as it would treat that matrix alone.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from kappascope.matrix.orthogonal import orthogonalized

FACTOR_SHARE = 0.1  # of the learning rate, for factors of rows and columns: the paper's


class Optimizer(Protocol):
    """What a training loop asks of an optimizer; torch's have it too."""

    def step(self) -> object:
        """Move the parameters along their gradients."""


class Descent:
    """Plain gradient steps; factors of rows and columns take a tenth of them, as in the paper.

    It is torch's SGD without the bookkeeping, which costs more than a step of a small stack.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float = 0.01, weight_decay: float = 0.0
    ) -> None:
        self.parameters = tuple(model.parameters())
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter against its gradient."""
        for p in self.parameters:
            gradient = _gradient(p)
            if self.weight_decay:
                gradient = gradient.add(p, alpha=self.weight_decay)
            p.sub_(gradient, alpha=self.learning_rate * (1.0 if p.ndim > 2 else FACTOR_SHARE))


class MatrixAdam:
    """Adam with the second moment averaged over each matrix: one rate for all of its entries."""

    def __init__(self, model: nn.Module, learning_rate: float = 0.001) -> None:
        self.learning_rate, self.index = learning_rate, 0
        zero = torch.zeros(())
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]]
        self.moments = dict.fromkeys(model.parameters(), (zero, zero))

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter; the moments' weights are Adam's usual ones."""
        self.index += 1
        for p, (first, second) in self.moments.items():
            gradient = _gradient(p)
            square = gradient.square().mean((-2, -1), keepdim=True)
            m, v = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * square
            self.moments[p] = m, v
            rate = (v / (1 - 0.999**self.index)).sqrt() + 1e-8
            p.sub_(m / rate, alpha=self.learning_rate / (1 - 0.9**self.index))


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` in the weights' own type, for matrices and for stacks of them.

    Torch's takes single matrices only and iterates in bfloat16, whose products stop some
    processors. Arguments are torch's; with ``adjust_lr_fn="match_rms_adamw"`` a step has the size
    of AdamW's.

    >>> weight = nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.diag(torch.tensor([9.0, 1.0]))
    >>> Muon([weight], lr=1.0).step()
    >>> bool((weight.diagonal() < -0.6).all())
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "adjust_lr_fn": adjust_lr_fn,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)  # torch's Muon refuses stacks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no closure
        """Move every matrix by as much in every singular direction."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for parameters in by_shape.values():
                self._move(parameters, group)

    def _move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Move the parameters of one shape, whose updates are made orthogonal together."""
        momentum = group["momentum"]
        updates = orthogonalized(torch.stack([self._nesterov(p, momentum) for p in parameters]))
        rows, columns = parameters[0].shape[-2:]
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        size = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
        for p, update in zip(parameters, updates, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(update, alpha=group["lr"] * size)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's momentum: the average of gradients, looked up one step ahead."""
        gradient = _gradient(p)
        average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        average.lerp_(gradient, round(1 - momentum, 12))  # 0.05, not 0.050000000000000044
        return gradient.lerp(average, momentum)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("expected a gradient, found none; call backward before step")
    return parameter.grad
