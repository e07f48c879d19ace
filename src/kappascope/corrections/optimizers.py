"""The optimizers that a correction is handed, and what trainers wrap them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

WRAPPERS = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
"""Packages whose optimizers hold another as ``.optimizer`` and hand on its steps.

Other optimizers hold one too (Lookahead), but take steps of their own with it.
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
    found = [unwrapped_optimizer(each) for each in several]
    if not found or not all(isinstance(each, Optimizer) for each in found):
        advice = f": {NONE_YET}" if None in found else ""
        came = _kind(optimizer)
        raise TypeError(f"expected an optimizer or a list of some; got {came}{advice}")
    for each in found:
        if not hasattr(each, "_optimizer_step_post_hooks"):  # as Optimizer.__init__ makes them
            problem = f"{type(each).__name__} runs no hooks, as it never called Optimizer.__init__"
            raise TypeError(f"{problem}; attach to the optimizer inside of it")
    return found


def _kind(thing: object) -> str:
    """What was passed, in a word or two."""
    if not isinstance(thing, Sequence) or isinstance(thing, str):
        return type(thing).__name__
    inner = ", ".join(dict.fromkeys(type(each).__name__ for each in thing))
    return f"{type(thing).__name__} of {inner or 'nothing'}"
