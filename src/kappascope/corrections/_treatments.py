"""What one correction does to one weight around every step of its optimizer.

It adds to the gradient before the step (:class:`AddedGradient`), rewrites the weight after it
(:class:`Rewrite`), moves it by a step of its own (:class:`DecoupledStep`), or trains factors of
it (:mod:`kappascope.corrections._factors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kappascope.corrections import _state
from kappascope.corrections.optimizers import learning_rate
from kappascope.matrix import spectra
from kappascope.model.sharded import agreed, is_sharded, own_shard, whole
from kappascope.model.weights import LiveWeight, precise

State: TypeAlias = dict[str, Any]

RATE_IF_UNKNOWN = 1e-3  # AdamW's own default


@dataclass(frozen=True)
class OptimizerStep:
    """One call of ``optimizer.step()``: its number from 1, the weight's group, the scaler's factor.

    >>> OptimizerStep(1, {"lr": 0.1, "maximize": True}).gradient_scale
    -1.0
    """

    index: int
    group: Mapping[str, Any]
    factor: float = 1.0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the weight's parameter group; ``RATE_IF_UNKNOWN`` if it has none."""
        rate = learning_rate(self.group)
        return RATE_IF_UNKNOWN if rate is None else rate

    @property
    def gradient_scale(self) -> float:
        """The factor between the gradient that the optimizer expects and that of the loss.

        A fused optimizer takes what a scaler has not unscaled, and one that maximizes takes the
        gradient of what is to rise.
        """
        return -self.factor if self.group.get("maximize") else self.factor


class Treatment:
    """What happens to one weight around every step of its optimizer.

    >>> from kappascope.corrections import NormPin
    >>> model = torch.nn.Linear(2, 2)
    >>> with NormPin().attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as handle:
    ...     [treatment.kind.__name__ for treatment in handle.treatments]
    ['NormPin']
    """

    follows_rate: bool = False  # whether it needs the learning rate of the weight
    is_done_elsewhere: bool = False  # by the process that owns the weight, for all copies
    beside: tuple[Tensor, ...] = ()  # what it writes beside the weight, as a bias
    acts_on_direction: bool = False  # on what factors multiply, where the weight has factors
    _memory: State
    _memory_home: tuple[torch.device, torch.dtype] | None  # None: not known yet

    def __init__(
        self,
        kind: type,
        weight: LiveWeight,
        memory: State,
        grown: Callable[[Tensor], State] = lambda matrix: {},
    ) -> None:
        self.kind = kind  # of correction: a weight is treated once by each
        self.weight, self.leaves = weight, weight.leaves
        self.leaf = self.leaves[-1]  # the weight itself, unless it is made of others
        self.memory, self.begun = memory, dict(memory)
        self.grown = grown  # the form of what is in the memory once the matrix was looked at
        self.shared: dict[tuple[str, ...], tuple[Tensor, int]] = {}  # tensors that all copies have

    @property
    def memory(self) -> State:
        """What has to survive a restart (references, warm starts), on the weight's device."""
        home = self.leaf.device, torch.promote_types(self.leaf.dtype, torch.float32)
        if self._memory_home != home:
            if self._memory_home is not None and self._memory_home[1] != home[1]:
                # warm starts are of the type that the matrix had
                self._memory = {k: v for k, v in self._memory.items() if k in self.begun}
            self._memory, self._memory_home = _on_device(self._memory, home[0]), home
        return self._memory

    @memory.setter
    def memory(self, memory: State) -> None:
        self._memory, self._memory_home = memory, None

    @property
    def grown_form(self) -> State:
        """The form of what the memory holds beside its beginning, once the matrix was looked at."""
        dtype = torch.promote_types(self.leaf.dtype, torch.float32)
        return self.grown(torch.empty(self.weight.layout.shape, dtype=dtype, device="meta"))

    @property
    def was_looked_at(self) -> bool:
        """Whether the memory holds all that a look at the matrix leaves there."""
        return self.grown_form.keys() <= self.memory.keys()

    def check_memory(self, memory: object) -> None:
        """Refuse a saved memory that is not one of this treatment of this weight."""
        grown = self.grown_form
        name = f"the memory of {self.kind.__name__} for {self.weight.name}"
        _state.check_form(name, memory, self.begun | grown, optional=grown)

    def is_ready(self) -> bool:
        """Whether to act on the step about to be taken; a weight may be frozen for a while."""
        return all(leaf.requires_grad for leaf in self.leaves)

    def before(self, step: OptimizerStep) -> None:
        """Act when gradients are complete and the weight has not moved yet."""

    def finite_gradient(self) -> list[Tensor]:
        """Numbers that are finite if the gradient is, unless a sum overflows."""
        gradients = [own_shard(leaf.grad) for leaf in self.leaves if leaf.grad is not None]
        sums = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        return sums or [torch.zeros((), device=self.leaf.device)]

    def has_finite_gradient(self) -> bool:
        """Whether the gradient that the optimizer is about to follow is finite, looked at anew."""
        return all(leaf.grad is None or is_surely_finite(leaf.grad) for leaf in self.leaves)

    def after(self, step: OptimizerStep) -> bool:
        """Act when the weight has moved; False if the result would not have been finite."""
        return True

    def metrics(self) -> dict[str, Tensor | float]:
        """Numbers about the last step, by what they measure."""
        return {}


def _on_device(value: Any, device: torch.device) -> Any:
    """Move all tensors of a nested state to one device."""
    if isinstance(value, dict):
        return {key: _on_device(inner, device) for key, inner in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def is_finite(x: Tensor) -> Tensor:
    """Whether every entry is finite, as a tensor: nobody waits for the answer.

    The sum tells, thirty times sooner than a look at every entry; one that overflows counts as not
    finite.

    >>> is_finite(torch.tensor([3.0, 3.0])), is_finite(torch.tensor([torch.nan]))
    (tensor(True), tensor(False))
    """
    x = own_shard(x)
    return torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)))


def is_surely_finite(x: Tensor) -> bool:
    """Whether every entry is finite, of all shards; waited for.

    >>> is_surely_finite(torch.tensor([3e38, torch.inf]))
    False
    """
    return agreed(bool(torch.isfinite(own_shard(x)).all()), x)


def _chosen(flag: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Select one of two tensors by a flag on its device; where() takes twice the time."""
    return torch.index_select(torch.stack([no, yes]), 0, flag.long().view(1))[0]


class AddedGradient(Treatment):
    """Adds ``gradient(read, memory)`` to the gradient of the weight, unless that is ``None``.

    ``read`` gives the matrix: of a parametrized weight that takes time, and is not always needed.

    >>> from kappascope.model.weights import live_weights
    >>> layer = torch.nn.Linear(2, 2)
    >>> decay = AddedGradient(object, live_weights(layer)[0], lambda read, memory: 0.1 * read(), {})
    >>> decay.before(OptimizerStep(1, {"lr": 0.1}))
    >>> torch.equal(layer.weight.grad, 0.1 * layer.weight)
    True
    """

    def __init__(
        self,
        kind: type,
        weight: LiveWeight,
        gradient: Callable[[Callable[[], Tensor], State], Tensor | None],
        memory: State,
        grown: Callable[[Tensor], State] = lambda matrix: {},
        *,
        price: Callable[[State], Tensor] | None = None,
    ) -> None:
        super().__init__(kind, weight, memory, grown)
        self.gradient = gradient
        self.price = price  # the penalty of every matrix, from what is remembered of it
        self.was_finite: Tensor | bool = True
        self.sizes: tuple[Tensor, Tensor] | None = None  # of what was added, and of the rest

    def before(self, step: OptimizerStep) -> None:
        """Add the gradient, unless it is not finite or the weight has no decomposition."""
        if (gradient := self.added(step)) is not None:
            self.weight.add_gradient(gradient)

    def added(self, step: OptimizerStep) -> Tensor | None:
        """What to add to the gradient of the weight: zeros, should it not be finite."""
        return self.taken(step, *self.computed())

    def computed(self) -> tuple[int, Tensor | None]:
        """The gradient, and what there is: 0 nothing, 1 a gradient, 2 no decomposition."""
        try:
            gradient = self.gradient(lambda: precise(self.weight.matrix()), self.memory)
        except spectra.LinAlgError:
            return 2, None
        return int(gradient is not None), gradient

    def taken(self, step: OptimizerStep, status: int, gradient: Tensor | None) -> Tensor | None:
        """What to add, from what was computed here or elsewhere."""
        self.sizes, self.was_finite = None, status != 2
        if gradient is None:
            return None
        self.was_finite = is_finite(gradient)
        scale = step.gradient_scale
        scaled = gradient if scale == 1.0 else gradient * scale
        added = _chosen(self.was_finite, scaled, torch.zeros_like(scaled))
        if (rest := self.leaf.grad) is not None and self.weight.parametrization is None:
            self.sizes = torch.linalg.vector_norm(added), whole(torch.linalg.vector_norm(rest))
        return added

    def metrics(self) -> dict[str, Tensor | float]:
        """Kappa and the penalty where they are known, and the share of the gradient."""
        numbers: dict[str, Tensor | float] = {}
        if (ends := self.memory.get("ends")) is not None:
            numbers["kappa"] = (ends["values"][..., 0] / ends["values"][..., -1]).amax()
            if self.price is not None:
                numbers["penalty"] = self.price(self.memory).sum()
        if self.sizes is None:
            return numbers | {"gradient_share": 0.0}
        added, rest = self.sizes
        return numbers | {"gradient_share": added / (added + rest).clamp(min=1e-45)}

    def after(self, step: OptimizerStep) -> bool:
        """Whether the gradient was finite."""
        return bool(self.was_finite)


@dataclass(frozen=True, eq=False)
class Rescaled:
    """What a rule of :class:`Rewrite` gives if it only multiplies: the factor, and no matrix.

    Nothing is copied then. The flag tells whether the matrix is finite as it is.

    >>> Rescaled(torch.tensor(2.0), is_finite=torch.tensor(True)).of(torch.eye(1))
    tensor([[2.]])
    """

    factor: Tensor
    is_finite: Tensor

    def of(self, matrix: Tensor) -> Tensor:
        """The matrix times the factor, in float32 at least."""
        wide = precise(matrix)
        return wide * self.factor.to(wide)

    def multiply(self, matrix: Tensor) -> None:
        """Multiply a matrix of float32 at least in place, unless it is not finite."""
        matrix.mul_(torch.where(self.is_finite, self.factor, 1.0).to(matrix))


class Rewrite(Treatment):
    """Replaces the matrix as stored by ``rule(matrix, step, memory)``, unless that is ``None``.

    >>> from kappascope.model.weights import live_weights
    >>> layer = torch.nn.Linear(2, 2)
    >>> clipped = Rewrite(object, live_weights(layer)[0], lambda matrix, *_: matrix.clamp(0, 0), {})
    >>> clipped.after(OptimizerStep(1, {"lr": 0.1})), layer.weight.abs().max().item()
    (True, 0.0)
    """

    def __init__(
        self,
        kind: type,
        weight: LiveWeight,
        rule: Callable[[Tensor, OptimizerStep, State], Tensor | Rescaled | None],
        memory: State,
        grown: Callable[[Tensor], State] = lambda matrix: {},
        *,
        acts_on_direction: bool = False,
    ) -> None:
        super().__init__(kind, weight, memory, grown)
        self.rule, self.acts_on_direction = rule, acts_on_direction
        self.count = 0  # of rewrites since it was attached

    def after(self, step: OptimizerStep) -> bool:
        """Write the new matrix, unless it would not be finite or the old one is not already."""
        return bool(self.rewrite(step))

    def rewrite(self, step: OptimizerStep) -> Tensor:
        """Rewrite the weight; whether that was possible, as a tensor that nobody waits for."""
        matrix = self.weight.matrix()
        try:
            new = self.rule(matrix, step, self.memory)
        except spectra.LinAlgError:
            return torch.tensor(False, device=matrix.device)
        if new is None:
            return torch.tensor(True, device=matrix.device)
        self.count += 1
        if isinstance(new, Rescaled):
            if self._is_stored_in(matrix) and precise(matrix) is matrix:
                new.multiply(matrix)
                return new.is_finite
            new = new.of(matrix)
        rounded = new.to(matrix.dtype)
        finite = is_finite(rounded)
        if self.weight.parametrization is None:
            self.weight.write(_chosen(finite, rounded, matrix))
        elif finite:  # what makes the weight need not give the same one back
            self.weight.write(rounded)
        return finite

    def _is_stored_in(self, matrix: Tensor) -> bool:
        """Whether what is written into the matrix is written into the weight."""
        is_plain = self.weight.parametrization is None and not is_sharded(self.leaf)
        return is_plain and matrix.data_ptr() == self.leaf.data_ptr()

    def metrics(self) -> dict[str, Tensor | float]:
        """How often the weight was rewritten since it was attached."""
        return {"rewrites": self.count}


MAX_HALVINGS = 30  # of a step through what makes a weight, before it is given up


class DecoupledStep(Treatment):
    """Moves the weight by ``change(matrix, rate, memory)``, unless that is ``None``.

    It acts on the first step and ``every`` so many later, on a matrix looked at then, with ``rate``
    as many times the learning rate (of an optimizer that tells none, ``RATE_IF_UNKNOWN``). Through
    what makes a weight (a parametrization) it goes by the chain rule, halved until the weight moves
    no farther than it was to.

    >>> from kappascope.model.weights import live_weights
    >>> layer = torch.nn.Linear(2, 2)
    >>> before = layer.weight.detach().clone()
    >>> decay = DecoupledStep(object, live_weights(layer)[0], lambda w, rate, _: -rate * w, {})
    >>> decay.after(OptimizerStep(1, {"lr": 0.5})), torch.equal(layer.weight, 0.5 * before)
    (True, True)
    """

    def __init__(
        self,
        kind: type,
        weight: LiveWeight,
        change: Callable[[Tensor, float, State], Tensor | None],
        memory: State,
        grown: Callable[[Tensor], State] = lambda matrix: {},
        *,
        every: int = 1,
        price: Callable[[State], Tensor | None] | None = None,
    ) -> None:
        super().__init__(kind, weight, memory | {"wait": 0}, grown)  # so many steps, from the next
        self.change, self.every, self.price = change, every, price
        self.count = 0  # of steps since it was attached
        self.sizes: tuple[Tensor, Tensor] | None = None  # of the penalty's gradient and the loss's

    def after(self, step: OptimizerStep) -> bool:
        """Move the weight when it is time; False if it would not be finite."""
        memory = self.memory
        if memory["wait"]:
            memory["wait"] -= 1
            return True
        rate = self.every * step.learning_rate
        matrix = self.weight.matrix()
        wide = precise(matrix)
        try:
            change = self.change(wide, rate, memory)
        except spectra.LinAlgError:  # tried again at the next step
            return False
        memory["wait"], self.sizes = self.every - 1, None
        if change is None:
            return True
        self.count += 1
        if (gradient := self.leaf.grad) is not None and self.weight.parametrization is None:
            own = torch.linalg.vector_norm(change) / (rate or 1.0)
            self.sizes = own, whole(torch.linalg.vector_norm(gradient))
        if self.weight.parametrization is not None:
            return bool(is_finite(change)) and self._move_leaves(wide, change)
        moved = (wide + change).to(matrix.dtype)
        finite = bool(is_finite(moved))
        if finite:
            self.weight.write(moved)
        return finite

    def metrics(self) -> dict[str, Tensor | float]:
        """Kappa and the penalty as last looked at, and the share of the step taken for it.

        The share is the penalty's part of the sum of both gradients' norms; what a bound has cut
        off its step is not in it.
        """
        numbers: dict[str, Tensor | float] = {}
        if (values := self.memory.get("values")) is not None:
            tiny = torch.finfo(values.dtype).tiny
            numbers["kappa"] = (values[..., 0] / values[..., -1].clamp(min=tiny)).amax()
        penalty = self.price(self.memory) if self.price and self.was_looked_at else None
        if penalty is not None:
            numbers["penalty"] = penalty.sum()
        if self.is_done_elsewhere:  # and the change is not known here
            return numbers
        if self.sizes is None:
            return numbers | {"gradient_share": 0.0}
        own, rest = self.sizes
        return numbers | {"gradient_share": own / (own + rest).clamp(min=1e-45)}

    def _move_leaves(self, matrix: Tensor, change: Tensor) -> bool:
        """Move what the weight is made of; back again where no part of the way is short enough."""
        with torch.enable_grad():
            made = self.weight.read()
        flow = self.weight.layout.tensor(change).to(made.dtype)
        parts = torch.autograd.grad(made, self.leaves, flow, allow_unused=True)
        before = [leaf.detach().clone() for leaf in self.leaves]
        farthest, part_of_it = torch.linalg.vector_norm(change), 1.0
        for _ in range(MAX_HALVINGS):
            for leaf, old, part in zip(self.leaves, before, parts, strict=True):
                if part is not None:
                    leaf.copy_(old + part_of_it * part)
            moved = torch.linalg.vector_norm(precise(self.weight.matrix()) - matrix)
            if bool(moved <= farthest):
                return True
            part_of_it /= 2
        for leaf, old in zip(self.leaves, before, strict=True):
            leaf.copy_(old)
        return True
