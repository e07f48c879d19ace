"""All that one correction does to the weights of one optimizer, and the state that it goes on from.

A state has the steps taken, what every treatment remembers (references, warm starts, directions and
factors) and the state of the factors' private optimizers. A handle saves that of all its
attachments, and every optimizer carries that of its own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from kappascope.corrections import _state
from kappascope.corrections._factors import FactorOptimizer, TrainedFactors
from kappascope.corrections._treatments import State, Treatment


@dataclass(eq=False)
class Attachment:
    """All that one correction does to the weights of one optimizer.

    ``leader`` is the optimizer whose learning rate factors follow. ``refused`` counts by weight the
    steps that were not taken; a handle shares one counter among its attachments.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    >>> Attachment(optimizer, optimizer).steps
    0
    """

    optimizer: Optimizer
    leader: Optimizer
    treatments: list[Treatment] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    factors: FactorOptimizer | None = None
    steps: int = 0
    seconds: float = 0.0  # in all steps since it was attached, with what else is attached here

    @property
    def factored(self) -> list[TrainedFactors]:
        """The treatments that train factors."""
        return [] if self.factors is None else list(self.factors.treatments)

    def follow(self, treatment: TrainedFactors) -> None:
        """Let factors and what is remembered of them change type and device as the weight did."""
        if treatment.follow() and self.factors is not None:
            self.factors.follow(treatment)

    def take_up(self, treatment: TrainedFactors) -> None:
        """Make a weight that somebody else has written the product of factors."""
        if treatment.adopt() and self.factors is not None:
            self.factors.forget(treatment)

    def take_up_what_others_wrote(self) -> None:
        """Look at every weight with factors, outside of a step, before directions are moved."""
        for treatment in self.factored:
            self.follow(treatment)
            if treatment.was_written():
                self.take_up(treatment)
            treatment.was_loaded = False

    def refuse(self, treatment: Treatment) -> None:
        """Count a step that is not taken, and warn of the first of every weight."""
        name = treatment.weight.name
        if not self.refused[name]:
            text = f"a step of {treatment.kind.__name__} was refused: {name} would not be finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.refused[name] += 1


def state_of(attachments: Sequence[Attachment]) -> State:
    """What the model's and the optimizers' own states do not hold, in the tensors that are in use.

    It has the same keys before the first step as after it, for a distributed checkpoint loads what
    is in the state that it is handed and nothing else.

    >>> state_of([])
    {'steps': [], 'treatments': [], 'private': []}
    """
    return {
        "steps": [attachment.steps for attachment in attachments],
        "treatments": [_entry(t) for attachment in attachments for t in attachment.treatments],
        "private": [a.factors.state() for a in attachments if a.factors is not None],
    }


def _entry(t: Treatment) -> State:
    """What is saved of a treatment; blank where nothing has been looked at yet."""
    return {
        "weight": t.weight.name,
        "kind": t.kind.__name__,
        "shape": t.weight.shape,
        "looked_at": t.was_looked_at,
        "memory": t.memory if t.was_looked_at else _state.placeholder(t.grown_form) | t.memory,
    }


def check_state(attachments: Sequence[Attachment], state: object) -> None:
    """Refuse what is not the state of the same corrections of the same weights.

    >>> check_state([], {})
    Traceback (most recent call last):
    ValueError: expected the state to be a dictionary with 'private', 'steps', 'treatments', ...
    """
    treatments = [t for attachment in attachments for t in attachment.treatments]
    private = [a.factors for a in attachments if a.factors is not None]
    lengths = {
        "steps": len(attachments),
        "treatments": len(treatments),
        "private": len(private),
    }
    if not isinstance(state, dict) or state.keys() != lengths.keys():
        _state.check_form("the state", state, lengths)
    assert isinstance(state, dict)
    for key, length in lengths.items():
        if not isinstance(state[key], list) or len(state[key]) != length:
            _state.refuse(f"state[{key!r}]", f"a list of {length}", _state.described(state[key]))
    for steps in state["steps"]:
        _state.check_form("the number of steps", steps, 0)
    for treatment, entry in zip(treatments, state["treatments"], strict=True):
        _check_entry(treatment, entry)
    for own, entry in zip(private, state["private"], strict=True):
        own.check_state(entry)


def _check_entry(treatment: Treatment, entry: object) -> None:
    """Refuse a saved entry of another weight or correction, or with another memory."""
    weight, kind, shape = treatment.weight.name, treatment.kind.__name__, treatment.weight.shape
    keys = {"weight", "kind", "memory"}  # and others, without which states were once saved
    if not isinstance(entry, dict) or entry.keys() - {"shape", "looked_at"} != keys:
        expected = "a dictionary with 'kind', 'looked_at', 'memory', 'shape', 'weight'"
        _state.refuse(f"the entry of {weight}", expected, _state.described(entry))
    _state.check_form(f"'looked_at' of {weight}", entry.get("looked_at", True), True)
    came = entry["weight"], entry["kind"], entry.get("shape", shape)
    if came != (weight, kind, shape):
        name, its_kind, its_shape = (f"{part!s:.80}" for part in came)
        expected = f"that of {kind} for {weight} of shape {shape}"
        _state.refuse("the entry", expected, f"that of {its_kind} for {name} of shape {its_shape}")
    treatment.check_memory(entry["memory"])


def load_state(attachments: Sequence[Attachment], state: State) -> None:
    """Go on from a state that was checked.

    >>> load_state([], {"steps": [], "treatments": [], "private": []})
    """
    treatments = [t for attachment in attachments for t in attachment.treatments]
    private = [a.factors for a in attachments if a.factors is not None]
    for attachment, steps in zip(attachments, state["steps"], strict=True):
        attachment.steps = steps
    for treatment, entry in zip(treatments, state["treatments"], strict=True):
        kept = entry["memory"] if entry.get("looked_at", True) else treatment.begun
        treatment.memory = _state.copied({key: entry["memory"][key] for key in kept})
    for own, entry in zip(private, state["private"], strict=True):
        own.load_state(entry)
