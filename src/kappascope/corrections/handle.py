"""An attached correction: what it holds on to, how it is saved, and how it lets go again."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from kappascope.corrections._attachment import Attachment, check_state, load_state, state_of
from kappascope.corrections._factors import FactorOptimizer, TrainedFactors
from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._stepping import StepHooks
from kappascope.corrections._treatments import Rewrite, State, Treatment
from kappascope.corrections.optimizers import group_index
from kappascope.matrix import spectra
from kappascope.model.sharded import is_sharded
from kappascope.model.tensors import stripped
from kappascope.text import plural


@dataclass(eq=False, repr=False)
class Handle:
    """An attached correction; closing it leaves plain weights and the same function.

    ``weights`` are the names of those corrected, ``left_out`` has the reasons for the others,
    ``refused`` counts by name the steps that were not taken since the weight would not have been
    finite, and ``difference`` is ``None`` until it is closed and then 0.0: the weights have always
    been those that the model uses, and closing writes none.
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
                _refuse_sharded(attachment)
                _refuse_without_rate(attachment)
            for attachment in handle._attachments:
                handle._install(attachment, undo)
            handle._undo = undo.pop_all()
        return handle

    def _install(self, attachment: Attachment, undo: ExitStack) -> None:
        optimizer, treatments = attachment.optimizer, attachment.treatments
        factored = [t for t in treatments if isinstance(t, TrainedFactors)]
        for treatment in factored:
            for module, _ in treatment.weight.owners:
                notice = module.register_load_state_dict_post_hook(_LoadNotice(treatment))
                undo.callback(notice.remove)
        if factored:
            attachment.factors = FactorOptimizer(optimizer, factored, attachment.leader)
        if treatments:
            hooks = StepHooks.of(optimizer) or StepHooks(optimizer)
            _merge_for_directions(hooks, treatments)
            hooks.join(attachment)
            undo.callback(hooks.leave, attachment)

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
        self.spare_factors()
        yield
        with torch.no_grad(), spectra.without_autocast():
            for treatment in self._factored:
                treatment.end_sparing()

    @torch.no_grad()
    def spare_factors(self) -> None:
        """Leave the multipliers out of what happens to complete gradients until the next step.

        For callbacks, between whose two ends no ``with`` can stand.
        """
        with spectra.without_autocast():
            for treatment in self._factored:
                treatment.begin_sparing()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What the correction is doing, as numbers by name, for any logger.

        For every weight, where they are known: ``kappa/NAME`` (as last looked at), ``penalty/NAME``
        and ``gradient_share/NAME`` (the penalty's part of the sum of both gradients' norms),
        ``spread/NAME`` of its factors (largest over smallest) or ``gain/NAME`` if it has a single
        one, and ``rewrites/NAME``. In all:
        ``refused`` steps, ``steps`` and the ``seconds`` that they took beside the optimizer's own.

        >>> from kappascope.corrections import NormPin
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = NormPin().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> handle.metrics()
        {'rewrites/weight': 0.0, 'refused': 0.0, 'steps': 0.0, 'seconds': 0.0}
        """
        numbers = {
            f"{k}/{t.weight.name}": v for t in self.treatments for k, v in t.metrics().items()
        }
        numbers["refused"] = sum(self.refused.values())
        numbers["steps"] = max((attachment.steps for attachment in self._attachments), default=0)
        numbers["seconds"] = sum(attachment.seconds for attachment in self._attachments)
        return {name: float(value) for name, value in numbers.items()}

    # Saving, loading, converting

    def state_dict(self) -> State:
        """What the model's and the optimizer's state dicts do not hold.

        Steps taken, references, warm starts, directions, factors and the state of their optimizer:
        copies, which training does not move on.
        """
        return copy.deepcopy(state_of(self._attachments))

    def load_state_dict(self, state: State) -> None:
        """Go on where another run was saved; a state that does not fit is refused and not loaded.

        >>> from kappascope.corrections import NormPin
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = NormPin().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> handle.load_state_dict({})
        Traceback (most recent call last):
        ValueError: expected the state to be a dictionary with 'private', 'steps', 'treatments', ...
        """
        self._refuse_closed("attach the correction again, then load its state")
        check_state(self._attachments, state)
        load_state(self._attachments, state)

    def _refuse_closed(self, why: str) -> None:
        if self.difference is not None:
            raise ValueError(f"the handle is closed: {why}")

    @torch.no_grad()
    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a state dict whose weights are in parts to that of the plain model.

        Such are those that older versions saved while factors were attached, and what
        :meth:`split` gives. The state dict of the model itself is plain already, and comes back as
        it is.

        >>> from kappascope.corrections import Multipliers
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> parts = handle.split(model.state_dict())
        >>> sorted(parts)
        ['bias', 'parametrizations.weight.0.columns', 'parametrizations.weight.0.rows',
         'parametrizations.weight.original']
        >>> sorted(handle.merged(parts))
        ['bias', 'weight']
        """
        self._refuse_closed("the model's state dict is plain already")
        originals = {stripped(_original_key(n)): t for n, t in self._by_name().items()}
        plain: dict[str, Tensor] = {}
        for key, value in state.items():
            treatment = originals.get(stripped(key))
            if treatment is not None:
                factors = {n: f"{_factor_prefix(key)}{n}" for n in treatment.module.state_dict()}
                if lacking := [name for name, at in factors.items() if at not in state]:
                    problem = f"{key} comes without its factors {', '.join(sorted(lacking))}"
                    raise ValueError(f"{problem}; pass the whole model's state dict")
                values = {name: state[at] for name, at in factors.items()}
                plain[_plain_key(key)] = torch.func.functional_call(treatment.module, values, value)
            elif stripped(f"{key.rpartition('.0.')[0]}.original") not in originals:
                plain[key] = value  # no factor of a weight
        return plain

    @torch.no_grad()
    def split(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a plain state dict to one with directions and factors apart.

        They are those in use where the weight is the one that the model has; otherwise the
        direction is the weight, and factors are at one.
        """
        self._refuse_closed("there are no factors any more")
        names = {stripped(name): treatment for name, treatment in self._by_name().items()}
        if names and not names.keys() & set(map(stripped, state)):
            expected, came = next(iter(names)), ", ".join(list(state)[:3]) or "none"
            raise ValueError(
                f"expected keys such as {expected}, got {came}; pass the whole model's"
            )
        parts: dict[str, Tensor] = {}
        for key, value in state.items():
            if (treatment := names.get(stripped(key))) is None:
                parts[key] = value
                continue
            parts[original := _original_key(key)], factors = treatment.parts(value)
            parts |= {
                f"{_factor_prefix(original)}{name}": factor for name, factor in factors.items()
            }
        return parts

    def _by_name(self) -> dict[str, TrainedFactors]:
        """The weights with factors, under all their names."""
        return {name: t for t in self._factored for name, *_ in t.weight.uses}

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the factors into the directions and go on with factors at one.

        >>> from kappascope.corrections import Multipliers
        >>> model = torch.nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> handle.merge()
        """
        self._refuse_closed("its weights are plain already")
        for attachment in self._attachments:
            for treatment in attachment.factored:
                _restart(attachment, treatment)

    # Letting go

    def close(self) -> None:
        """Let go; no bit of a weight changes."""
        if self.difference is not None:
            return
        self._undo.close()
        self.difference = 0.0
        for attachment in self._attachments:
            attachment.treatments = []

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(t.kind.__name__ for t in self.treatments))
        what = "closed" if self.difference is not None else kinds or "nothing to do"
        refused = plural(sum(self.refused.values()), "step")
        counts = f"{plural(len(self.weights), 'weight')}, {len(self.left_out)} left out"
        return f"<Handle: {what}; {counts}, {refused} refused>"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        problem = "a handle cannot be copied or pickled: it is tied to its model and optimizer"
        raise TypeError(f"{problem}; attach to the copies and load its state_dict()")


def whole_gradients(optimizer: Optimizer) -> dict[int, Tensor | None]:
    """Gradients of whole weights, by ``id``, where a step in progress has those of directions.

    >>> whole_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    {}
    """
    hooks = StepHooks.of(optimizer)
    step = None if hooks is None else hooks.running
    if step is None:
        return {}
    factored = {id(t.leaf) for t in step.factored}
    kept = reversed(step.gradients)  # the first that was kept of each is the user's
    return {id(leaf): gradient for leaf, gradient in kept if id(leaf) in factored}


def correction_metrics(optimizer: Optimizer) -> dict[str, dict[str, Tensor | float]]:
    """What the corrections of an optimizer's weights are doing, by weight and quantity.

    >>> correction_metrics(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    {}
    """
    hooks, metrics = StepHooks.of(optimizer), dict[str, dict[str, Tensor | float]]()
    for attachment in () if hooks is None else hooks.attachments:
        for t in attachment.treatments:
            own = metrics.setdefault(t.weight.name, {})
            own |= {f"correction_{name}": value for name, value in t.metrics().items()}
            own["correction_refused"] = float(attachment.refused[t.weight.name])
    return metrics


def _original_key(name: str) -> str:
    """The key of a weight that is in parts."""
    owner, dot, attribute = name.rpartition(".")
    return f"{owner}{dot}parametrizations.{attribute}.original"


def _plain_key(original: str) -> str:
    """The name of the weight whose parts have this key."""
    owner, _, attribute = original.removesuffix(".original").rpartition("parametrizations.")
    return owner + attribute


def _factor_prefix(original: str) -> str:
    """What comes before the names of the factors of a weight in parts."""
    return original.removesuffix("original") + "0."


class _LoadNotice:
    """Notes that a module has loaded a state dict; a copy of the module has one that does nothing.

    Copied or pickled it is the end of an empty context, which needs no kappascope to be read.
    """

    def __init__(self, treatment: TrainedFactors) -> None:
        self.treatment = treatment

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        self.treatment.was_loaded = True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


def _restart(attachment: Attachment, treatment: TrainedFactors) -> None:
    """Merge the factors of a weight and let them begin anew."""
    assert attachment.factors is not None
    treatment.restart()
    attachment.factors.forget(treatment)


@torch.no_grad()
def _merge_for_directions(hooks: StepHooks, treatments: Sequence[Treatment]) -> None:
    """Merge the factors of weights whose directions are to be rewritten from now on.

    What is to be held, such as a norm, was read from the weight.
    """
    leaves = {id(t.leaf) for t in treatments if t.acts_on_direction}
    for attachment in hooks.attachments:
        for treatment in attachment.factored:
            if id(treatment.leaf) in leaves:
                _restart(attachment, treatment)


def _leader(owner: Optimizer, optimizers: Sequence[Optimizer]) -> Optimizer:
    """Whose learning rate factors follow: Muon's is not one for AdamW, if there is another."""
    others = [o for o in optimizers if not isinstance(o, Muon)]
    return others[0] if isinstance(owner, Muon) and others else owner


def _refuse_clashes(new: Attachment) -> None:
    """Refuse what is attached already, factors of factors, and bounds of what factors multiply."""
    hooks = StepHooks.of(new.optimizer)
    attached = [
        t for attachment in (hooks.attachments if hooks else ()) for t in attachment.treatments
    ]
    for treatment in new.treatments:
        name, kind = treatment.weight.name, treatment.kind.__name__
        for old in (t for t in attached if t.leaf is treatment.leaf):
            if old.kind is treatment.kind:
                raise ValueError(f"{kind} of {name} is already attached (close it first)")
            parts = {isinstance(t, TrainedFactors): t for t in (old, treatment)}
            if False not in parts:
                raise ValueError(f"{name} has factors of {old.kind.__name__} (close it first)")
            rewrite = parts[False]
            if True in parts and isinstance(rewrite, Rewrite) and not rewrite.acts_on_direction:
                clash = f"{rewrite.kind.__name__} rewrites {name} as a whole"
                factors = f"{parts[True].kind.__name__} makes it of factors"
                raise ValueError(f"{clash}, and {factors}; close {old.kind.__name__} first")


def _refuse_sharded(new: Attachment) -> None:
    """Refuse what cannot be done with a weight that is spread over processes as this one is."""
    for treatment in (t for t in new.treatments if is_sharded(t.leaf)):
        reason = None
        if cast(Any, treatment.leaf).device_mesh.ndim > 1:
            reason = "is spread over a mesh of more than one dimension"
        elif treatment.weight.parametrization is not None:
            reason = "is sharded and made of other tensors"
        elif isinstance(treatment, TrainedFactors) and not treatment.module.is_elementwise:
            reason = "is sharded, and its factors need the whole of it at every step"
        if reason is not None:
            problem = (
                f"{treatment.weight.name} {reason}: {treatment.kind.__name__} cannot be attached"
            )
            raise ValueError(f"{problem}; leave it out of where=, or train it in one piece")


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
