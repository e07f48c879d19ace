"""Factors of a weight, of its rows, columns or singular values, and how they are trained.

The parameter of the model holds the product W, as in any other model. What is stepped is the
*direction* V, which the factors multiply: it is kept here, and is in the parameter while the user's
optimizer steps, no longer. Gradients come from that of the weight. For ``W = M V``, dV = M'G, and
where M is diagonal in a known basis the chain rule's answer for its entries is a sum of products of
dV and V, divided by them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.corrections import _state
from kappascope.corrections._treatments import (
    State,
    Treatment,
)
from kappascope.corrections.gauge import FreeSides
from kappascope.corrections.optimizers import group_index, learning_rate
from kappascope.matrix import spectra
from kappascope.model.layouts import Layout
from kappascope.model.sharded import (
    agreed,
    copied_to_all,
    is_sharded,
    own_shard,
    spread_like,
    whole,
)
from kappascope.model.weights import LiveWeight, precise


class Factors(nn.Module):
    """Factors of a weight: the product is linear in the weight, and the weight itself at first.

    No gradient comes to them from autograd: theirs follows from that of the weight, which a scaler
    has unscaled, DDP has averaged and the user's ``zero_grad`` clears. They have float32 at least,
    for 16 bits would lose what was learned.

    >>> Factors().settle(torch.ones(2, 2))
    False
    """

    layout: Layout  # of the weight as a matrix
    is_elementwise = False  # the product, whose bits then do not depend on how it is computed

    is_scalar = False  # one factor of the matrix, or of each in a stack

    mask: Tensor | None = None  # of the first of :attr:`factors`: which of its entries are free

    def sums(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """:attr:`factors` times their gradients, from the matrix they multiply and its gradient."""
        raise NotImplementedError  # every kind of factors has its own

    def pulled_back(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of what the factors multiply, from that of the product, both as stored."""
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            (pulled,) = torch.autograd.grad(self(leaf), leaf, gradient.to(weight.dtype))
        return pulled

    def write(self, weight: Tensor, product: Tensor) -> None:
        """Write the product of the weight and the factors into a tensor of its form."""
        product.copy_(self(weight))

    def undone(self, product: Tensor, before: Tensor) -> Tensor | None:
        """What has this product; where nothing has, as ``before``; None if that is not known."""
        return None

    def state(self) -> State:
        """What a restart needs."""
        return dict(self.state_dict())

    def load(self, state: State) -> None:
        """Go on from a state of factors of the same shapes."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])

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

    is_elementwise = True
    rows: nn.Parameter | None
    columns: nn.Parameter | None

    def __init__(self, matrix: Tensor, layout: Layout, sides: FreeSides, scalar: bool) -> None:
        super().__init__()
        self.layout, self.mask = layout, None if scalar else sides.mask(matrix.shape[-2])
        self.is_scalar = scalar
        ones = torch.ones_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
        rows = (ones[..., :1, 0] if scalar else ones[..., 0]) if sides.rows else None
        columns = ones[..., 0, :] if sides.columns else None
        for name, values in (("rows", rows), ("columns", columns)):
            own = None if values is None else nn.Parameter(values.clone(), requires_grad=False)
            self.register_parameter(name, own)

    def _across(self) -> tuple[Tensor | None, Tensor | None]:
        """Factors of rows and of columns, in the form in which they multiply a matrix."""
        rows, columns = self.rows, self.columns  # asked for once: a module looks them up
        return (
            None if rows is None else rows.unsqueeze(-1),
            None if columns is None else columns.unsqueeze(-2),
        )

    def forward(self, weight: Tensor) -> Tensor:
        """Multiply the weight by its factors."""
        matrix, (rows, columns) = self.layout.matrix(weight), self._across()
        if rows is not None:
            matrix = copied_to_all(rows, weight) * matrix
        if columns is not None:
            columns = copied_to_all(columns, weight)
            matrix = matrix * columns if rows is None else matrix.mul_(columns)
        return spread_like(self.layout.tensor(matrix.to(weight.dtype)), weight)

    def write(self, weight: Tensor, product: Tensor) -> None:
        """Write the product into a tensor of its form, without another one where that can be."""
        matrix, into = self.layout.matrix(weight), self.layout.matrix(product)
        rows, columns = self._across()
        first = columns if rows is None else rows
        if is_sharded(weight) or first is None or first.dtype != weight.dtype:
            return super().write(weight, product)
        if into.data_ptr() != product.data_ptr():  # no view
            return super().write(weight, product)
        if rows is not None:
            torch.mul(rows, matrix, out=into)
        if columns is not None:
            torch.mul(matrix if rows is None else into, columns, out=into)
        return None

    def pulled_back(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """``dV = r G c``."""
        matrix, (rows, columns) = self.layout.matrix(gradient), self._across()
        if columns is not None:
            matrix = matrix * copied_to_all(columns, weight)
        if rows is not None:
            rows = copied_to_all(rows, weight)
            matrix = matrix * rows if columns is None else matrix.mul_(rows)
        return spread_like(self.layout.tensor(matrix.to(weight.dtype)), weight)

    def sums(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """The chain rule gives for r the sum of dV V, over r, since dV = r G c."""
        rows, columns, product, sums = self.rows, self.columns, weight * gradient, []
        if rows is not None:
            summed = whole(product.sum(-1))
            sums.append(summed if rows.shape == summed.shape else summed.sum(-1, keepdim=True))
        if columns is not None:
            sums.append(whole(product.sum(-2)))
        return sums

    def undone(self, product: Tensor, before: Tensor) -> Tensor:
        """``W / (r c)``; a factor of zero has silenced what it multiplies."""
        ones = self.forward(torch.ones_like(before, dtype=torch.float64))
        return torch.where(ones == 0, before, (product.double() / ones).to(before.dtype))


class FactorRow:
    """The factors of some weights side by side, since there are many and they are short.

    An operation takes its time whatever its size: one for all of them is enough.

    >>> layer = nn.Linear(3, 2)
    >>> layout = Layout.plain(tuple(layer.weight.shape))
    >>> factors = RowColumnFactors(layer.weight, layout, FreeSides(), scalar=False)
    >>> FactorRow([factors]).gradients([torch.ones(2), 2 * torch.ones(3)])
    [[tensor([1., 1.]), tensor([2., 2., 2.])]]
    """

    def __init__(self, modules: Sequence[Factors]) -> None:
        self.factors = [module.factors for module in modules]
        self.flat = [factor for own in self.factors for factor in own]
        self.sizes = [factor.numel() for factor in self.flat]
        self.masks = [(i, module.mask) for i, module in enumerate(modules)]
        self.values = self._joined(self.flat)  # of the factors, as they are now

    def gradients(self, sums: Sequence[Tensor]) -> list[list[Tensor]]:
        """Gradients of the factors of each weight, from all of :meth:`Factors.sums`."""
        self.values = self._joined(self.flat)
        # a factor of zero has silenced what it multiplies
        quotients = (self._joined(sums) / self.values).masked_fill_(self.values == 0, 0.0)
        gradients = self.apart(quotients.to(self.values))
        for i, mask in self.masks:
            if mask is not None:
                gradients[i][0].mul_(mask.to(quotients))
        return gradients

    def apart(self, joined: Tensor) -> list[list[Tensor]]:
        """Numbers that stand side by side, in the forms of the factors of each weight."""
        parts = iter(joined.split(self.sizes))
        return [[next(parts).view(factor.shape) for factor in own] for own in self.factors]

    @staticmethod
    def _joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x if x.ndim == 1 else x.reshape(-1) for x in tensors])


class SingularValueFactors(Factors):
    """Factors of singular values, in the basis of the shorter side.

    >>> layer = nn.Linear(3, 2)
    >>> layout = Layout.plain(tuple(layer.weight.shape))
    >>> SingularValueFactors(layer.weight.detach(), layout, every=100).values
    Parameter containing:
    tensor([1., 1.])
    """

    basis: Tensor

    def __init__(self, matrix: Tensor, layout: Layout, every: int) -> None:
        super().__init__()
        self.layout, self.every = layout, every
        self.tall = matrix.shape[-2] > matrix.shape[-1]
        basis = self._vectors(matrix)
        self.register_buffer("basis", basis)
        self.age = 0  # steps since they were attached
        self.values = nn.Parameter(torch.ones_like(basis[..., 0, :]), requires_grad=False)

    def _vectors(self, matrix: Tensor) -> Tensor:
        """Singular vectors of the shorter side."""
        return spectra.decomposition(self._wide(matrix))[0]

    def _wide(self, matrix: Tensor) -> Tensor:
        return precise(matrix.mT if self.tall else matrix)

    def forward(self, weight: Tensor) -> Tensor:
        """Multiply the weight by its factors."""
        return self._stretched(weight, self.values.detach())

    def _stretched(self, weight: Tensor, values: Tensor) -> Tensor:
        wide = self._wide(self.layout.matrix(weight))
        with torch.autocast(weight.device.type, enabled=False):
            # added to the weight, so that factors of one change no bit
            change = self.basis @ ((values - 1)[..., None] * (self.basis.mT @ wide))
        new = wide + change
        return self.layout.tensor((new.mT if self.tall else new).to(weight.dtype))

    def pulled_back(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """``dV = U m U' G``: the matrix of the factors is symmetric."""
        return self._stretched(gradient, self.values.detach()).to(weight.dtype)

    def sums(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """The chain rule gives for m the sum of U'dV U'V, over m, since dV = U m U' G."""
        weight, gradient = self._wide(weight), self._wide(gradient)
        product = (self.basis.mT @ weight) * (self.basis.mT @ gradient)
        return [product.sum(-1)]

    def undone(self, product: Tensor, before: Tensor) -> Tensor | None:
        """``U diag(1/m) U' W``, unless a factor is zero."""
        if not self.values.all():
            return None
        return self._stretched(product, 1 / self.values.detach())

    def state(self) -> State:
        """What a restart needs."""
        return {**super().state(), "age": self.age}

    def load(self, state: State) -> None:
        """Go on from a state of factors of the same shapes."""
        super().load(state)
        self.age = state["age"]

    def settle(self, weight: Tensor) -> bool:
        """Merge the factors and turn the basis when it is time."""
        self.age += 1
        if self.age % self.every:
            return False
        weight.copy_(self(weight))
        self.basis.copy_(self._vectors(self.layout.matrix(weight)))
        self.values.fill_(1.0)
        return True


class TrainedFactors(Treatment):
    """Makes the weight the product of a direction and factors, which a private optimizer steps.

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
        self.module = make(weight.matrix())
        self.direction = self.leaf.detach().clone()
        self.product: Tensor | None = None  # while the parameter holds the direction
        self.mark = WeightMark(self.leaf)
        self.was_loaded = False  # the model has loaded a state dict since the last step
        self.spared: tuple[Tensor | None, list[Tensor]] | None = (
            None  # a gradient, and factors' own
        )
        self.unclipped: _UnclippedPart | None = None
        self.sums: list[Tensor] = []  # of the step being taken: the factors times their gradients
        self.scale = 1.0  # how many times the gradient of the loss they are
        self.pending: list[Tensor] = []  # the factors' gradients

    # What a restart needs

    @property
    def memory(self) -> State:
        """The direction and the factors: the product alone does not give them back."""
        return {"direction": self.direction, **self.module.state()}

    @memory.setter
    def memory(self, memory: State) -> None:
        if memory:  # empty in states that were saved when the model's held the factors
            self.direction = spread_like(memory["direction"].to(self.leaf.dtype), self.leaf)
            self.direction = self.direction.to(self.leaf.device)
            self._convert_factors()  # here, since from now on the direction is of the weight's type
            with torch.no_grad():
                self.module.load(memory)

    def check_memory(self, memory: object) -> None:
        """Refuse a saved memory that is not one of this treatment of this weight."""
        if memory == {}:
            return
        name = f"the memory of {self.kind.__name__} for {self.weight.name}"
        form = {k: v.to("meta") if isinstance(v, Tensor) else 0 for k, v in self.memory.items()}
        _state.check_form(name, memory, form)

    # The direction, and writes to the weight by others

    def enter(self) -> None:
        """Let the parameter hold the direction, for the optimizer to step; keep the product."""
        self.unclipped = None
        if is_sharded(self.leaf):
            self.product = self.leaf.detach().clone()
            self.leaf.copy_(self.direction)
        else:  # they change places, and nothing is copied
            self.product, self.leaf.data = self.leaf.data, self.direction

    def leave(self) -> None:
        """Take the direction out of the parameter, which holds the product again."""
        assert self.product is not None
        if is_sharded(self.leaf):
            self.direction.copy_(self.leaf)
        else:
            self.direction, self.leaf.data = self.leaf.data, self.product
        self.product = None
        self.write()

    def put_back(self) -> None:
        """Let the parameter hold the product as it was, whatever has become of the direction."""
        assert self.product is not None
        if is_sharded(self.leaf):
            self.leaf.copy_(self.product)
        else:
            self.direction, self.leaf.data = self.leaf.data, self.product
        self.product, self.mark.version = None, -1

    def write(self) -> None:
        """Put the product into the parameter."""
        self.module.write(self.direction, self.leaf.detach())
        self.mark = WeightMark(self.leaf)

    def follow(self) -> bool:
        """Change type and device as the weight did, if it did."""
        leaf, old = self.leaf, self.direction
        if (leaf.dtype, leaf.device) == (old.dtype, old.device):
            return False
        expected = self.module(old).to(leaf)
        self._convert_factors()
        self.direction = old.to(leaf)
        self.mark = WeightMark(leaf)
        if not _is_equal(leaf, expected):
            self.mark.version = -1  # somebody has written it, too
        return True

    def _convert_factors(self) -> None:
        """Bring the factors to the weight's device and type, or to float32 if that has less."""
        dtype = torch.promote_types(self.leaf.dtype, torch.float32)
        self.module.to(self.leaf.device)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def was_written(self) -> bool:
        """Whether somebody else has written the weight since the last look; waited for."""
        same = self.mark.version == self.leaf._version and bool(self.mark.same(self.leaf).all())
        return not agreed(same, self.leaf)

    def adopt(self) -> bool:
        """Make a weight that somebody else has written the product; True if factors start anew.

        One that is the product to the bit is nothing new. What was loaded starts with factors of
        one; otherwise factors are kept, and the direction is what has this product with them.
        """
        was_loaded, self.was_loaded = self.was_loaded, False
        product = self.module(self.direction)
        if _is_equal(self.leaf, product):
            self.mark = WeightMark(self.leaf)
            return False
        direction = None if was_loaded else self.module.undone(self.leaf.detach(), self.direction)
        if direction is None:
            self.restart()
            return True
        if self.weight.layout.matrix(direction).ndim > 2:  # a stack, in which each is for itself
            layout = self.weight.layout
            new, old = (layout.matrix(each) for each in (direction, self.direction))
            same = layout.matrix(self.leaf.detach()) == layout.matrix(product)
            is_kept = same.flatten(-2).all(-1)[..., None, None]
            direction = layout.tensor(torch.where(is_kept, old, new))
        self.direction = direction
        self.mark = WeightMark(self.leaf)
        return False

    def restart(self) -> None:
        """Merge the factors: the direction is the weight, and they begin anew."""
        self.module.load(self.make(self.weight.matrix()).state())
        self.direction = self.leaf.detach().clone()
        self.mark = WeightMark(self.leaf)

    def parts(self, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction and the factors of a weight: those in use if it is the one in use."""
        product = self.module(self.direction)
        spread = spread_like(weight.to(product.device), product)
        if weight.dtype == product.dtype and _is_equal(spread, product):
            return self.direction.clone(), copy.deepcopy(dict(self.module.state_dict()))
        return weight, dict(self.make(self.weight.layout.matrix(weight)).state_dict())

    def metrics(self) -> dict[str, Tensor | float]:
        """The largest factor over the smallest, on the side where they differ most.

        Of a single factor of the matrix it is the factor; of a stack, the largest.
        """
        sides = [factor.abs() for factor in self.module.factors]
        if self.module.is_scalar:
            return {"gain": sides[0].amax()}
        return {"spread": torch.stack([side.amax() / side.amin() for side in sides]).amax()}

    # Gradients

    def _summed(self, gradient: Tensor) -> list[Tensor]:
        """The factors times their gradients, from the direction's gradient."""
        layout = self.module.layout
        return self.module.sums(
            precise(layout.matrix(self.direction)), precise(layout.matrix(gradient))
        )

    def gradients(self) -> list[Tensor]:
        """The factors' gradients follow from the weight's, and what clips were to spare."""
        if self.leaf.grad is None:
            return []
        pulled = self.module.pulled_back(self.direction, self.leaf.grad)
        (clipped,) = FactorRow([self.module]).gradients(self._summed(pulled))
        return self._with_unclipped(clipped)

    def _with_unclipped(self, gradients: list[Tensor]) -> list[Tensor]:
        if self.unclipped is None:
            return gradients
        return [a + b for a, b in zip(gradients, self.unclipped.lost, strict=True)]

    def is_ready(self) -> bool:
        """Whether to act; what a clip took is forgotten with the gradient from which it took it."""
        self.end_sparing()
        if self.unclipped is not None and not self.unclipped.belongs_to(self.leaf.grad):
            self.unclipped = None
        return super().is_ready()

    def begin_sparing(self) -> None:
        """Note the factors' gradients, which what now happens to the weight's is not to change."""
        if self.unclipped is not None and not self.unclipped.belongs_to(self.leaf.grad):
            self.unclipped = None
        self.spared = self.leaf.grad, self.gradients()

    def end_sparing(self) -> None:
        """Keep the factors' gradients as they were noted, if it is the same gradient still."""
        if self.spared is None:
            return
        (gradient, full), self.spared, self.unclipped = self.spared, None, None
        if full and gradient is not None and gradient is self.leaf.grad:
            lost = [a - b for a, b in zip(full, self.gradients(), strict=True)]
            self.unclipped = _UnclippedPart(gradient, gradient._version, lost)

    def pull_back(self, gradient: Tensor | None, added: Sequence[Tensor], scale: float) -> None:
        """Hand the optimizer the direction's gradient, and sum up that of the factors.

        ``added`` are matrices, ``scale`` is how many times the gradient of the loss they all are.
        """
        module, stored = self.module, self.module.layout.tensor
        parts = [] if gradient is None else [gradient]
        parts += [spread_like(stored(matrix), self.leaf) for matrix in added]
        self.pending, self.scale = [], scale
        if not parts:
            self.leaf.grad, self.sums = None, []
            return
        first, *others = (module.pulled_back(self.direction, part) for part in parts)
        for other in others:
            first.add_(other)
        self.sums = self._summed(first)
        self.leaf.grad = first.contiguous()  # as LBFGS expects it

    def note(self, gradients: list[Tensor]) -> None:
        """Note the factors' gradients, for their optimizer to follow."""
        gradients = self._with_unclipped(gradients)
        self.pending = gradients if self.scale == 1.0 else [g / self.scale for g in gradients]

    def finite_gradient(self) -> list[Tensor]:
        """Numbers that are finite if the gradient is: the factors' gradients are sums over it."""
        return self.pending or super().finite_gradient()


class WeightMark:
    """Tells whether a weight is as it was, at the price of reading it once.

    A write through ``.data`` moves no version, but one product of the weight with a vector of
    different entries; only a change in the last places of a few entries can escape it.

    >>> layer = nn.Linear(3, 2)
    >>> mark = WeightMark(layer.weight)
    >>> layer.weight.data[0, 0] += 1.0
    >>> mark.version == layer.weight._version, mark.same(layer.weight).all()
    (True, tensor(False))
    """

    def __init__(self, weight: Tensor) -> None:
        self.version, self.image = weight._version, _image(weight)

    def same(self, weight: Tensor) -> Tensor:
        """Where the weight has the same image."""
        return _image(weight) == self.image


def _image(weight: Tensor) -> Tensor:
    rows = precise(own_shard(weight.detach())).flatten(1)
    # from the left, the product reads memory in its order: twice as fast as from the right
    return _ramp(rows.shape[0], rows.dtype, rows.device) @ rows


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit, in all their shards."""
    return agreed(torch.equal(own_shard(a), own_shard(b)), a)


@lru_cache(maxsize=256)
def _ramp(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.linspace(0.75, 1.25, length, dtype=dtype, device=device)


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
        self.rows: list[tuple[list[TrainedFactors], FactorRow]] = []  # of those with gradients
        self.optimizer: Optimizer
        if isinstance(owner, SGD):
            self.optimizer = SGD(groups)
        else:
            # many tiny tensors: unfused, a step of theirs is all overhead
            fused = all(p.device.type == "cpu" for group in groups for p in group["params"]) or None
            self.optimizer = AdamW(groups, fused=fused)

    def state(self) -> State:
        """What the optimizer remembers of every factor, or will start at if it has not moved yet.

        A momentum of zero is as good as none, unless later gradients are dampened.
        """
        state = self.optimizer.state_dict()
        factors = [(t, f) for members in self.groups for t in members for f in t.module.factors]
        for number, (t, factor) in enumerate(factors):
            if number not in state["state"] and self._starts_at_zero(t):
                state["state"][number] = {k: _started(v) for k, v in self._form(factor).items()}
        return state

    def _starts_at_zero(self, t: TrainedFactors) -> bool:
        """Whether what will be remembered of a weight's factors is as good as zero now."""
        index = group_index(self.owner, t.leaf)
        if index is None or not isinstance(self.owner, SGD):
            return index is not None
        own = self.owner.param_groups[index]
        return bool(own["momentum"]) and not own["dampening"]

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

    def _options(self, own: Mapping[str, Any], rate: float) -> dict[str, Any]:
        """Learning rate and momentum of factors, from what the group of their weights has now."""
        followed = own if self.leader is self.owner else self.leader.param_groups[0]
        options: dict[str, Any] = {"lr": rate * cast(float, learning_rate(followed))}
        if isinstance(self.owner, SGD):
            return options | {key: own[key] for key in ("momentum", "dampening", "nesterov")}
        return options | {"betas": _betas(own.get("betas"))}

    def note_gradients(self, treatments: Iterable[TrainedFactors]) -> None:
        """Let factors have their gradients, from the sums of each."""
        alike: dict[tuple[torch.device, torch.dtype], list[TrainedFactors]] = {}
        for t in treatments:
            if t.sums:
                alike.setdefault((t.sums[0].device, t.sums[0].dtype), []).append(t)
        if list(alike.values()) != [some for some, _ in self.rows]:
            self.rows = [(some, FactorRow([t.module for t in some])) for some in alike.values()]
        for some, row in self.rows:
            gradients = row.gradients([each for t in some for each in t.sums])
            for t, own in zip(some, gradients, strict=True):
                t.note(own)

    @torch.no_grad()
    def step(self, acting: set[Treatment]) -> list[TrainedFactors]:
        """Step the factors of the acting treatments, which it gives, by the gradients noted.

        That is one step, unless weights whose factors are one group here were put into different
        groups since: then one for each of these.
        """
        groups = {id(p): group for group in self.owner.param_groups for p in group["params"]}
        waiting = [[t for t in members if t in acting] for members in self.groups]
        moving = [t for members in waiting for t in members]
        while any(waiting):
            for number, members in enumerate(waiting):
                if not members:
                    continue
                own = groups[id(members[0].leaf)]
                self.optimizer.param_groups[number].update(self._options(own, members[0].rate))
                for t in (t for t in members if groups[id(t.leaf)] is own):
                    for factor, gradient in zip(t.module.factors, t.pending, strict=False):
                        factor.grad = gradient
                waiting[number] = [t for t in members if groups[id(t.leaf)] is not own]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return moving

    def take_back(self, treatment: TrainedFactors) -> None:
        """Undo the last step of a weight's factors, and forget what is remembered of them."""
        for some, row in self.rows:
            for t, before in zip(some, row.apart(row.values), strict=True):
                if t is treatment:
                    for factor, value in zip(t.module.factors, before, strict=True):
                        factor.copy_(value)
        self.forget(treatment)

    def forget(self, treatment: TrainedFactors) -> None:
        """Forget what the optimizer remembers of a weight's factors."""
        for factor in treatment.module.factors:
            self.optimizer.state.pop(factor, None)

    def follow(self, treatment: TrainedFactors) -> None:
        """Change the type and device of what is remembered as the factors did."""
        for factor in treatment.module.factors:
            for key, value in self.optimizer.state.get(factor, {}).items():
                if isinstance(value, Tensor) and value.shape == factor.shape and key != "step":
                    self.optimizer.state[factor][key] = value.to(factor)


def _started(form: Tensor | float) -> Tensor:
    """What an optimizer remembers of a factor at first, from its form."""
    return torch.zeros_like(form) if isinstance(form, Tensor) else torch.tensor(form)


def _betas(betas: Any) -> tuple[float, float]:
    """The first two betas, should an optimizer have others than Adam's; or Adam's defaults."""
    try:
        first, second = (float(beta) for beta in betas[:2])
    except (TypeError, ValueError):
        return 0.9, 0.999
    return (first, second) if 0 <= min(first, second) <= max(first, second) < 1 else (0.9, 0.999)
