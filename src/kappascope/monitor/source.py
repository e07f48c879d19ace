"""The tensors of one reading: what a step is remembered by, and what is measured after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kappascope.model.matrices import Unit
from kappascope.model.sharded import whole
from kappascope.monitor.survey import Item, Survey, on_host, weights_of
from kappascope.monitor.swallowed import intended
from kappascope.monitor.updates import decoupled_decay

MOMENTA = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True)
class Rule:
    """How a parameter is stepped: the class of its optimizer, its group, and its state."""

    optimizer: str
    group: Mapping[str, Any]
    state: Mapping[str, Tensor]


@dataclass
class Captured:
    """What a due step needs to remember from before it."""

    items: list[Item]
    stepped: set[str] = field(default_factory=set)  # names of what has a gradient now
    before: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AroundStep:
    """One matrix around a step, as far as it is known."""

    after: Tensor
    before: Tensor | None
    gradient: Tensor | None
    momentum: Tensor | None


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a reading, by path and by name; on the host once they are measured."""

    survey: Survey
    captured: Captured | None
    stepped: Mapping[str, Tensor]  # what an optimizer steps, by plain name: parameters, or copies
    rules: Mapping[str, Rule]
    held: Mapping[Any, Tensor] = field(default_factory=dict)

    def _tensors(self, items: Sequence[Item], vectors: bool) -> dict[Any, Tensor]:
        """Everything that some items need, where it is."""
        tensors: dict[Any, Tensor] = dict(weights_of(self.survey, items))
        if self.captured is None:
            return tensors
        names = [item.name for item in items if item.unit is not None]
        if vectors:
            names += [n for n, p in self.survey.parameters.items() if p.ndim < 2]
        for name in names:
            if name in self.captured.gradients:
                tensors["gradient", name] = self.captured.gradients[name]
            if name in self.captured.before:
                tensors["before", name] = self.captured.before[name]
                tensors["after", name] = self.stepped[name].detach()
                for key, value in self.rules[name].state.items():
                    tensors[f"state {key}", name] = value
        return tensors

    def on_host(self, items: Sequence[Item], vectors: bool) -> StepTensors:
        """The same with all tensors of some items in the memory of the host."""
        return replace(self, held=on_host(self._tensors(items, vectors)))

    def gathered(self, item: Item | None) -> StepTensors:
        """The same with the whole tensors of one item, of which each process has a part.

        Without an item those of vectors. Every process calls it, in the same order.
        """
        tensors = self._tensors([] if item is None else [item], vectors=item is None)
        return replace(self, held=on_host({key: whole(t) for key, t in tensors.items()}))

    def read(self, path: Any) -> Tensor:
        """The weight that lies at a path of the model."""
        return self.held[path]

    def is_stepped(self, item: Item) -> bool:
        """Whether the step has changed a parameter of an item, so that it need not be compared."""
        if self.captured is None:
            return False
        names = (
            [item.name]
            if item.layer is None
            else [part.whole or part.name for part in item.layer.members]
        )
        return any(name in self.captured.stepped for name in names)

    def cut(self, item: Item, what: str) -> dict[str, Tensor]:
        """Cut a tensor that has the shape of an item's weight into its matrices, by name."""
        tensor = self.held.get((what, item.name))
        if what == "momentum":
            momenta = (self.held.get((f"state {key}", item.name)) for key in MOMENTA)
            tensor = next((each for each in momenta if each is not None), None)
        if tensor is None or item.unit is None:
            return {}
        pieces = item.unit.layout.cut(tensor)
        return {p.name: m for p, (_, m) in zip(item.unit.parts, pieces, strict=True)}

    def around(self, name: str, when: str) -> Tensor | None:
        """A parameter "before" or "after" the step, or its "gradient", if it was captured."""
        return self.held.get((when, name))

    def intended(self, name: str, sample: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The step that the optimizer's state asks for, of a sample of a parameter's entries."""
        rule, gradient = self.rules.get(name), self.around(name, "gradient")
        before = self.around(name, "before")
        if rule is None or gradient is None or before is None:
            return None
        held = {key: self.held[f"state {key}", name] for key in rule.state}
        state = {k: sample(t) if t.shape == gradient.shape else t for k, t in held.items()}
        return intended(rule.optimizer, rule.group, state, sample(before), sample(gradient))

    def is_at_rest(self, name: str) -> bool:
        """Whether the learning rate is zero: nothing is lost where nothing is meant to move."""
        rule = self.rules.get(name)
        rate = None if rule is None else rule.group.get("lr")
        return isinstance(rate, int | float) and rate == 0

    def decay(self, name: str) -> float | None:
        """The share that a step takes away from a parameter, where decay is decoupled."""
        rule = self.rules.get(name)
        return None if rule is None else decoupled_decay(rule.optimizer, rule.group)

    def vectors(self) -> list[str]:
        """The names of gains and biases that were captured."""
        names = [key[1] for key in self.held if isinstance(key[0], str) and key[0] == "before"]
        return [n for n in names if self.survey.parameters[n].ndim < 2]

    def unit_of(self, name: str) -> Unit | None:
        """The unit whose weight has this name."""
        return next(
            (i.unit for i in self.survey.items if i.unit is not None and i.name == name), None
        )
