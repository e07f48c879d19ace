"""Which updates a dtype swallows: entries that do not move though their gradient says they should.

A weight of 1.0 in bfloat16 has its next neighbours at 0.996 and 1.008. An update of less than half
that distance is rounded away, however often it comes. What a step wanted is known from the state
that the optimizer keeps, so the share that is lost can be predicted for any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FINER = {"float16": torch.float16, "float32": torch.float32}  # than bfloat16, roughest first
HEARD_BELOW = 0.01  # a dtype that swallows less of the entries hears the update


def observed(before: Tensor, after: Tensor, gradient: Tensor) -> dict[str, float]:
    """The share of entries, and of rows, that did not move although their gradient is not zero.

    >>> before, after = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    >>> observed(before, after, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    {'swallowed': 0.666..., 'swallowed_rows': 0.5}
    """
    called = gradient != 0
    asked = int(called.count_nonzero())
    if not asked:
        return {}
    unmoved = before == after
    still = int((unmoved & called).count_nonzero())
    shares = {"swallowed": still / asked}
    if before.ndim > 1 and not still:
        shares["swallowed_rows"] = 0.0
    elif before.ndim > 1:
        rows = called.flatten(1).any(1)
        quiet = rows & unmoved.flatten(1).all(1)
        shares["swallowed_rows"] = int(quiet.count_nonzero()) / int(rows.count_nonzero())
    return shares


def intended(
    optimizer: str,
    group: Mapping[str, Any],
    state: Mapping[str, Tensor],
    before: Tensor,
    gradient: Tensor,
) -> Tensor | None:
    """The step, without decoupled decay, that the state of an optimizer asks for, in float64.

    Known for SGD, Adam and AdamW of torch; None for others, and before there is a state. The
    state is that after the step, which is what the step used; the weight is that before it.

    >>> intended("SGD", {"lr": 0.5, "weight_decay": 0.1}, {}, torch.ones(2), torch.ones(2))
    tensor([-0.5500, -0.5500], dtype=torch.float64)
    """
    rate = group.get("lr")
    if rate is None or group.get("maximize"):
        return None
    if optimizer == "SGD":
        gradient = gradient.double() + group.get("weight_decay", 0.0) * before.double()
        return _sgd(group, state, gradient, float(rate))
    if optimizer in ("Adam", "AdamW") and "exp_avg" in state:
        return _adam(group, state, float(rate))
    return None


def _sgd(
    group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, rate: float
) -> Tensor | None:
    if not group.get("momentum"):
        return -rate * gradient
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return None
    step = buffer.double()
    if group.get("nesterov"):
        step = gradient + group["momentum"] * step
    return -rate * step


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], rate: float) -> Tensor:
    first, second = group["betas"]
    count = float(state["step"])
    mean = state["exp_avg"].double() / (1 - float(first) ** count)
    key = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    size = (state[key].double() / (1 - float(second) ** count)).sqrt() + group["eps"]
    return -rate * mean / size


def stepped_in(weight: Tensor, step: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """The weight after decay and step, each rounded to a dtype, as optimizers apply them.

    >>> stepped_in(torch.ones(2), torch.tensor([1e-3, 1e-2]), 0.0, torch.bfloat16)
    tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    start = weight.to(dtype)
    shrunk = start if not decay else (start.double() * (1 - decay)).to(dtype)
    return (shrunk.double() + step.double()).to(dtype)


def predicted(
    before: Tensor, step: Tensor, decay: float, gradient: Tensor, dtype: torch.dtype
) -> float | None:
    """The share of entries with a gradient that a step would leave where they are in a dtype.

    >>> weight, step = torch.ones(4), torch.tensor([1e-4, 1e-3, 1e-2, 1e-1])
    >>> predicted(weight, step, 0.0, torch.ones(4), torch.bfloat16)
    0.5
    """
    called = gradient != 0
    asked = int(called.sum())
    if not asked:
        return None
    start = before.to(dtype)
    return int(((stepped_in(before, step, decay, dtype) == start) & called).sum()) / asked


def lost(before: Tensor, after: Tensor, step: Tensor, decay: float) -> dict[str, float]:
    """The shares of the intended step and of the weight decay that rounding took away.

    What of the change lies along the intended step was heard; the rest of one is lost. Decay is
    heard by the entries that it alone would move.

    >>> weight = torch.ones(2)
    >>> lost(weight, torch.tensor([1.0, 1.5]), torch.tensor([0.5, 0.5]).double(), decay=0.0)
    {'swallowed_update': 0.5}
    """
    shares: dict[str, float] = {}
    wanted = step.double() - decay * before.double()
    total = float(wanted.square().sum())
    if 0 < total < math.inf:
        change = after.double() - before.double()
        shares["swallowed_update"] = 1 - float((change * wanted).sum()) / total
    if decay:
        alive = before != 0
        shrunk = (before.double() * (1 - decay)).to(before.dtype)
        still = int(((shrunk == before) & alive).sum())
        shares["swallowed_decay"] = still / max(int(alive.sum()), 1)
    return shares


def in_finer_dtypes(
    before: Tensor, step: Tensor, decay: float, gradient: Tensor
) -> dict[str, float]:
    """The shares of entries that a step of a 16-bit weight would lose in dtypes of more digits.

    >>> weight = torch.ones(3).bfloat16()
    >>> in_finer_dtypes(weight, torch.full((3,), 1e-4).double(), 0.0, torch.ones(3))
    {'swallowed_in_float16': 1.0, 'swallowed_in_float32': 0.0}
    """
    shares: dict[str, float] = {}
    for name, dtype in FINER.items():
        if torch.finfo(dtype).eps < torch.finfo(before.dtype).eps:
            share = predicted(before, step, decay, gradient, dtype)
            shares |= {} if share is None else {f"swallowed_in_{name}": share}
    return shares


def heard_by(quantities: Mapping[str, Any]) -> str:
    """The roughest dtype, of those a share was predicted for, in which hardly an entry is lost.

    >>> heard_by({"swallowed_in_float16": 1.0, "swallowed_in_float32": 0.0})
    'float32'
    """
    shares = ((name, quantities.get(f"swallowed_in_{name}")) for name in FINER)
    heard = (name for name, share in shares if share is not None and share < HEARD_BELOW)
    return next(heard, "")
