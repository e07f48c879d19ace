"""Muon as studies use it: torch's, without its bfloat16."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kappascope.training import newton_schulz


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` in the weights' own type, all matrices of one shape at a time.

    Products of bfloat16, in which torch's iterates, stop some processors. Arguments are torch's;
    with ``adjust_lr_fn="match_rms_adamw"`` a step has the size of AdamW's.

    >>> weight = nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.diag(torch.tensor([9.0, 1.0]))
    >>> Muon([weight], lr=1.0).step()
    >>> bool((weight.diagonal() < -0.6).all())
    True
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no closure
        """Move every matrix by as much in every singular direction."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                alike.setdefault(p.shape, []).append(p)
            for some in alike.values():
                self._move(some, group)

    def _move(self, some: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = newton_schulz(torch.stack([self._direction(p, group["momentum"]) for p in some]))
        rows, columns = some[0].shape
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        size = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
        for p, update in zip(some, updates, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(update, alpha=group["lr"] * size)

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's."""
        if p.grad is None:
            raise ValueError("expected a gradient, found none; call backward before step")
        average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        average.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum)
