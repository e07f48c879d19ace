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
from torch.optim import SGD, AdamW, Optimizer

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


class GhostSquares:
    """Tell the mean square of every entry over all ghosts of a weight, exactly, without any ghost.

    What SGD and Adam do is linear in the gradients, once the second moment is given, and that does
    not know their signs. So the mean squares of a ghost's entries and of its momentum, and the mean
    of their product, follow from one step to the next by three numbers an entry. Whatever else is
    in the square of the real weight is the work of gradients that pointed the same way.

    >>> weight = nn.Parameter(torch.ones(1, 2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> with GhostSquares({"w": weight}, optimizer) as squares:
    ...     weight.grad = torch.full((1, 2), 0.5)
    ...     optimizer.step()
    >>> squares.of("w"), weight.detach().square()
    (tensor([[1.2500, 1.2500]]), tensor([[0.2500, 0.2500]]))
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        if not isinstance(optimizer, SGD | AdamW) or any(map(_is_other, optimizer.param_groups)):
            raise ValueError(
                f"expected plain SGD or AdamW, whose ghosts have a mean square in closed form; "
                f"got {type(optimizer).__name__}: train Ghosts instead"
            )
        self._names = {id(p): name for name, p in parameters.items()}
        self._squares = {name: p.detach().double().square() for name, p in parameters.items()}
        # mean products of a ghost's entries with its momentum's, and the latter's mean squares
        self._products = {name: torch.zeros_like(p) for name, p in self._squares.items()}
        self._momenta = {name: torch.zeros_like(p) for name, p in self._squares.items()}
        self._hook = optimizer.register_step_post_hook(lambda real, *_: self._step(real))

    def of(self, name: str) -> Tensor:
        """Return the mean squares of a parameter's entries over its ghosts as they are now."""
        return self._squares[name].float()

    @torch.no_grad()
    def _step(self, real: Optimizer) -> None:
        """Follow the step that the optimizer has taken."""
        for group in real.param_groups:
            for parameter in group["params"]:
                name, gradient = self._names.get(id(parameter)), parameter.grad
                if name is None or gradient is None:
                    continue
                state, fed = real.state[parameter], gradient.double().square()
                if isinstance(real, SGD):
                    self._follow_sgd(name, group, fed)
                else:
                    self._follow_adam(name, group, state, fed)

    def _follow_sgd(self, name: str, group: Mapping[str, Any], fed: Tensor) -> None:
        # b' = mu b + decay w + g, w' = w - rate b'
        rate, mu, decay = (float(group[key]) for key in ("lr", "momentum", "weight_decay"))
        square, product, momentum = self._squares[name], self._products[name], self._momenta[name]
        momentum.mul_(mu**2).add_(product, alpha=2 * mu * decay).add_(square, alpha=decay**2)
        momentum.add_(fed)
        product.mul_(mu).add_(square, alpha=decay)
        square.add_(product, alpha=-2 * rate).add_(momentum, alpha=rate**2)
        product.sub_(momentum, alpha=rate)

    def _follow_adam(
        self, name: str, group: Mapping[str, Any], state: Mapping[str, Any], fed: Tensor
    ) -> None:
        # m' = beta m + (1 - beta) g, w' = (1 - rate decay) w - reach m'
        beta, beta2 = (float(b) for b in group["betas"])
        rate, count = float(group["lr"]), float(state["step"])
        kept = 1 - rate * float(group["weight_decay"])
        root = (state["exp_avg_sq"].double() / (1 - beta2**count)).sqrt_().add_(group["eps"])
        reach = rate / (1 - beta**count) / root
        square, product, momentum = self._squares[name], self._products[name], self._momenta[name]
        momentum.mul_(beta**2).add_(fed, alpha=(1 - beta) ** 2)
        product.mul_(kept * beta)
        square.mul_(kept**2).sub_(2 * reach * product).add_(reach.square() * momentum)
        product.sub_(reach * momentum)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, by parameter."""
        return {"squares": self._squares, "products": self._products, "momenta": self._momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the sums of an interrupted run."""
        self._squares, self._products, self._momenta = (
            dict(state[key]) for key in ("squares", "products", "momenta")
        )

    def close(self) -> None:
        """Leave no hook behind; the sums stay as they are."""
        self._hook.remove()

    def __enter__(self) -> GhostSquares:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_other(group: Mapping[str, Any]) -> bool:
    """Whether settings of a group make another optimizer of it than the closed form knows."""
    return any(group.get(key) for key in ("nesterov", "dampening", "amsgrad", "maximize"))


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
