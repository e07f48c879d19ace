"""A step of a penalty's own, beside the optimizer's: decoupled, as AdamW's weight decay is.

What is added to a gradient comes out of Adam as a step of another size and direction: of a penalty
that lies on one singular pair, every entry of the weight is moved by the learning rate. A decoupled
step moves the weight by the learning rate times the penalty's gradient whichever optimizer trains
it, so how far it goes is known and can be bounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kappascope.corrections.treatments import OptimizerStep, State, Treatment, is_finite
from kappascope.matrix import spectra
from kappascope.model.sharded import whole
from kappascope.model.weights import LiveWeight, precise

RATE_IF_UNKNOWN = 1e-3  # AdamW's own default
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
        price: Callable[[State], Tensor] | None = None,
    ) -> None:
        super().__init__(kind, weight, memory | {"wait": 0}, grown)  # so many steps, from the next
        self.change, self.every, self.price = change, every, price
        self.count = 0  # of steps since it was attached
        self.sizes: tuple[Tensor, Tensor] | None = None  # of the penalty's gradient and the loss's

    def after(self, step: OptimizerStep) -> bool:
        """Move the weight when it is time; False if it would not be finite."""
        memory, rate = self.memory, step.group.get("lr")
        if memory["wait"]:
            memory["wait"] -= 1
            return True
        rate = self.every * float(RATE_IF_UNKNOWN if rate is None else rate)
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
        found: dict[str, Tensor | float] = {}
        if (values := self.memory.get("values")) is not None:
            tiny = torch.finfo(values.dtype).tiny
            found["kappa"] = (values[..., 0] / values[..., -1].clamp(min=tiny)).amax()
            if self.price is not None:
                found["penalty"] = self.price(self.memory).sum()
        if self.is_done_elsewhere:  # and the change is not known here
            return found
        if self.sizes is None:
            return found | {"gradient_share": 0.0}
        own, rest = self.sizes
        return found | {"gradient_share": own / (own + rest).clamp(min=1e-45)}

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
