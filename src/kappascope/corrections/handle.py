"""An attached correction: what it holds on to, how it is saved, and how it lets go again."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from kappascope.corrections import _state
from kappascope.corrections.analysis import AnalysedModel
from kappascope.corrections.factors import FactorOptimizer, TrainedFactors
from kappascope.corrections.stepping import Attachment, StepHooks
from kappascope.corrections.treatments import Rewrite, State, Treatment, group_index
from kappascope.matrix import spectra
from kappascope.model.tensors import stripped


@dataclass(eq=False)
class Handle:
    """An attached correction; closing it leaves plain weights and the same function.

    ``weights`` are the names of those corrected, ``left_out`` has the reasons for the others,
    ``refused`` counts by name the steps that were not taken since the weight would not have been
    finite, and ``difference`` is, once closed, by how much a weight that the model uses differs at
    most from what it used before, relative to its largest entry.
    """

    weights: tuple[str, ...]
    left_out: Mapping[str, str]
    refused: Counter[str] = field(default_factory=Counter)
    difference: float | None = None
    _attachments: list[Attachment] = field(default_factory=list, repr=False)
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def attached(
        cls,
        weights: tuple[str, ...],
        left_out: Mapping[str, str],
        model: AnalysedModel,
        treatments: Sequence[Treatment],
    ) -> Handle:
        """Install the treatments of a model's weights; if one fails, all are undone."""
        handle = cls(weights, left_out)
        with ExitStack() as undo:
            for optimizer in model.optimizers:
                leader = _leader(optimizer, model.optimizers)
                attachment = Attachment(optimizer, leader, refused=handle.refused)
                handle._attachments.append(attachment)
                mine = [t for t in treatments if model.owner(t.leaf) is optimizer]
                # gradients come first: those of factors are to include what is added to them
                attachment.treatments = sorted(mine, key=lambda t: isinstance(t, TrainedFactors))
                _refuse_clashes(attachment)
                _refuse_without_rate(attachment)
            for attachment in handle._attachments:
                handle._install(attachment, undo)
            handle._undo = undo.pop_all()
        return handle

    def _install(self, attachment: Attachment, undo: ExitStack) -> None:
        optimizer, treatments = attachment.optimizer, attachment.treatments
        factored = [t for t in treatments if isinstance(t, TrainedFactors)]
        for treatment in factored:
            treatment.install(undo, self._note_difference)
        if factored:
            attachment.factors = FactorOptimizer(optimizer, factored, attachment.leader)
        if treatments:
            hooks = StepHooks.of(optimizer) or StepHooks(optimizer)
            hooks.attachments.append(attachment)
            undo.callback(hooks.leave, attachment)

    def _note_difference(self, difference: float) -> None:
        self.difference = max(self.difference or 0.0, difference)

    @property
    def treatments(self) -> list[Treatment]:
        """What happens to the weights, in the order of the optimizers."""
        return [t for attachment in self._attachments for t in attachment.treatments]

    @property
    def factor_optimizers(self) -> list[FactorOptimizer]:
        """The private optimizers of factors, in the order of the user's optimizers."""
        return [a.factors for a in self._attachments if a.factors is not None]

    @property
    def _factored(self) -> list[TrainedFactors]:
        return [t for own in self.factor_optimizers for t in own.treatments]

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Leave the multipliers out of what happens inside to the gradients of the weights.

        These are to be complete before; what is spared holds for the next step, and is forgotten if
        the gradients change or are cleared before it.

        >>> from kappascope.corrections import Multipliers
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with handle.unclipped():
        ...     _ = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        """
        factored = self._factored
        with torch.no_grad(), spectra.without_autocast():
            full = [t.gradients() if t.is_ready() else [] for t in factored]
        yield
        with torch.no_grad(), spectra.without_autocast():
            for t, before in zip(factored, full, strict=True):
                t.spare(before)

    # Saving, loading, converting

    def state_dict(self) -> State:
        """What the model's and the optimizer's state dicts do not hold.

        Steps taken, references, warm starts, and the state of the factors' optimizer: copies, which
        training does not move on.
        """
        return {
            "steps": [attachment.steps for attachment in self._attachments],
            "treatments": [
                {
                    "weight": t.weight.name,
                    "kind": t.kind.__name__,
                    "shape": t.weight.shape,
                    "memory": copy.deepcopy(t.memory),
                }
                for t in self.treatments
            ],
            "private": [copy.deepcopy(o.optimizer.state_dict()) for o in self.factor_optimizers],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where another run was saved; a state that does not fit is refused and not loaded.

        >>> from kappascope.corrections import NormPin
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = NormPin().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> handle.load_state_dict({})
        Traceback (most recent call last):
        ValueError: expected the state to be a dictionary with 'private', 'steps', 'treatments', ...
        """
        self._check_state(state)
        for attachment, steps in zip(self._attachments, state["steps"], strict=True):
            attachment.steps = steps
        for treatment, entry in zip(self.treatments, state["treatments"], strict=True):
            treatment.memory = _state.copied(entry["memory"])
        for own, entry in zip(self.factor_optimizers, state["private"], strict=True):
            own.load_state(entry)

    def _check_state(self, state: object) -> None:
        """Refuse what is not the state of the same corrections of the same weights."""
        if self.difference is not None:
            raise ValueError("the handle is closed: nothing goes on; attach again and load then")
        lengths = {
            "steps": len(self._attachments),
            "treatments": len(self.treatments),
            "private": len(self.factor_optimizers),
        }
        if not isinstance(state, dict) or state.keys() != lengths.keys():
            _state.check_form("the state", state, lengths)
        assert isinstance(state, dict)
        for key, length in lengths.items():
            if not isinstance(state[key], list) or len(state[key]) != length:
                _state.refuse(
                    f"state[{key!r}]", f"a list of {length}", _state.described(state[key])
                )
        for steps in state["steps"]:
            _state.check_form("the number of steps", steps, 0)
        for treatment, entry in zip(self.treatments, state["treatments"], strict=True):
            _check_entry(treatment, entry)
        for own, entry in zip(self.factor_optimizers, state["private"], strict=True):
            own.check_state(entry)

    @torch.no_grad()
    def plain(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the corrected model's state dict to that of the plain one, factors merged.

        >>> from kappascope.corrections import Multipliers
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(model.state_dict())
        ['bias', 'parametrizations.weight.0.columns', 'parametrizations.weight.0.rows',
         'parametrizations.weight.original']
        >>> sorted(handle.plain(model.state_dict()))
        ['bias', 'weight']
        """
        originals = _matched(state, self._originals())
        factors: dict[str, dict[str, Tensor]] = {key: {} for key in originals}
        rest: dict[str, Tensor] = {}
        for key, value in state.items():
            prefix, _, factor = key.rpartition(".0.")
            original = f"{prefix}.original"  # should the key be that of a factor
            factors.get(original, rest)[factor if original in factors else key] = value
        for key, treatment in originals.items():
            if lacking := treatment.module.state_dict().keys() - factors[key].keys():
                problem = f"{key} comes without its factors {', '.join(sorted(lacking))}"
                raise ValueError(f"{problem}; pass the whole model's state dict")
        plain = {}
        for key, value in rest.items():
            if key in originals:
                product = torch.func.functional_call(originals[key].module, factors[key], value)
                plain[_plain_key(key)] = product
            else:
                plain[key] = value
        return plain

    @torch.no_grad()
    def corrected(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a plain state dict to one of the corrected model, factors at one.

        >>> from kappascope.corrections import Multipliers
        >>> model, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).state_dict()
        >>> handle = Multipliers().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model.load_state_dict(handle.corrected(plain))
        <All keys matched successfully>
        """
        plain = _matched(state, {_plain_key(key): t for key, t in self._originals().items()})
        converted: dict[str, Tensor] = {}
        for name, value in state.items():
            if (treatment := plain.get(name)) is None:
                converted[name] = value
                continue
            converted[key := _original_key(name)] = value
            fresh = treatment.make(treatment.weight.layout.matrix(value)).state_dict()
            converted |= {key.removesuffix("original") + f"0.{k}": v for k, v in fresh.items()}
        return converted

    def _originals(self) -> dict[str, TrainedFactors]:
        """Keys of original weights in the corrected model, and how they are treated."""
        if self.difference is not None:
            raise ValueError("the handle is closed: the model's state dict is plain already")
        return {_original_key(name): t for t in self._factored for name, *_ in t.weight.uses}

    # Letting go

    def close(self) -> None:
        """Merge, restore, and check that the weights are those the model used."""
        if self.difference is not None:
            return
        for treatment in self._factored:
            treatment.used_weights()  # what cannot be merged raises before anything is undone
        self._undo.close()
        self.difference = self.difference or 0.0
        for attachment in self._attachments:
            attachment.treatments = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        problem = "a handle cannot be copied or pickled: it is tied to its model and optimizer"
        raise TypeError(f"{problem}; attach to the copies and load its state_dict()")


def _check_entry(treatment: Treatment, entry: object) -> None:
    """Refuse a saved entry of another weight or correction, or with another memory."""
    weight, kind, shape = treatment.weight.name, treatment.kind.__name__, treatment.weight.shape
    keys = {"weight", "kind", "memory"}  # and the shape, without which states were once saved
    if not isinstance(entry, dict) or entry.keys() - {"shape"} != keys:
        expected = "a dictionary with 'kind', 'memory', 'shape', 'weight'"
        _state.refuse(f"the entry of {weight}", expected, _state.described(entry))
    came = entry["weight"], entry["kind"], entry.get("shape", shape)
    if came != (weight, kind, shape):
        name, its_kind, its_shape = (f"{part!s:.80}" for part in came)
        expected = f"that of {kind} for {weight} of shape {shape}"
        _state.refuse("the entry", expected, f"that of {its_kind} for {name} of shape {its_shape}")
    treatment.check_memory(entry["memory"])


def _original_key(name: str) -> str:
    """The key under which a weight is kept while it is parametrized."""
    owner, dot, attribute = name.rpartition(".")
    return f"{owner}{dot}parametrizations.{attribute}.original"


def _plain_key(key: str) -> str:
    """The name of the weight whose original has this key."""
    owner, _, attribute = key.removesuffix(".original").rpartition("parametrizations.")
    return owner + attribute


def _matched(
    state: Mapping[str, Tensor], wanted: Mapping[str, TrainedFactors]
) -> dict[str, TrainedFactors]:
    """Which keys of a state dict are the wanted ones, within DDP or ``torch.compile`` too."""
    loosely = {stripped(key): treatment for key, treatment in wanted.items()}
    pairs = ((key, wanted.get(key) or loosely.get(stripped(key))) for key in state)
    matched = {key: treatment for key, treatment in pairs if treatment is not None}
    if wanted and not matched:
        expected, came = next(iter(wanted)), ", ".join(list(state)[:3]) or "none"
        raise ValueError(f"expected keys such as {expected}, got {came}; pass the whole model's")
    return matched


def _leader(owner: Optimizer, optimizers: Sequence[Optimizer]) -> Optimizer:
    """Whose learning rate factors follow: Muon's is not one for AdamW, if there is another."""
    others = [o for o in optimizers if not isinstance(o, Muon)]
    return others[0] if isinstance(owner, Muon) and others else owner


def _refuse_clashes(new: Attachment) -> None:
    """Refuse what is attached already, and factors of what another correction rewrites."""
    hooks = StepHooks.of(new.optimizer)
    if hooks is None:
        return
    attached = [t for attachment in hooks.attachments for t in attachment.treatments]
    for treatment in new.treatments:
        name, kind = treatment.weight.name, treatment.kind.__name__
        for old in (t for t in attached if t.leaf is treatment.leaf):
            if old.kind is treatment.kind:
                raise ValueError(f"{kind} is attached to {name} already; close it first")
            if isinstance(old, Rewrite) and isinstance(treatment, TrainedFactors):
                clash = f"{old.kind.__name__} rewrites {name}, which {kind} would make of factors"
                raise ValueError(f"{clash}; close it first")


def _refuse_without_rate(new: Attachment) -> None:
    """Refuse what follows a learning rate where there is none."""
    for treatment in (t for t in new.treatments if t.follows_rate):
        followed = 0
        if new.leader is new.optimizer:
            followed = group_index(new.optimizer, treatment.leaf) or 0
        rate = new.leader.param_groups[followed].get("lr")
        if not isinstance(rate, Real | Tensor):
            need = f"{treatment.kind.__name__} follows the learning rate of {treatment.weight.name}"
            came = f"{type(new.leader).__name__} has {rate!r}"
            raise ValueError(f"{need}, and {came}; give it a number")
