"""The norms of the last steps, kept on their devices: who moved first when something broke."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kappascope.model.sharded import own_shard, shard_count
from kappascope.text import plural

MOVED_FACTOR = 4.0  # over the median of the first half of the ring, up or down
MIN_STEPS = 8  # in the ring, below which nothing has a usual size


@dataclass(frozen=True)
class StepNorms:
    """The norms of weights and of their gradients after one step, by the names of the weights.

    Of a weight that is spread over processes it is what this process's shard lets one expect.
    """

    step: int
    names: tuple[str, ...]
    weights: Tensor
    gradients: Tensor


class Ring:
    """Norms of weights and gradients after each of the last steps; nothing waits for a device.

    Each of several optimizers adds what it steps, and ``length`` counts what was added.

    >>> ring = Ring(2)
    >>> for step in (1, 2, 3):
    ...     ring.add(step, {"w": torch.full((4,), float(step))})
    >>> ring.entry(3)["steps"], ring.entry(3)["norms"]
    ([2, 3], {'w': [4.0, 6.0]})
    """

    def __init__(self, length: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=length)
        self._kept: deque[StepNorms] = deque(maxlen=length)
        self._fresh = 0

    @torch.no_grad()
    def add(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Keep the norms of this step's parameters and of their gradients."""
        if not parameters:
            return
        weights = _norms([p.detach() for p in parameters.values()])
        gradients = _norms([_gradient(p) for p in parameters.values()])
        self._kept.append(StepNorms(step, tuple(parameters), weights, gradients))
        self._fresh = min(self._fresh + 1, len(self._kept))

    def log(self, step: int, loss: float) -> None:
        """Keep a loss, to tell how long before it something else moved."""
        self._losses.append((step, loss))

    @property
    def fresh(self) -> list[StepNorms]:
        """The norms that were added since they were last told."""
        return list(self._kept)[len(self._kept) - self._fresh :]

    def refresh(self, norms: Sequence[StepNorms]) -> None:
        """Put others in the place of the fresh ones: on the host, or of whole weights."""
        for place, each in enumerate(norms, len(self._kept) - self._fresh):
            self._kept[place] = each

    def tell(self) -> list[StepNorms]:
        """The fresh norms, which are fresh no more."""
        norms, self._fresh = self.fresh, 0
        return norms

    def entry(self, step: int) -> dict[str, Any] | None:
        """What the record keeps of the ring, and a sentence on who was first to move."""
        if not self._kept:
            return None
        steps = sorted({each.step for each in self._kept})
        norms = _series(steps, [(each.step, each.names, each.weights) for each in self._kept])
        gradients = _series(steps, [(e.step, e.names, e.gradients) for e in self._kept])
        text = first_to_move(steps, gradients, dict(self._losses))
        entry = {"kind": "ring", "step": step, "steps": steps}
        return entry | {"norms": norms, "gradients": gradients, "text": text}


def of_all_shards(several: Sequence[Sequence[StepNorms]]) -> list[StepNorms]:
    """The norms of whole weights from what each process expects: the mean of their squares.

    >>> one, other = (StepNorms(7, ("w",), torch.tensor([x]), torch.ones(1)) for x in (6.0, 8.0))
    >>> of_all_shards([[one], [other]])[0].weights
    tensor([7.0711])
    """
    whole = []
    for first in several[0]:
        same = [each for norms in several for each in norms if _is_same_step(each, first)]
        if len(same) < len(several):  # one of them missed it
            whole.append(first)
            continue
        weights, gradients = (
            torch.stack(sides).square().mean(0).sqrt()
            for sides in ([e.weights for e in same], [e.gradients for e in same])
        )
        whole.append(StepNorms(first.step, first.names, weights, gradients))
    return whole


def _is_same_step(one: StepNorms, other: StepNorms) -> bool:
    return (one.step, one.names) == (other.step, other.names)


def _series(
    steps: Sequence[int], kept: Iterable[tuple[int, tuple[str, ...], Tensor]]
) -> dict[str, list[float | None]]:
    """The norms of each parameter along the steps; None where it was not stepped."""
    places = {step: place for place, step in enumerate(steps)}
    series: dict[str, list[float | None]] = {}
    for step, names, values in kept:
        for name, value in zip(names, values.tolist(), strict=True):
            series.setdefault(name, [None] * len(steps))[places[step]] = value
    return series


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return parameter.new_zeros(1)
    return gradient.detach()


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norms of some tensors, in float32 at least and on the device of the first."""
    local = [own_shard(t) for t in tensors]
    dtype = reduce(torch.promote_types, (t.dtype for t in local), torch.float32)
    single = torch._foreach_norm(local, 2, dtype=dtype)  # which refuses to narrow one
    device = single[0].device
    norms = torch.stack([norm.to(device, non_blocking=True) for norm in single])
    shards = [shard_count(t) for t in tensors]
    return norms if set(shards) == {1} else norms * norms.new_tensor(shards).sqrt()


def first_to_move(
    steps: Sequence[int], series: Mapping[str, Sequence[float | None]], losses: Mapping[int, float]
) -> str:
    """Say whose gradient first left its usual size for good, and how long before the loss did.

    >>> series = {"w": [1.0] * 6 + [9.0] * 4, "v": [1.0] * 8 + [9.0] * 2}
    >>> first_to_move(list(range(10)), series, {s: 1.0 if s < 9 else 8.0 for s in range(10)})
    'the gradient of w left its usual size first: at step 6, 3 steps before the loss'
    """
    if len(steps) < MIN_STEPS:
        return ""
    moved = {name: at for name, v in series.items() if (at := _left(steps, v)) is not None}
    if not moved:
        return ""
    name = min(moved, key=lambda each: moved[each])
    text = f"the gradient of {name} left its usual size first: at step {moved[name]:,}"
    logged = sorted(losses)
    loss_moved = _left(logged, [losses[s] for s in logged]) if len(logged) >= MIN_STEPS else None
    if loss_moved is not None and loss_moved > moved[name]:
        text += f", {plural(loss_moved - moved[name], 'step')} before the loss"
    return text


def _left(steps: Sequence[int], values: Sequence[float | None]) -> int | None:
    """The step from which a series is no more within its usual size, if there is one."""
    known = [(step, v) for step, v in zip(steps, values, strict=True) if v is not None]
    usual = [v for _, v in known[: len(known) // 2] if math.isfinite(v) and v > 0]
    if not usual:
        return None
    middle = median(usual)
    left = None
    for step, value in reversed(known):
        if math.isfinite(value) and middle / MOVED_FACTOR < value < middle * MOVED_FACTOR:
            break
        left = step
    return left
