"""The one training loop, and the rows that describe what was learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from kappascope.components import Components, errors
from kappascope.corrections import floored_condition_number
from kappascope.tasks import Batch

T = TypeVar("T")
K = TypeVar("K")
B = TypeVar("B", bound=Batch)

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


def sgd(model: nn.Module, learning_rate: float = 0.01, weight_decay: float = 0.0) -> SGD:
    """Plain gradient steps; factors of rows and columns take a tenth of them, as in the paper."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 2], "lr": learning_rate},
        {"params": [p for p in parameters if p.ndim == 2], "lr": 0.1 * learning_rate},
    ]
    return SGD([group for group in groups if group["params"]], weight_decay=weight_decay)


class MatrixAdam(Optimizer):
    """Adam with the second moment averaged over each matrix: one rate for all of its entries."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.001) -> None:
        super().__init__(parameters, {"lr": lr, "index": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter; the moments' weights are Adam's usual ones."""
        for group in self.param_groups:
            group["index"] += 1
            for p in group["params"]:
                m, v = self.state[p].get("moments", (torch.zeros_like(p), p.new_zeros(())))
                m = torch.lerp(m, p.grad, 0.1)
                v = v + 0.001 * (p.grad.square().mean((-2, -1), keepdim=True) - v)
                self.state[p]["moments"] = m, v
                rate = (v / (1 - 0.999 ** group["index"])).sqrt() + 1e-8
                p.sub_(group["lr"] * m / (1 - 0.9 ** group["index"]) / rate)


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
    return train(model, sgd(model, learning_rate, weight_decay), batches, steps)


def together(
    arms: Mapping[K, Callable[[Iterator[B]], Iterator[Step]]], batches: Iterator[B]
) -> Iterator[dict[K, Step]]:
    """Train several arms side by side on the same batches."""
    shared = tee(batches, len(arms))
    runs = [arm(own) for arm, own in zip(arms.values(), shared, strict=True)]
    return (dict(zip(arms, steps, strict=True)) for steps in zip(*runs, strict=True))


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
    for component, error in errors(ours.matrix, theirs.matrix).items():
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
