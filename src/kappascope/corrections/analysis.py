"""What corrections need to know of a model and its optimizers, found out once per attach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections.gauge import FreeSides, free_sides
from kappascope.model.tensors import refuse_meta
from kappascope.model.weights import (
    LiveWeight,
    Where,
    live_weights,
    name_test,
    unwrapped,
    why_no_map,
)


class AnalysedModel:
    """The weights of a model, the optimizers that train them, and where factors are free.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> from torch.optim import SGD
    >>> analysed = AnalysedModel(model, [SGD(model.parameters())])
    >>> [weight.name for weight in analysed.weights]
    ['0.weight', '2.weight']
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        refuse_meta(model)
        self.model, self.optimizers = unwrapped(model), optimizers
        self.weights = live_weights(self.model)
        self._owners = {
            id(parameter): optimizer
            for optimizer in reversed(optimizers)  # the first that has a parameter counts
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @cached_property
    def free_sides(self) -> Mapping[str, FreeSides]:
        """The sides of weights that may have factors, by name, where that is not both."""
        return free_sides(self.model, self.weights)

    def owner(self, leaf: Tensor) -> Optimizer | None:
        """The optimizer that steps the parameter behind a weight, if one does."""
        return self._owners.get(id(leaf))

    def selected(
        self, where: Where, objection: Callable[[LiveWeight, AnalysedModel], str | None]
    ) -> tuple[list[LiveWeight], dict[str, str]]:
        """Choose the weights to correct, with the reasons why the others are left out.

        What ``where`` names must be possible; without it, what cannot be corrected is left out.
        """
        names = [name for weight in self.weights for name, *_ in weight.uses]
        is_named = name_test(where, names)
        chosen, left_out = [], {}
        for weight in self.weights:
            if not any(is_named(name) for name, *_ in weight.uses):
                left_out[weight.name] = "not selected"
                continue
            reason = self._why_untrained(weight)
            if reason is None and where is None:
                reason = why_no_map(weight)
            reason = reason or objection(weight, self)
            if reason is None:
                chosen.append(weight)
            elif where is None:
                left_out[weight.name] = reason
            else:
                refusal = f"{weight.name} cannot be corrected: {reason}"
                raise ValueError(f"{refusal}; leave it out of where=")
        if not chosen:
            why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "no matrix"
            raise ValueError(f"{type(self.model).__name__} has no weight to correct ({why})")
        return chosen, left_out

    def _why_untrained(self, weight: LiveWeight) -> str | None:
        """Why no optimizer trains this weight, if none does."""
        _, module, attribute = weight.uses[0]
        leaves = weight.leaves
        hooked = attribute.endswith(("_orig", "_v", "_g")) and hasattr(module, attribute[:-2])
        if hooked or (attribute.endswith("_orig") and hasattr(module, attribute[:-5])):
            return "a hook makes the layer's weight out of it"
        if not leaves[-1].is_floating_point():
            return f"its type is {leaves[-1].dtype}"
        if not all(leaf.requires_grad for leaf in leaves):
            return "it is frozen"
        if leaves[-1].numel() == 0:
            return "it is empty"
        return "no optimizer has it" if self.owner(leaves[-1]) is None else None
