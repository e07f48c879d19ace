"""The one training loop, and the rows that describe what was learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD

from kappascope.components import Components, errors
from kappascope.corrections import floored_condition_number
from kappascope.tasks import Batch

T = TypeVar("T")
K = TypeVar("K")
B = TypeVar("B", bound=Batch)

Moments = tuple[Tensor, Tensor]

STEPS = 200  # the paper's default


@dataclass(frozen=True)
class Step:
    """A model after ``index`` updates, and the batch that the next update will see."""

    index: int
    model: nn.Module
    batch: Batch | None

    @property
    def weight(self) -> Tensor:
        """The matrices that the model amounts to."""
        weight: Tensor = self.model()
        return weight.detach()


class Optimizer(Protocol):
    """What the loop asks of an optimizer; torch's have it too."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Move the parameters along theirs."""


class Descent:
    """Plain gradient steps; factors of rows and columns take a tenth of them, as in the paper.

    It is torch's SGD without the bookkeeping, which costs more than a step of a small stack.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float = 0.01, weight_decay: float = 0.0
    ) -> None:
        self.parameters = tuple(model.parameters())
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter against its gradient."""
        for p in self.parameters:
            gradient = _gradient(p)
            if self.weight_decay:
                gradient = gradient.add(p, alpha=self.weight_decay)
            p.sub_(gradient, alpha=self.learning_rate * (1.0 if p.ndim > 2 else 0.1))


def sgd(model: nn.Module, learning_rate: float = 0.01, weight_decay: float = 0.0) -> SGD:
    """The steps of :class:`Descent` by torch's own optimizer, with its schedulers and hooks."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 2], "lr": learning_rate},
        {"params": [p for p in parameters if p.ndim == 2], "lr": 0.1 * learning_rate},
    ]
    return SGD([group for group in groups if group["params"]], weight_decay=weight_decay)


class MatrixAdam:
    """Adam with the second moment averaged over each matrix: one rate for all of its entries."""

    def __init__(self, model: nn.Module, learning_rate: float = 0.001) -> None:
        self.learning_rate, self.index = learning_rate, 0
        zero = torch.zeros(())
        self.moments: dict[nn.Parameter, Moments] = dict.fromkeys(model.parameters(), (zero, zero))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.moments:
            p.grad = None

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


def newton_schulz(stack: Tensor, steps: int = 5) -> Tensor:
    """Nearly the same singular vectors with singular values near one, by products alone.

    The quintic and its coefficients are Jordan's (2024), as in ``torch.optim.Muon``: they leave
    singular values between about 0.7 and 1.2.

    >>> near = newton_schulz(torch.diag(torch.tensor([9.0, 3.0, 1.0])))
    >>> bool(((near.diagonal() - 1).abs() < 0.35).all())
    True
    """
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if wide is stack else x.mT


class Muon:
    """Nesterov's momentum, made orthogonal before each step: ``torch.optim.Muon`` for stacks.

    Torch's takes single matrices only and iterates in bfloat16; this one in the weight's type.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> layer.weight.grad = torch.diag(torch.tensor([9.0, 1.0]))
    >>> before = layer.weight.detach().clone()
    >>> Muon(layer, learning_rate=1.0).step()
    >>> bool(((before - layer.weight).diagonal() > 0.6).all())
    True
    """

    def __init__(
        self, model: nn.Module, learning_rate: float = 0.02, weight_decay: float = 0.0
    ) -> None:
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.momenta = {p: torch.zeros_like(p) for p in model.parameters()}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.momenta:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter by as much in every singular direction."""
        for p, momentum in self.momenta.items():
            gradient = _gradient(p)
            momentum.lerp_(gradient, 0.05)
            tall = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
            p.mul_(1 - self.learning_rate * self.weight_decay)
            update = newton_schulz(torch.lerp(gradient, momentum, 0.95))
            p.sub_(update, alpha=self.learning_rate * tall)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("expected a gradient, found none; call backward before step")
    return parameter.grad


def train(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], steps: int = STEPS
) -> Iterator[Step]:
    """Update the model ``steps`` times; the loop around it is the reader's.

    Steps come before, between and after the updates: ``steps + 1`` of them.
    """
    for index, batch in enumerate(islice(batches, steps)):
        yield Step(index, model, batch)
        optimizer.zero_grad()
        batch.backward(model)
        optimizer.step()
    yield Step(steps, model, None)


def descend(
    model: nn.Module,
    batches: Iterable[Batch],
    learning_rate: float = 0.01,
    weight_decay: float = 0.0,
    steps: int = STEPS,
) -> Iterator[Step]:
    """Train by plain gradient steps."""
    return train(model, Descent(model, learning_rate, weight_decay), batches, steps)


def together(
    arms: Mapping[K, Callable[[Iterator[B]], Iterator[Step]]], batches: Iterator[B]
) -> Iterator[dict[K, Step]]:
    """Train several arms side by side on the same batches."""
    shared = tee(batches, len(arms))
    runs = [arm(own) for arm, own in zip(arms.values(), shared, strict=True)]
    return (dict(zip(arms, steps, strict=True)) for steps in zip(*runs, strict=True))


@dataclass(frozen=True)
class Arrival:
    """Where a loss first came down to a level, trial by trial: NaN where it never did."""

    weight: Tensor
    step: Tensor


def arrivals(
    steps: Iterable[Step], loss: Callable[[Tensor], Tensor], levels: Sequence[float]
) -> dict[float, Arrival]:
    """What was learned when a quadratic loss of the weight has come down to each level.

    The step that crosses a level is shortened to end on it, so that all who arrive have the same
    loss; training ends when every trial has arrived at every level.

    >>> from kappascope.networks import Matrix
    >>> models = (Matrix(torch.full((1, 1, 1), weight)) for weight in (2.0, 1.0, 0.0))
    >>> steps = (Step(index, model, None) for index, model in enumerate(models))
    >>> found = arrivals(steps, lambda weight: weight.square().sum((-2, -1)), [0.25])[0.25]
    >>> found.weight.item(), found.step.item()
    (0.5, 2.0)
    """
    found: dict[float, Arrival] = {}
    before: Tensor | None = None
    for step in steps:
        weight = step.weight.clone()
        now = loss(weight)
        if before is None:
            before, never = weight, torch.full_like(now, torch.nan)
            found = {x: Arrival(torch.full_like(weight, torch.nan), never.clone()) for x in levels}
        for level, arrival in found.items():
            due = arrival.step.isnan() & (now <= level)
            if due.any():
                arrival.weight[due] = _crossing(before, weight, loss, level)[due]
                arrival.step[due] = step.index
        if not any(arrival.step.isnan().any() for arrival in found.values()):
            break
        before = weight
    return found


def _crossing(
    before: Tensor, after: Tensor, loss: Callable[[Tensor], Tensor], level: float
) -> Tensor:
    """The point between two weights at which a quadratic loss has a value."""
    start, half, end = (loss(torch.lerp(before, after, part)) for part in (0.0, 0.5, 1.0))
    a, b = 2 * (start - 2 * half + end), 4 * half - 3 * start - end  # start + b x + a x^2
    root = (b.square() - 4 * a * (start - level)).clamp(min=0).sqrt()
    part = 2 * (start - level) / (root - b)  # the smaller root; safe where the loss is straight
    return torch.lerp(before, after, part.clamp(0, 1)[:, None, None])


def last(steps: Iterable[T]) -> T:
    """The final one; the others, and their batches, are let go as they pass."""
    return deque(steps, maxlen=1).pop()


def rows(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """One batch of rows per component: its error, and its value and the target's if it is a number.

    Pass the target's :class:`Components` to have its singular values computed once for many calls.
    """
    ours, theirs = _components(learned), _components(target)
    for component, error in errors(ours, theirs).items():
        value, wanted = getattr(ours, component, None), getattr(theirs, component, None)
        scalar = value is not None and value.shape == error.shape
        found = {"value": value, "target": wanted} if scalar else {}
        yield {**columns, "component": component, "error": error, **found}


def outcome(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """The rows of what was learned in the end, and both spectra."""
    ours, theirs = _components(learned), _components(target)
    yield from rows(ours, theirs, **columns)
    yield {**columns, "which": "learned", "values": ours.singular_values}
    yield {**columns, "which": "target", "values": theirs.singular_values}


def floored(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """Rows of the paper's own condition number, ``s1 / (sd + 1e-10)``.

    It differs from kappa where sd is tiny: in products of layers, and for singular targets.
    """
    value, wanted = (
        floored_condition_number(_components(matrix).singular_values)
        for matrix in (learned, target)
    )
    error = (value - wanted).abs() / wanted
    found = {"error": error, "value": value, "target": wanted}
    yield {**columns, "component": "floored_condition_number", **found}


def _components(matrix: Tensor | Components) -> Components:
    return matrix if isinstance(matrix, Components) else Components(matrix)
