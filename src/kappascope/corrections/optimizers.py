"""The user's optimizer: unwrapped, asked for its groups, and with something around its methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

WRAPPERS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
"""Packages whose optimizers hold another as ``.optimizer`` and hand on its steps.

Other optimizers hold one too (Lookahead), but take steps of their own with it.
"""

STATE_KEY = "kappascope"
"""Where ``optimizer.state_dict()`` has the states of what is attached, one for each correction.

It stands beside "state" and "param_groups", where neither torch's own load nor its distributed
checkpoints look for anything: an optimizer with nothing attached ignores it.
"""

NONE_YET = "a Trainer has none before create_optimizer(): call that first, or attach when it trains"


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside what accelerate, Lightning or Fabric made of it.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    >>> unwrapped_optimizer(optimizer) is optimizer
    True
    """
    while WRAPPERS & {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def understood_optimizers(optimizer: object) -> list[Optimizer]:
    """One optimizer or several, unwrapped; anything else is an error in one line.

    >>> understood_optimizers(None)
    Traceback (most recent call last):
    TypeError: expected an optimizer or a list of some; got NoneType: a Trainer has none before ...
    """
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [unwrapped_optimizer(each) for each in several]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        advice = f": {NONE_YET}" if None in optimizers else ""
        came = _kind(optimizer)
        raise TypeError(f"expected an optimizer or a list of some; got {came}{advice}")
    for each in optimizers:
        if _is_stepped_in_two(each):
            name = type(each).__name__
            problem = f"{name} steps in two, and its base_optimizer takes the one that trains"
            raise TypeError(f"{problem}; attach to that: attach(model, optimizer.base_optimizer)")
        if not hasattr(each, "_optimizer_step_post_hooks"):  # as Optimizer.__init__ makes them
            problem = f"{type(each).__name__} runs no hooks, as it never called Optimizer.__init__"
            raise TypeError(f"{problem}; attach to the optimizer inside of it")
    return optimizers


def _is_stepped_in_two(optimizer: Any) -> bool:
    """Whether it is one of SAM's kind, whose user calls no ``step`` at all in its usual loop."""
    has_both = all(hasattr(optimizer, name) for name in ("first_step", "second_step"))
    return has_both and isinstance(getattr(optimizer, "base_optimizer", None), Optimizer)


def _kind(thing: object) -> str:
    """What was passed, in a word or two."""
    if not isinstance(thing, Sequence) or isinstance(thing, str):
        return type(thing).__name__
    inner = ", ".join(dict.fromkeys(type(each).__name__ for each in thing))
    return f"{type(thing).__name__} of {inner or 'nothing'}"


def group_index(optimizer: Optimizer, leaf: Tensor) -> int | None:
    """The index of the optimizer's parameter group that holds ``leaf``, if one does.

    >>> layer = torch.nn.Linear(2, 2)
    >>> groups = [{"params": layer.bias}, {"params": layer.weight}]
    >>> group_index(torch.optim.SGD(groups), layer.weight)
    1
    """
    groups = enumerate(optimizer.param_groups)
    return next((i for i, group in groups if id(leaf) in map(id, group["params"])), None)


def learning_rate(group: Mapping[str, Any]) -> float | None:
    """The learning rate that a parameter group is stepped with, if its optimizer tells one.

    One that estimates its own (D-Adaptation, Prodigy) keeps the estimate as ``d``, and "lr", one by
    default, is a multiple of that.

    >>> learning_rate({"lr": 0.1}), learning_rate({"lr": 1.0, "d": 1e-6}), learning_rate({})
    (0.1, 1e-06, None)
    """
    rate, estimate = group.get("lr"), group.get("d", 1.0)
    if rate is None:
        return None
    return float(rate) * (float(estimate) if isinstance(estimate, Real | Tensor) else 1.0)


def has_steps_within(optimizer: Optimizer) -> bool:
    """Whether a step may call another that runs hooks, of a class above; none of torch's does.

    >>> has_steps_within(torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    False
    """
    steps: list[Any] = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    # AdamW and Adam have hooks of their own around the same function
    return len({step.__wrapped__ for step in steps if getattr(step, "hooked", False)}) > 1


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler told a fused optimizer not to step.

    >>> optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    >>> is_skipped(optimizer)
    False
    """
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)


class MethodWrapper:
    """A method of one optimizer with something around it, until it is removed.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    >>> wrapper = MethodWrapper(optimizer, "step", lambda call: "not taken")
    >>> optimizer.step()
    'not taken'
    >>> wrapper.remove()
    >>> optimizer.step()
    """

    def __init__(self, optimizer: Optimizer, name: str, around: Callable[..., Any]) -> None:
        self.optimizer, self.name, self.own = optimizer, name, vars(optimizer).get(name)
        self.is_on = True
        inner = getattr(optimizer, name)

        @wraps(inner)  # schedulers look for a mark that they leave
        def method(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs) if self.is_on else inner(*args, **kwargs)

        self.method = MethodType(method, optimizer)  # bound, as schedulers expect it
        setattr(optimizer, name, self.method)

    def remove(self) -> None:
        """Leave no trace, unless somebody has put something around this in turn."""
        self.is_on = False
        if vars(self.optimizer).get(self.name) is not self.method:
            return
        delattr(self.optimizer, self.name)
        if self.own is not None:
            setattr(self.optimizer, self.name, self.own)


class GivenValue:
    """A closure that was evaluated before the step, once, and gives its value once.

    >>> GivenValue(2.0).give()
    2.0
    """

    def __init__(self, value: Any) -> None:
        self.value, self.was_given = value, False
        self.seen: list[tuple[nn.Parameter, int, Tensor | None, int]] = []

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note weights and gradients as they are now."""
        self.seen = [
            (p, p._version, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters
        ]

    def give(self) -> Any:
        """The value, if nothing has changed since; a new one would need the weights themselves."""
        unchanged = all(
            p._version == version and p.grad is grad and (grad is None or grad._version == its)
            for p, version, grad, its in self.seen
        )
        if self.was_given or not unchanged:
            when = "a second time" if self.was_given else "after a weight or gradient was changed"
            problem = f"the optimizer called the closure {when}, which no correction allows"
            raise RuntimeError(f"{problem}: it is evaluated once, before the step; close it first")
        self.was_given = True
        return self.value


def with_value(args: Any, kwargs: Any) -> tuple[Any, Any, GivenValue | None]:
    """Evaluate the closure among the arguments of a step, and put its value in its place.

    The first of the arguments is the optimizer, as hooks of a step are handed them.

    >>> (_, closure), _, given = with_value((None, lambda: 2.0), {})
    >>> closure(), given.was_given
    (2.0, True)
    """
    closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
    if not closures:
        return args, kwargs, None
    with torch.enable_grad():
        given = GivenValue(closures[0]())

    def closure() -> Any:
        return given.give()

    args = tuple(closure if value is closures[0] else value for value in args)
    kwargs = {k: closure if value is closures[0] else value for k, value in kwargs.items()}
    return args, kwargs, given
