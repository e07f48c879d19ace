"""Factors of a weight, of its rows, columns or singular values, and how they are trained.

Their gradients come from the weight's. For ``W_eff = M W``, dW = M'G, and where M is diagonal in a
known basis the chain rule's answer for its entries is a sum of products of dW and W, divided by
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.corrections import _state
from kappascope.corrections._parametrize import register
from kappascope.corrections.gauge import FreeSides
from kappascope.corrections.treatments import (
    OptimizerStep,
    State,
    Treatment,
    all_finite,
    group_index,
)
from kappascope.matrix import spectra
from kappascope.model.layouts import Layout
from kappascope.model.weights import LiveWeight, precise


class Factors(nn.Module):
    """A parametrization with factors of its own, linear in the weight, the identity at first.

    The factors take no gradient from autograd: theirs follows from that of the weight, which a
    scaler has unscaled, DDP has averaged and the user's ``zero_grad`` clears. They are parameters
    nevertheless, so that averages of a model (EMA) include them, and detached when they are used,
    for a model may be told to require all its gradients.

    >>> Factors().settle(torch.ones(2, 2))
    False
    """

    layout: Layout  # of the weight as a matrix

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert all tensors, but none below float32: 16 bits would lose what was learned."""

        def moved(x: Tensor) -> Tensor:
            new = fn(x)
            return x.to(new.device) if new.is_floating_point() and new.itemsize < 4 else new

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch gives none

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """Gradients of :attr:`factors`, from the original weight and its gradient."""
        raise NotImplementedError

    @property
    def factors(self) -> list[nn.Parameter]:
        """The factors, in order."""
        # parameters() would look for modules inside this one, at every step of every weight
        return [p for p in self._parameters.values() if p is not None]

    def settle(self, weight: Tensor) -> bool:
        """Do what is due after a step; True if the factors were merged into the weight."""
        return False


class RowColumnFactors(Factors):
    """Factors of the rows and columns that are free, or one factor of the matrix.

    >>> layer = nn.Linear(3, 2)
    >>> layout = Layout.plain(tuple(layer.weight.shape))
    >>> factors = RowColumnFactors(layer.weight, layout, FreeSides(), scalar=False)
    >>> factors.rows.shape, factors.columns.shape
    (torch.Size([2]), torch.Size([3]))
    """

    def __init__(self, matrix: Tensor, layout: Layout, sides: FreeSides, scalar: bool) -> None:
        super().__init__()
        self.layout, self.mask = layout, None if scalar else sides.mask(matrix.shape[-2])
        ones = torch.ones_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
        rows = ones[..., :1, 0] if scalar else ones[..., 0]
        if sides.rows:
            self.rows = nn.Parameter(rows.clone(), requires_grad=False)
        if sides.columns:
            self.columns = nn.Parameter(ones[..., 0, :].clone(), requires_grad=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Multiply the weight by its factors."""
        matrix = self.layout.matrix(weight)
        if hasattr(self, "rows"):
            matrix = self.rows.detach()[..., None] * matrix
        if hasattr(self, "columns"):
            columns = self.columns.detach()[..., None, :]
            matrix = matrix.mul_(columns) if hasattr(self, "rows") else matrix * columns
        return self.layout.tensor(matrix.to(weight.dtype))

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """The chain rule gives for r the sum of dW W, over r, since dW = r G c."""
        found, product = [], weight * gradient
        if hasattr(self, "rows"):
            summed = product.sum(-1)
            if self.rows.shape != summed.shape:
                summed = summed.sum(-1, keepdim=True)
            summed = _quotient(summed, self.rows)
            found.append(summed if self.mask is None else summed * self.mask.to(summed))
        if hasattr(self, "columns"):
            found.append(_quotient(product.sum(-2), self.columns))
        return found


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and 0 where b is: a factor of zero has silenced what it multiplies."""
    return torch.where(b == 0, 0.0, a / b)


class SingularValueFactors(Factors):
    """Factors of singular values, in the basis of the shorter side.

    >>> layer = nn.Linear(3, 2)
    >>> layout = Layout.plain(tuple(layer.weight.shape))
    >>> SingularValueFactors(layer.weight.detach(), layout, every=100).values
    Parameter containing:
    tensor([1., 1.])
    """

    basis: Tensor
    age: Tensor

    def __init__(self, matrix: Tensor, layout: Layout, every: int) -> None:
        super().__init__()
        self.layout, self.every = layout, every
        self.tall = matrix.shape[-2] > matrix.shape[-1]
        basis = self._vectors(matrix)
        self.register_buffer("basis", basis)
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))
        self.values = nn.Parameter(torch.ones_like(basis[..., 0, :]), requires_grad=False)

    def _vectors(self, matrix: Tensor) -> Tensor:
        """Singular vectors of the shorter side."""
        wide = precise(matrix.mT if self.tall else matrix)
        return spectra.decomposition(wide)[0]

    def forward(self, weight: Tensor) -> Tensor:
        """Multiply the weight by its factors."""
        matrix = self.layout.matrix(weight)
        wide = precise(matrix.mT if self.tall else matrix)
        with torch.autocast(weight.device.type, enabled=False):
            # added to the weight, so that factors of one change no bit
            factors = (self.values.detach() - 1)[..., None]
            change = self.basis @ (factors * (self.basis.mT @ wide))
        new = wide + change
        return self.layout.tensor((new.mT if self.tall else new).to(weight.dtype))

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """The chain rule gives for m the sum of U'dW U'W, over m, since dW = U m U' G."""
        if self.tall:
            weight, gradient = weight.mT, gradient.mT
        product = (self.basis.mT @ weight) * (self.basis.mT @ gradient)
        return [_quotient(product.sum(-1), self.values)]

    def settle(self, weight: Tensor) -> bool:
        """Merge the factors and turn the basis when it is time."""
        self.age += 1
        if int(self.age) % self.every:
            return False
        weight.copy_(self(weight))
        self.basis.copy_(self._vectors(self.layout.matrix(weight)))
        self.values.fill_(1.0)
        return True


class TrainedFactors(Treatment):
    """Makes the weight the product of itself and factors, which a private optimizer steps.

    >>> from kappascope.corrections import Multipliers
    >>> model = nn.Linear(3, 2)
    >>> with Multipliers().attach(model, SGD(model.parameters(), lr=0.1)) as handle:
    ...     [[f.shape[0] for f in t.module.factors] for t in handle.treatments]
    [[2, 3]]
    """

    follows_rate = True

    def __init__(
        self,
        kind: type,
        weight: LiveWeight,
        make: Callable[[Tensor], Factors],
        rate: float,
        weight_decay: float,
    ) -> None:
        super().__init__(kind, weight, {})
        self.make, self.rate, self.weight_decay = make, rate, weight_decay
        try:
            self.module = make(weight.matrix())
        except spectra.LinAlgError as error:
            raise ValueError(f"{weight.name}: {error}; repair it first") from error
        self.unclipped: _UnclippedPart | None = None
        self.pending: list[Tensor] = []

    def install(self, undo: ExitStack, report: Callable[[float], None]) -> None:
        """Put the factors into every module that uses the weight, and on ``undo`` their merging.

        After merging, ``report`` is told by how much the weight changed at most.
        """
        used: list[Tensor] = []  # by the model, at every place, until the factors are merged
        undo.callback(lambda: report(self._change(used)))
        for module, attribute in self.weight.owners:
            undo.callback(register(module, attribute, self.module))
        undo.callback(self._merge, used)

    @torch.no_grad()
    def _merge(self, used: list[Tensor]) -> None:
        used += [weight.clone() for weight in self.used_weights()]
        self.leaf.copy_(used[0])

    @torch.no_grad()
    def _change(self, used: list[Tensor]) -> float:
        """The largest change of a weight, relative to its largest entry."""
        largest = 0.0
        for new, old in zip(self.used_weights(), used, strict=False):  # none if installing failed
            size = float(old.abs().amax()) or 1.0
            largest = max(largest, float((new - old).abs().amax()) / size)
        return largest

    def used_weights(self) -> list[Tensor]:
        """Read the weight as every module uses it."""
        return [getattr(module, attribute) for module, attribute in self.weight.owners]

    def gradients(self) -> list[Tensor]:
        """The factors' gradients follow from the weight's, and what clips were to spare."""
        leaf, layout = self.leaf, self.module.layout
        if leaf.grad is None:
            return []
        matrices = precise(layout.matrix(leaf.detach())), precise(layout.matrix(leaf.grad))
        gradients = self.module.gradients(*matrices)
        if self.unclipped is None:
            return gradients
        return [a + b for a, b in zip(gradients, self.unclipped.lost, strict=True)]

    def is_ready(self) -> bool:
        """Whether to act; what a clip took is forgotten with the gradient from which it took it."""
        if self.unclipped is not None and not self.unclipped.belongs_to(self.leaf.grad):
            self.unclipped = None
        return super().is_ready()

    def spare(self, full: list[Tensor]) -> None:
        """Keep the factors' gradients as they were, whatever happened to the weight's since."""
        self.unclipped, gradient = None, self.leaf.grad
        if full and gradient is not None:
            lost = [a - b for a, b in zip(full, self.gradients(), strict=True)]
            self.unclipped = _UnclippedPart(gradient, gradient._version, lost)

    def before(self, step: OptimizerStep) -> None:
        """Note the gradients while the weight is where they were taken."""
        gradients, self.unclipped = self.gradients(), None
        scale = step.gradient_scale
        self.pending = gradients if scale == 1.0 else [g / scale for g in gradients]

    def has_finite_gradient(self) -> bool:
        """Whether the gradient is finite; the factors' are sums over it, and sooner looked at."""
        return all(map(all_finite, self.pending)) or super().has_finite_gradient()


@dataclass(frozen=True, eq=False)
class _UnclippedPart:
    """What the factors' gradients lost when that of the weight was clipped."""

    gradient: Tensor
    version: int
    lost: list[Tensor]

    def belongs_to(self, gradient: Tensor | None) -> bool:
        """Whether it is that gradient still, and nothing happened to it since."""
        return gradient is self.gradient and self.gradient._version == self.version


class FactorOptimizer:
    """The private optimizer of all factors of the weights of one optimizer, which it follows.

    Plain gradient steps (with the same momentum) where the user's optimizer is SGD, AdamW where it
    is anything else, at a part of the learning rate of ``leader``. Factors are no parameter group
    of the user's optimizer: schedulers would not expect it.

    >>> from kappascope.corrections import Multipliers
    >>> model = nn.Linear(2, 2)
    >>> with Multipliers().attach(model, SGD(model.parameters(), lr=0.1)) as handle:
    ...     [type(own.optimizer).__name__ for own in handle.factor_optimizers]
    ['SGD']
    """

    def __init__(
        self, owner: Optimizer, treatments: Sequence[TrainedFactors], leader: Optimizer
    ) -> None:
        self.treatments, self.leader, self.owner = treatments, leader, owner
        # one group for all that move alike: an optimizer takes its time for each group
        alike: dict[tuple[int | None, float, float], list[TrainedFactors]] = {}
        for t in treatments:
            followed = group_index(owner, t.leaf) if leader is owner else 0
            alike.setdefault((followed, t.rate, t.weight_decay), []).append(t)
        self.groups = list(alike.values())
        groups: list[dict[str, Any]] = [
            {"params": [f for t in members for f in t.module.factors], "weight_decay": decay}
            for (_, _, decay), members in alike.items()
        ]
        self.optimizer: Optimizer
        if isinstance(owner, SGD):
            self.optimizer = SGD(groups)
        else:
            # many tiny tensors: unfused, a step of theirs is all overhead
            fused = all(p.device.type == "cpu" for group in groups for p in group["params"]) or None
            self.optimizer = AdamW(groups, fused=fused)

    def check_state(self, state: object) -> None:
        """Refuse a saved state of another optimizer, or of factors of other shapes."""
        name = f"the state of the {type(self.optimizer).__name__} of factors"
        here = self.optimizer.state_dict()
        if not isinstance(state, dict) or state.keys() != here.keys():
            _state.refuse(name, "an optimizer's state dict", _state.described(state))
        groups, states = state["param_groups"], state["state"]
        mine = [(sorted(group), group["params"]) for group in here["param_groups"]]
        try:
            saved = [(sorted(group), group["params"]) for group in groups]
        except (TypeError, KeyError):
            saved = []
        if saved != mine:
            _state.refuse(f"{name}", "of the same groups of factors", _state.described(groups))
        if not isinstance(states, dict):
            _state.refuse(f"{name}", "a dictionary by factor", _state.described(states))
        factors = dict(enumerate(f for g in self.optimizer.param_groups for f in g["params"]))
        for index, entry in states.items():
            if index not in factors:
                _state.refuse(name, f"of {len(factors)} factors", f"one of factor {index!r:.40}")
            form = self._form(factors[index])
            _state.check_form(f"{name}[{index}]", entry, form, optional=form)

    def _form(self, factor: Tensor) -> State:
        """The form of what the optimizer remembers of a factor."""
        if isinstance(self.optimizer, SGD):
            return {"momentum_buffer": factor}
        return {"step": 0.0, "exp_avg": factor, "exp_avg_sq": factor}

    def load_state(self, state: State) -> None:
        """Take up a state that was checked; options are those of the weights and the correction."""
        groups = self.optimizer.state_dict()["param_groups"]
        # in tensors of our own: a fused step writes them without a look at their strides
        self.optimizer.load_state_dict(
            {"state": _state.copied(state["state"]), "param_groups": groups}
        )

    def _options(self, t: TrainedFactors) -> dict[str, Any]:
        """Learning rate and momentum of a weight's factors, from what the weight has now."""
        index = group_index(self.owner, t.leaf)
        assert index is not None  # the treatment would not be acting
        own = self.owner.param_groups[index]
        rate = own["lr"] if self.leader is self.owner else self.leader.param_groups[0]["lr"]
        options = {"lr": t.rate * float(rate)}
        if isinstance(self.owner, SGD):
            return options | {key: own[key] for key in ("momentum", "dampening", "nesterov")}
        return options | {"betas": _betas(own.get("betas"))}

    @torch.no_grad()
    def step(self, acting: set[Treatment]) -> Iterator[TrainedFactors]:
        """Step the factors of the acting treatments; yield those whose step was refused."""
        moving: list[tuple[TrainedFactors, list[Tensor]]] = []
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            active = [t for t in members if t in acting]
            if active:
                group.update(self._options(active[0]))
            moving += [(t, [factor.clone() for factor in t.module.factors]) for t in active]
        for t, _ in moving:
            for factor, gradient in zip(t.module.factors, t.pending, strict=False):
                factor.grad = gradient.to(factor).reshape(factor.shape)
        self.optimizer.step()
        for t, old in moving:
            for factor in t.module.factors:
                factor.grad = None
            if not _is_finite_product(t.leaf, t.module.factors):
                for factor, value in zip(t.module.factors, old, strict=True):
                    factor.copy_(value)
                    self.optimizer.state.pop(factor, None)
                yield t
            elif t.module.settle(t.leaf):
                for factor in t.module.factors:
                    self.optimizer.state.pop(factor, None)


def _betas(betas: Any) -> tuple[float, float]:
    """The first two betas, should an optimizer have others than Adam's; or Adam's defaults."""
    try:
        first, second = (float(beta) for beta in betas[:2])
    except (TypeError, ValueError):
        return 0.9, 0.999
    return (first, second) if 0 <= min(first, second) <= max(first, second) < 1 else (0.9, 0.999)


def _is_finite_product(leaf: Tensor, factors: Iterable[Tensor]) -> bool:
    """Whether the largest entry times the largest factors is a number of the weight's type."""
    limit = torch.finfo(leaf.dtype).max
    for factor in factors:
        size = float(torch.linalg.vector_norm(factor, torch.inf))
        if not math.isfinite(size):
            return False
        limit /= max(1.0, size)
    # the Frobenius norm is faster to have than the largest entry, and nearly always small enough
    norm = float(torch.linalg.vector_norm(leaf))
    return norm <= limit or float(torch.linalg.vector_norm(leaf, torch.inf)) <= limit
