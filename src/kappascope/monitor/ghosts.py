"""Ghosts: what the optimizer would have made of the same gradients had they had no direction.

A ghost is a second copy of a weight with an optimizer of its own, of the same class and settings.
It gets the gradients of the real weight, each step's with a random sign. Their size, their
covariance and what Adam divides by stay as they are, and momentum averages as much noise; only that
gradients point the same way from one step to the next is lost. Where a weight ends among its ghosts
is what noise alone would have done.

A ghost does not know: the loss never pushes it back, so that noise which the loss would have damped
grows in it; and a gradient that is real but changes its sign by itself counts as noise.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.matrix.parts import StartFrame, matrix_parts
from kappascope.monitor.survey import Item
from kappascope.theory.beyond import PartComparison, compared_with_few

GHOSTS = 4  # Student's law with three degrees of freedom: a difference of 3 spreads has p = 0.06
NULL = "ghosts"
# Parts that are near enough to normal for Student's law; shares of the norm are skewed.
RECORDED = ("log_norm", "row_spread", "column_spread", "log_sigma_1", "log_sigma_50",
            "log_sigma_min", "log_kappa", "log_stable_rank")  # fmt: skip


class Ghosts:
    """Train several ghosts beside some parameters, from where these are now, until closed.

    >>> weight = nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> with Ghosts({"w": weight}, optimizer, count=2) as ghosts:
    ...     weight.grad = torch.full((2, 3), 0.5)
    ...     optimizer.step()
    >>> sorted({float(entry) for ghost in ghosts.weights("w") for entry in ghost.flatten()})
    [0.5, 1.5]
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Optimizer | Sequence[Optimizer],
        count: int = GHOSTS,
        seed: int = 0,
    ) -> None:
        if count < 2:
            raise ValueError(f"expected two ghosts or more, to see how they differ; got {count}")
        several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        names = {id(p): name for name, p in parameters.items()}
        self.starts = {name: p.detach().clone() for name, p in parameters.items()}
        self._copies = {
            name: [nn.Parameter(p.detach().clone()) for _ in range(count)]
            for name, p in parameters.items()
        }
        self._random = torch.Generator().manual_seed(seed)  # on the host, of its own
        self._twins = [_twin(each, names, self._copies) for each in several]
        self._undo = ExitStack()
        for k, optimizer in enumerate(several):
            hook = optimizer.register_step_post_hook(lambda real, *_, k=k: self._step(k, real))
            self._undo.callback(hook.remove)
        self._names = names

    def weights(self, name: str) -> list[Tensor]:
        """Return the ghosts of a parameter as they are now."""
        return [copy.detach() for copy in self._copies[name]]

    def compared(self, name: str, weight: Tensor) -> list[PartComparison]:
        """Compare every part of a weight with its ghosts'."""
        return compared_with_ghosts(weight, self.weights(name), StartFrame(self.starts[name]))

    def quantities(self, item: Item, weight: Tensor) -> dict[str, dict[str, float]]:
        """Return the p-values of some parts, for the record: of every matrix in a weight."""
        assert item.unit is not None
        if item.name not in self._copies:
            return {}
        cut = item.unit.layout.cut
        stacks = [[piece for _, piece in cut(each)] for each in self.weights(item.name)]
        found = {}
        for place, (part, (_, piece)) in enumerate(zip(item.unit.parts, cut(weight), strict=True)):
            ghosts = [stack[place].float().cpu() for stack in stacks]
            compared = compared_with_ghosts(piece.detach().float().cpu(), ghosts)
            found[part.name] = {f"ghost_p_{c.part}": c.p for c in compared if c.part in RECORDED}
        wanted = {logical.name for logical in item.wanted}
        return {name: quantities for name, quantities in found.items() if name in wanted}

    @torch.no_grad()
    def _step(self, k: int, real: Optimizer) -> None:
        """Take the step that the real optimizer has taken, at its settings, with random signs."""
        twin = self._twins[k]
        for group, ours in zip(real.param_groups, twin.param_groups, strict=False):
            ours.update({key: value for key, value in group.items() if key != "params"})
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    continue
                signs = 2 * torch.randint(2, (len(self._copies[name]),), generator=self._random) - 1
                for ghost, sign in zip(self._copies[name], signs.tolist(), strict=True):
                    gradient = parameter.grad
                    ghost.grad = None if gradient is None else gradient * sign
        twin.step()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps of the ghosts depend on."""
        return {
            "starts": self.starts,
            "copies": {name: self.weights(name) for name in self._copies},
            "twins": [twin.state_dict() for twin in self._twins],
            "random": self._random.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the ghosts of an interrupted run were."""
        self.starts = dict(state["starts"])
        for name, weights in state["copies"].items():
            for ours, theirs in zip(self._copies[name], weights, strict=True):
                ours.copy_(theirs)
        for twin, saved in zip(self._twins, state["twins"], strict=True):
            twin.load_state_dict(saved)
        self._random.set_state(state["random"])

    def close(self) -> None:
        """Leave no hook behind; the ghosts stay as they are."""
        self._undo.close()

    def __enter__(self) -> Ghosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compared_with_ghosts(
    weight: Tensor, ghosts: Sequence[Tensor], frame: StartFrame | None = None
) -> list[PartComparison]:
    """Compare every part of a matrix with those of its ghosts."""
    parts = matrix_parts(torch.stack(list(ghosts)), frame)
    return [
        compared_with_few(part, float(value), parts[part].cpu().numpy(), NULL)
        for part, value in matrix_parts(weight, frame).items()
    ]


def _twin(
    optimizer: Optimizer, names: Mapping[int, str], copies: Mapping[str, list[nn.Parameter]]
) -> Optimizer:
    """Make an optimizer of the same class for the ghosts, group by group, that remembers nothing.

    It is copied and not built anew: what a class wants at its making is known to the user alone.
    """
    twin = copy.copy(optimizer)
    for key, value in vars(optimizer).items():
        if not key.startswith("_") and not callable(value):  # no hooks, and no scheduler's step
            vars(twin).setdefault(key, value)
    vars(twin).pop("step", None)
    twin.param_groups = []
    for group in optimizer.param_groups:
        found = [names[id(p)] for p in group["params"] if id(p) in names]
        ghosts = [ghost for name in found for ghost in copies[name]]
        twin.param_groups.append({**group, "params": ghosts})
    twin.state = defaultdict(dict)
    return twin
