"""Stacks of small models, the loop that trains them, and rows about what they have learned.

The first dimension of every parameter counts trials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, tee
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kappascope.lab.optimizers import Descent, Optimizer
from kappascope.lab.tasks import Batch
from kappascope.matrix.components import Components, errors, floored_condition_number

T = TypeVar("T")
K = TypeVar("K")
B = TypeVar("B", bound=Batch)

STEPS = 200  # the paper's default


class Matrix(nn.Module):
    """A stack of matrices, each learned by itself."""

    def __init__(self, start: Float[Tensor, "trials out in"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def forward(self) -> Float[Tensor, "trials out in"]:
        """Return the matrices of all trials."""
        return self.weight.view_as(self.weight)  # a leaf would copy the gradient it is handed


class _Layers(nn.Module):
    """Stacked matrices, one a layer."""

    def __init__(self, starts: Sequence[Float[Tensor, "trials out in"]]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(start.clone() for start in starts)

    @property
    def product(self) -> Float[Tensor, "trials out in"]:
        """The product of the layers, the first next to the input."""
        return reduce(lambda product, layer: layer @ product, self.layers)


class DeepLinear(_Layers):
    """Layers without anything between them: in the end, a matrix."""

    def forward(self) -> Float[Tensor, "trials out in"]:
        """Return the matrix that the layers amount to."""
        return self.product


class Perceptron(_Layers):
    """Layers with a rectifier between them."""

    def forward(self, inputs: Float[Tensor, "trials rows in"]) -> Float[Tensor, "trials rows out"]:
        """Return the answers of the last layer."""
        first, *others = self.layers
        hidden = inputs @ first.mT
        for layer in others:
            hidden = hidden.relu() @ layer.mT
        return hidden


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


def train(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], steps: int = STEPS
) -> Iterator[Step]:
    """Update the model ``steps`` times; the loop around it is the reader's.

    Steps come before, between and after the updates: ``steps + 1`` of them.
    """
    for index, batch in enumerate(islice(batches, steps)):
        yield Step(index, model, batch)
        model.zero_grad()
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
    """Find what was learned when a quadratic loss has come down to each level.

    The step that crosses a level is shortened to end on it, so that all who arrive have the same
    loss; training ends when every trial has arrived at every level.

    >>> models = (Matrix(torch.full((1, 1, 1), weight)) for weight in (2.0, 1.0, 0.0))
    >>> steps = (Step(index, model, None) for index, model in enumerate(models))
    >>> found = arrivals(steps, lambda weight: weight.square().sum((-2, -1)), [0.25])[0.25]
    >>> found.weight.item(), found.step.item()
    (0.5, 2.0)
    """
    reached: dict[float, Arrival] = {}
    before: Tensor | None = None
    for step in steps:
        weight = step.weight.clone()
        now = loss(weight)
        if before is None:
            before, never = weight, torch.full_like(now, torch.nan)
            reached = {
                x: Arrival(torch.full_like(weight, torch.nan), never.clone()) for x in levels
            }
        for level, arrival in reached.items():
            due = arrival.step.isnan() & (now <= level)
            if due.any():
                arrival.weight[due] = _crossing(before, weight, loss, level)[due]
                arrival.step[due] = step.index
        if not any(arrival.step.isnan().any() for arrival in reached.values()):
            break
        before = weight
    return reached


def _crossing(
    before: Tensor, after: Tensor, loss: Callable[[Tensor], Tensor], level: float
) -> Tensor:
    """Find the point between two weights at which a quadratic loss has a value."""
    start, half, end = (loss(torch.lerp(before, after, part)) for part in (0.0, 0.5, 1.0))
    a, b = 2 * (start - 2 * half + end), 4 * half - 3 * start - end  # start + b x + a x^2
    root = (b.square() - 4 * a * (start - level)).clamp(min=0).sqrt()
    part = 2 * (start - level) / (root - b)  # the smaller root; safe where the loss is straight
    return torch.lerp(before, after, part.clamp(0, 1)[:, None, None])


def last(steps: Iterable[T]) -> T:
    """Take the final step; the others, and their batches, are let go as they pass."""
    return deque(steps, maxlen=1).pop()


def rows(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """Yield the error of every component, and where it is a number its value and the target's.

    Pass the target's :class:`Components` to have its singular values computed once for many calls.
    """
    ours, theirs = _components(learned), _components(target)
    for component, error in errors(ours, theirs).items():
        value, wanted = getattr(ours, component, None), getattr(theirs, component, None)
        scalar = value is not None and value.shape == error.shape
        values = {"value": value, "target": wanted} if scalar else {}
        yield {**columns, "component": component, "error": error, **values}


def outcome(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """Yield the rows of what was learned in the end, and both spectra."""
    ours, theirs = _components(learned), _components(target)
    yield from rows(ours, theirs, **columns)
    yield {**columns, "which": "learned", "values": ours.singular_values}
    yield {**columns, "which": "target", "values": theirs.singular_values}


def floored(
    learned: Tensor | Components, target: Tensor | Components, **columns: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows of the paper's own condition number, ``s1 / (sd + 1e-10)``.

    It differs from kappa where sd is tiny: in products of layers, and for singular targets.
    """
    value, wanted = (
        floored_condition_number(_components(matrix).singular_values)
        for matrix in (learned, target)
    )
    error = (value - wanted).abs() / wanted
    numbers = {"error": error, "value": value, "target": wanted}
    yield {**columns, "component": "floored_condition_number", **numbers}


def _components(matrix: Tensor | Components) -> Components:
    return matrix if isinstance(matrix, Components) else Components(matrix)
