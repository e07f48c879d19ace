"""What corrections need to know of a model and its optimizers, found out once per attach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections.gauge import FreeSides, free_sides
from kappascope.corrections.selection import MeantWeights, Where
from kappascope.model.tensors import refuse_meta
from kappascope.model.weights import LiveWeight, live_weights, unwrapped, why_no_map
from kappascope.refusal import Refusal

Chosen = TypeVar("Chosen")
Objection: TypeAlias = Callable[[LiveWeight, "AnalysedModel"], str | None]


class NothingToCorrect(Refusal, ValueError):  # noqa: N818 - it refuses, as its parent does
    """A model, or what was selected of it, has no weight that a correction could act on.

    >>> raise NothingToCorrect(2, "LayerNorm", "no weight to correct (no matrix)", "pass another")
    Traceback (most recent call last):
    kappascope.corrections.analysis.NothingToCorrect: LayerNorm: no weight to correct (no ...
    """


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
        self,
        settings: Sequence[tuple[Where | None, Chosen, Objection | None]],
        exclude: Where | None = None,
    ) -> tuple[list[tuple[LiveWeight, Chosen]], dict[str, str]]:
        """Choose for every weight the first setting that means it; or say why it is left out.

        A setting is what it means, what is chosen for that, and what may object to a weight
        (``None``: the weight is left alone). What is meant by its name must be possible; a pattern,
        and ``None``, which means everything, skip what is not.
        """
        names = [name for weight in self.weights for name, *_ in weight.uses]
        meant = [
            where if where is None else MeantWeights.of(where, names) for where, *_ in settings
        ]
        excluded = exclude if exclude is None else MeantWeights.of(exclude, names, "exclude=")
        chosen, left_out = [], {}
        for weight in self.weights:
            uses = [weight if each is None else each.uses(weight) for each in meant]
            first = next((i for i, found in enumerate(uses) if found is not None), None)
            if excluded is not None and excluded.uses(weight) is not None:
                left_out[weight.name] = "excluded"
                continue
            if first is None or (objection := settings[first][2]) is None:
                left_out[weight.name] = "not selected"
                continue
            its_uses, where = uses[first], meant[first]
            named = where is not None and where.names_it(weight)
            reason = self._why_untrained(weight)
            if reason is None and not named and its_uses is not None:
                reason = why_no_map(its_uses)
            reason = reason or objection(weight, self)
            if reason is None:
                chosen.append((weight, settings[first][1]))
            elif not named:
                left_out[weight.name] = reason
            else:
                refusal = f"{weight.name} cannot be corrected: {reason}"
                raise ValueError(f"{refusal}; leave it out of where=")
        if not chosen:
            why = _summary(left_out) or "no matrix"
            wrong, advice = f"no weight to correct ({why})", "choose others by where="
            raise NothingToCorrect(2, type(self.model).__name__, wrong, advice)
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


def _summary(left_out: Mapping[str, str]) -> str:
    """Why weights were left out, each reason with the first that it holds for and how many more.

    >>> _summary({"a": "it is frozen", "b": "it is frozen", "c": "it is empty"})
    'a and 1 more: it is frozen; c: it is empty'
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    more = {reason: f" and {len(its) - 1} more" if its[1:] else "" for reason, its in names.items()}
    return "; ".join(f"{its[0]}{more[reason]}: {reason}" for reason, its in names.items())
