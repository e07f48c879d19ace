"""Adam's moments beside the weights of a checkpoint: what of the next step the dtype will swallow.

The next gradient is not known, so the step is the one that the moments ask for as they are. Which
weight a moment belongs to is told by the names that the optimizer kept, or else by the shape: where
as many weights as moments have a shape, they stand in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kappascope.model.tensors import OPTIMIZER, Path, Read, stored_tensors
from kappascope.monitor.swallowed import (
    heard_by,
    in_finer_dtypes,
    intended,
    lost,
    predicted,
    stepped_in,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
DEEPEST_STATE = 3  # levels at which checkpoints keep the state of an optimizer
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")


@dataclass(frozen=True)
class SwallowedStep:
    """The shares of the next step of a weight that rounding to its dtype takes away.

    ``entries`` of those that a step would move stay where they are; ``update`` and ``decay`` are
    lost of the step and of the weight decay; ``needed`` is the roughest dtype that hears the step.
    """

    name: str
    dtype: str
    entries: float
    update: float
    decay: float | None
    needed: str


@dataclass(frozen=True)
class Moments:
    """Where the moments of a weight are, and the settings of its group."""

    name: str
    weight: Path
    state: Path
    shape: tuple[int, ...]
    group: Mapping[str, Any] = field(repr=False)

    def swallowed(self, read: Read) -> SwallowedStep | None:
        """Predict what the weight's dtype takes from the next step; None where nothing is asked.

        The state is read as it is after a step, which is what the last step used.
        """
        weight = read(self.weight).detach()
        state: dict[str, Tensor] = {key: read((*self.state, key)) for key in ("step", *MOMENTS)}
        mean = state["exp_avg"]
        step = intended("AdamW", self.group, state, weight, mean)
        if step is None or not bool(step.isfinite().all()) or not mean.any():
            return None
        decoupled = self.group.get("decoupled_weight_decay", True)
        decay = float(self.group.get("weight_decay") or 0) * float(self.group["lr"])
        decay = decay if decoupled else 0.0
        share = predicted(weight, step, decay, mean, weight.dtype)
        after = stepped_in(weight, step, decay, weight.dtype)
        shares = lost(weight, after, step, decay)
        return SwallowedStep(
            self.name,
            str(weight.dtype).removeprefix("torch."),
            share or 0.0,
            min(1.0, max(0.0, shares.get("swallowed_update", 0.0))),
            shares.get("swallowed_decay"),
            heard_by(in_finer_dtypes(weight, step, decay, mean)),
        )


def moments(contents: Mapping[Any, Any]) -> tuple[Moments, ...]:
    """Find the moments of Adam in a checkpoint, those whose weights are certain.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(3)).sum().backward(); optimizer.step()
    >>> kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    >>> [one.name for one in moments(kept)]
    ['weight', 'bias']
    """
    found = next(_optimizers(contents, ()), None)
    if found is None:
        return ()
    path, optimizer = found
    weights: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for stored in stored_tensors(contents):
        value = stored.value
        is_weight = isinstance(value, Tensor) and value.is_floating_point() and not stored.made
        if is_weight and stored.reason != OPTIMIZER and not stored.key.endswith(BUFFERS):
            weights.setdefault(stored.name, (stored.path, tuple(value.shape)))
    states = dict(_states(optimizer))
    names = _named(optimizer, weights) or _by_shape(states, weights)
    return tuple(
        Moments(name, weights[name][0], (*path, "state", key), shape, group)
        for key, (shape, group) in states.items()
        if (name := names.get(str(key))) is not None and weights[name][1] == shape
    )


def _optimizers(node: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    if not isinstance(node, Mapping) or len(path) > DEEPEST_STATE:
        return
    if {"state", "param_groups"} <= {str(key) for key in node}:
        yield path, node
        return
    for key, inner in node.items():
        yield from _optimizers(inner, (*path, key))


def _groups(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = optimizer["param_groups"]
    listed = groups.values() if isinstance(groups, Mapping) else groups
    return [group for group in listed if isinstance(group, Mapping)]


def _states(
    optimizer: Mapping[str, Any],
) -> Iterator[tuple[Any, tuple[tuple[int, ...], Mapping[str, Any]]]]:
    """Yield the states of Adam by their keys, with the shape and the group of each."""
    of_group = {
        str(number): group
        for group in _groups(optimizer)
        for number in _listed(group.get("params"))
    }
    state = optimizer["state"]
    for key, held in state.items() if isinstance(state, Mapping) else ():
        tensors = [held.get(name) for name in MOMENTS] if isinstance(held, Mapping) else [None]
        group = of_group.get(str(key), {})
        has_step = isinstance(held, Mapping) and isinstance(held.get("step"), Tensor)
        has_rate = isinstance(group.get("lr"), float) and math.isfinite(group["lr"])
        has_rate = has_rate and "betas" in group and "eps" in group and group["lr"] > 0
        mean = tensors[0]
        known = isinstance(mean, Tensor) and isinstance(tensors[-1], Tensor)
        if has_step and has_rate and known and isinstance(mean, Tensor):
            yield key, (tuple(mean.shape), group)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _named(optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that the optimizer itself keeps, where the weights have them."""
    pairs = {
        str(number): str(name)
        for group in _groups(optimizer)
        for number, name in zip(
            _listed(group.get("params")), _listed(group.get("param_names")), strict=False
        )
    }
    return pairs if set(pairs.values()) <= weights.keys() else {}


def _by_shape(
    states: Mapping[Any, tuple[tuple[int, ...], Mapping[str, Any]]], weights: Mapping[str, Any]
) -> dict[str, str]:
    """Pair moments and weights of a shape in their order, where there are as many of both."""
    keys: dict[tuple[int, ...], list[str]] = {}
    for key, (shape, _) in states.items():
        keys.setdefault(shape, []).append(str(key))
    pairs: dict[str, str] = {}
    for shape, numbers in keys.items():
        fitting = [name for name, (_, its) in weights.items() if its == shape]
        groups = {id(states[key][1]) for key in states if str(key) in numbers}
        if len(fitting) == len(numbers) and len(groups) == 1:
            ordered = sorted(numbers, key=lambda text: (len(text), text))
            pairs |= dict(zip(ordered, fitting, strict=True))
    return pairs
