"""How a correction holds on to a model and its optimizers, and lets go again.

A :class:`Slot` is one weight, wherever it is used; a :class:`Treatment` is what happens to it
around a step of its optimizer; a :class:`Handle` is all of a correction's treatments and how to
undo them.

Everything hangs on ``optimizer.step()``: what a gradient scaler skips is skipped here, accumulated
gradients are complete, unscaled and averaged over processes by then, and no loop is rewritten.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW, Optimizer

from kappascope import spectra
from kappascope.factors import Factors
from kappascope.slots import Choice, Slot, group, precise
from kappascope.weights.inventory import stripped

State: TypeAlias = dict[str, Any]


# --- what happens around a step -------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call of ``optimizer.step()``: its number from 1, learning rate, and gradient scale.

    By ``scale``, what the optimizer is handed differs from the gradient of what is to fall: a fused
    one takes what a scaler has not unscaled, and one that maximizes takes that of what is to rise.
    """

    index: int
    learning_rate: float
    scale: float = 1.0


class Treatment:
    """What happens to one weight around every step of its optimizer."""

    group: int = 0  # of the weight, in its optimizer
    _memory: State
    _device: torch.device | None  # where the memory is known to be

    def __init__(self, kind: type, slot: Slot, memory: State) -> None:
        self.kind = kind  # of correction: a weight is treated once by each
        self.slot, self.leaf = slot, slot.leaves[-1]
        self.memory = memory

    @property
    def memory(self) -> State:
        """What has to survive a restart (references, warm starts), on the weight's device."""
        if self._device != self.leaf.device:
            self._device = self.leaf.device
            self._memory = _moved(self._memory, self._device)
        return self._memory

    @memory.setter
    def memory(self, memory: State) -> None:
        self._memory, self._device = memory, None

    def before(self, step: Step) -> None:
        """Gradients are complete; the weight has not moved yet."""

    def after(self, step: Step) -> bool:
        """The weight has moved. False if what was to be done was refused."""
        return True


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on one device."""
    if isinstance(value, dict):
        return {key: _moved(inner, device) for key, inner in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


class Gradient(Treatment):
    """Adds ``source(read, memory)`` to the gradient, unless that is ``None``.

    ``read`` gives the matrix: of a parametrized weight that takes time, and is not always needed.
    """

    def __init__(
        self,
        kind: type,
        slot: Slot,
        source: Callable[[Callable[[], Tensor], State], Tensor | None],
        memory: State,
    ) -> None:
        super().__init__(kind, slot, memory)
        self.source, self.finite = source, True

    def before(self, step: Step) -> None:
        """Add it, unless it is not finite, or does not exist since the weight is not."""
        try:
            gradient = self.source(lambda: precise(self.slot.matrix()), self.memory)
        except spectra.LinAlgError:
            self.finite = False
            return
        self.finite = gradient is None or _all_finite(gradient)
        if self.finite and gradient is not None:
            self.slot.add_gradient(gradient if step.scale == 1.0 else gradient * step.scale)

    def after(self, step: Step) -> bool:
        """Whether it was added."""
        return self.finite


class Rewrite(Treatment):
    """Replaces the matrix by ``rule(matrix, step, memory)``, unless that is ``None``."""

    def __init__(
        self,
        kind: type,
        slot: Slot,
        rule: Callable[[Tensor, Step, State], Tensor | None],
        memory: State,
    ) -> None:
        super().__init__(kind, slot, memory)
        self.rule = rule

    def after(self, step: Step) -> bool:
        """Write what the rule says, unless the weight would not be finite, or is not already."""
        matrix = self.slot.matrix()
        try:
            new = self.rule(precise(matrix), step, self.memory)
        except spectra.LinAlgError:
            return False
        if new is None:
            return True
        rounded = new.to(matrix.dtype)
        finite = _all_finite(rounded)
        if finite:
            self.slot.write(rounded)
        return finite


def _all_finite(x: Tensor) -> bool:
    """Whether every entry is; the sum tells five times sooner, unless it overflows."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


# --- factors --------------------------------------------------------------------------------------


class Parametrized(Treatment):
    """Makes the weight of itself and factors, which a private optimizer steps."""

    def __init__(
        self,
        kind: type,
        slot: Slot,
        make: Callable[[Tensor], Factors],
        rate: float,
        weight_decay: float,
    ) -> None:
        super().__init__(kind, slot, {})
        self.make, self.rate, self.weight_decay = make, rate, weight_decay
        try:
            self.module = make(slot.matrix())
        except spectra.LinAlgError as error:
            raise ValueError(f"{slot.name}: {error}; repair it first") from error
        self.unclipped: list[Tensor] | None = None
        self.pending: list[Tensor] = []

    def install(self, undo: ExitStack, report: Callable[[float], None]) -> None:
        """Put the factors into every place of the weight."""
        used: list[Tensor] = []  # by the model, at every place, until the factors are merged
        undo.callback(lambda: report(self._change(used)))
        for _, module, attribute in self.slot.places:
            order = list(module._parameters)
            _parametrize(module, attribute, self.module)
            undo.callback(_restore, module, attribute, order)
        undo.callback(self._merge, used)

    @torch.no_grad()
    def _merge(self, used: list[Tensor]) -> None:
        used += [weight.clone() for weight in self._weights()]
        self.leaf.copy_(used[0])

    @torch.no_grad()
    def _change(self, used: list[Tensor]) -> float:
        """The largest change of a weight, in parts of its largest entry."""
        largest = 0.0
        for new, old in zip(self._weights(), used, strict=False):  # none if installing failed
            size = float(old.abs().amax()) or 1.0
            largest = max(largest, float((new - old).abs().amax()) / size)
        return largest

    def _weights(self) -> list[Tensor]:
        """What the model uses at every place."""
        return [getattr(module, attribute) for _, module, attribute in self.slot.places]

    def derived(self) -> list[Tensor]:
        """Gradients of the factors as the weight's gradient is now."""
        leaf, view = self.leaf, self.module.view
        if leaf.grad is None:
            return []
        matrices = precise(view.matrix(leaf.detach())), precise(view.matrix(leaf.grad))
        return self.module.gradients(*matrices)

    def before(self, step: Step) -> None:
        """Note the gradients while the weight is where they were taken."""
        found = self.derived()
        if self.unclipped is not None and found:
            found = [a + b for a, b in zip(found, self.unclipped, strict=True)]
        self.unclipped = None
        self.pending = found if step.scale == 1.0 else [g / step.scale for g in found]


def _parametrize(module: nn.Module, attribute: str, factors: Factors) -> None:
    """Register a parametrization of a parameter, which is not touched.

    torch would call ``set_`` on it, and DDP never hear of its gradients again: a stand-in is
    registered and the parameter put in its place.
    """
    weight = module._parameters[attribute]
    assert weight is not None
    module._parameters[attribute] = nn.Parameter(torch.empty_like(weight))
    parametrize.register_parametrization(module, attribute, factors, unsafe=True)
    cast(nn.ModuleDict, module.parametrizations)[attribute].original = weight


@torch.no_grad()
def _restore(module: nn.Module, attribute: str, order: list[str]) -> None:
    """Remove the parametrization; put the parameter back where it was in the module's order."""
    parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
    for name in order:
        module._parameters[name] = module._parameters.pop(name)


class Private:
    """The optimizer of a correction's own parameters; its learning rate follows the user's.

    Plain gradient steps (with the same momentum) where the user's optimizer is SGD, AdamW where it
    is anything else. Not a parameter group of the user's: schedulers would not expect it.
    """

    def __init__(
        self, owner: Optimizer, treatments: Sequence[Parametrized], leader: Optimizer
    ) -> None:
        self.treatments, self.leader, self.owner = treatments, leader, owner
        # one group of all that move alike: an optimizer takes its time for each
        together: dict[tuple[int, float, float], list[nn.Parameter]] = {}
        for t in treatments:
            followed = t.group if leader is owner else 0
            together.setdefault((followed, t.rate, t.weight_decay), []).extend(t.module.factors)
        self.rates = [(followed, rate) for followed, rate, _ in together]
        groups: list[dict[str, Any]] = [
            {"params": factors, "lr": 0.0, "weight_decay": decay}
            for (_, _, decay), factors in together.items()
        ]
        defaults = owner.defaults
        self.optimizer: Optimizer
        if isinstance(owner, SGD):
            same = {key: defaults[key] for key in ("momentum", "dampening", "nesterov")}
            self.optimizer = SGD(groups, **same)
        else:
            # many tiny tensors: unfused, a step of theirs is all overhead
            fused = all(p.device.type == "cpu" for its in groups for p in its["params"]) or None
            self.optimizer = AdamW(groups, betas=defaults.get("betas", (0.9, 0.999)), fused=fused)

    @torch.no_grad()
    def step(self) -> Iterator[Treatment]:
        """Step the factors; yield the treatments whose step was refused."""
        for its, (followed, rate) in zip(self.optimizer.param_groups, self.rates, strict=True):
            its["lr"] = rate * float(self.leader.param_groups[followed]["lr"])
        kept = []
        for t in self.treatments:
            kept.append([factor.clone() for factor in t.module.factors])
            for factor, gradient in zip(t.module.factors, t.pending, strict=False):
                factor.grad = gradient.to(factor).reshape(factor.shape)
        self.optimizer.step()
        for t, old in zip(self.treatments, kept, strict=True):
            for factor in t.module.factors:
                factor.grad = None
            if not _finite(t.leaf, t.module.factors):
                for factor, value in zip(t.module.factors, old, strict=True):
                    factor.copy_(value)
                    self.optimizer.state.pop(factor, None)
                yield t
            elif t.module.settle(t.leaf):
                for factor in t.module.factors:
                    self.optimizer.state.pop(factor, None)


def _finite(leaf: Tensor, factors: Iterable[Tensor]) -> bool:
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


# --- the handle -----------------------------------------------------------------------------------


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
    treatments: dict[Optimizer, list[Treatment]] = field(default_factory=dict, repr=False)
    _private: dict[Optimizer, Private] = field(default_factory=dict, repr=False)
    _steps: Counter[Optimizer] = field(default_factory=Counter, repr=False)
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def of(
        cls, choice: Choice, optimizers: Sequence[Optimizer], treatments: Iterable[Treatment]
    ) -> Handle:
        """Install the treatments; if one fails, all are undone."""
        names = tuple(slot.name for slot in choice.taken)
        handle = cls(names, choice.left_out)
        with ExitStack() as undo:
            for optimizer in optimizers:
                handle.treatments[optimizer] = []
            # penalties before factors, whose gradients are to include theirs
            for treatment in sorted(treatments, key=lambda t: isinstance(t, Parametrized)):
                owner, treatment.group = _owner(optimizers, treatment.leaf)
                _refuse_second(owner, treatment)
                handle.treatments[owner].append(treatment)
            for owner, some in handle.treatments.items():
                handle._install(undo, owner, some, optimizers)
            handle._undo = undo.pop_all()
        return handle

    def _install(
        self,
        undo: ExitStack,
        owner: Optimizer,
        some: Sequence[Treatment],
        optimizers: Sequence[Optimizer],
    ) -> None:
        own = [t for t in some if isinstance(t, Parametrized)]
        for treatment in own:
            treatment.install(undo, self._note)
        if own:
            self._private[owner] = Private(owner, own, _leader(owner, optimizers))
        if some:
            undo.callback(owner.register_step_pre_hook(self._before).remove)
            undo.callback(owner.register_step_post_hook(self._after).remove)

    def _note(self, difference: float) -> None:
        self.difference = max(self.difference or 0.0, difference)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _skipped(optimizer):
            return
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ValueError("step(closure) computes gradients too late; call backward() first")
        steps = self._step(optimizer)
        with torch.no_grad(), spectra.without_autocast():
            for treatment in self.treatments[optimizer]:
                treatment.before(steps[treatment.group])

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _skipped(optimizer):
            return
        steps = self._step(optimizer)
        with torch.no_grad(), spectra.without_autocast():
            for treatment in self.treatments[optimizer]:
                if not treatment.after(steps[treatment.group]):
                    self._refuse(treatment)
            if (private := self._private.get(optimizer)) is not None:
                for treatment in private.step():
                    self._refuse(treatment)
        self._steps[optimizer] += 1

    def _step(self, optimizer: Optimizer) -> list[Step]:
        """The step that is being taken, by group of the optimizer."""
        found = getattr(optimizer, "grad_scale", None)
        index, scale = self._steps[optimizer] + 1, 1.0 if found is None else float(found)
        return [
            Step(index, float(its["lr"]), -scale if its.get("maximize") else scale)
            for its in optimizer.param_groups
        ]

    def _refuse(self, treatment: Treatment) -> None:
        name = treatment.slot.name
        if not self.refused[name]:
            text = f"a step of {treatment.kind.__name__} was refused: {name} would not be finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.refused[name] += 1

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Leave the multipliers out of what happens inside to the gradients of the weights.

        >>> from kappascope.corrections import Multipliers
        >>> model = nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, SGD(model.parameters(), lr=0.1))
        >>> with handle.unclipped():
        ...     _ = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        """
        every = [t for private in self._private.values() for t in private.treatments]
        with torch.no_grad():
            full = [t.derived() for t in every]
            yield
            for t, before in zip(every, full, strict=True):
                pairs = zip(before, t.derived(), strict=True)
                t.unclipped = [a - b for a, b in pairs] if before else None

    # Saving, loading, converting

    def state_dict(self) -> State:
        """What the model's and the optimizer's state dicts do not hold.

        Steps taken, references, warm starts, and the state of the factors' optimizer.
        """
        return {
            "steps": [self._steps[optimizer] for optimizer in self.treatments],
            "treatments": [
                {"weight": t.slot.name, "kind": t.kind.__name__, "memory": _copy(t.memory)}
                for some in self.treatments.values()
                for t in some
            ],
            "private": [_copy(own.optimizer.state_dict()) for own in self._private.values()],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where another run was saved."""
        every = [t for some in self.treatments.values() for t in some]
        saved = [(entry["weight"], entry["kind"]) for entry in state["treatments"]]
        here = [(t.slot.name, t.kind.__name__) for t in every]
        if saved != here:
            raise ValueError(f"expected the state of {here}, got that of {saved}; attach alike")
        self._steps = Counter(dict(zip(self.treatments, state["steps"], strict=True)))
        for treatment, entry in zip(every, state["treatments"], strict=True):
            treatment.memory = _copy(entry["memory"])
        for private, entry in zip(self._private.values(), state["private"], strict=True):
            private.optimizer.load_state_dict(entry)

    @torch.no_grad()
    def plain(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The corrected model's state dict as that of the plain one, factors merged.

        >>> from kappascope.corrections import Multipliers
        >>> model = nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, SGD(model.parameters(), lr=0.1))
        >>> sorted(model.state_dict())
        ['bias', 'parametrizations.weight.0.columns', 'parametrizations.weight.0.rows',
         'parametrizations.weight.original']
        >>> sorted(handle.plain(model.state_dict()))
        ['bias', 'weight']
        """
        found = _matched(state, self._originals())
        factors: dict[str, dict[str, Tensor]] = {key: {} for key in found}
        rest: dict[str, Tensor] = {}
        for key, value in state.items():
            original, name = _factor(key)
            factors.get(original, rest)[name if original in factors else key] = value
        plain = {}
        for key, value in rest.items():
            if key in found:
                factored = torch.func.functional_call(found[key].module, factors[key], value)
                plain[_plain(key)] = factored
            else:
                plain[key] = value
        return plain

    @torch.no_grad()
    def corrected(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A plain state dict as one of the corrected model, factors at one.

        >>> from kappascope.corrections import Multipliers
        >>> model, plain = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
        >>> handle = Multipliers().attach(model, SGD(model.parameters(), lr=0.1))
        >>> model.load_state_dict(handle.corrected(plain))
        <All keys matched successfully>
        """
        originals = {_plain(key): t for key, t in self._originals().items()}
        found = _matched(state, originals)
        converted: dict[str, Tensor] = {}
        for name, value in state.items():
            if (treatment := found.get(name)) is None:
                converted[name] = value
                continue
            converted[key := _original(name)] = value
            fresh = treatment.make(treatment.slot.view.matrix(value)).state_dict()
            converted |= {key.removesuffix("original") + f"0.{k}": v for k, v in fresh.items()}
        return converted

    def _originals(self) -> dict[str, Parametrized]:
        """Keys of original weights in the corrected model, and what is done to them."""
        if self.difference is not None:
            raise ValueError("the handle is closed: the model's state dict is plain already")
        every = [t for private in self._private.values() for t in private.treatments]
        return {_original(path): t for t in every for path, *_ in t.slot.places}

    # Letting go

    def close(self) -> None:
        """Merge, restore, and check that the weights are those the model used."""
        self._undo.close()
        self.difference = self.difference or 0.0
        for optimizer in self.treatments:
            self.treatments[optimizer] = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _original(name: str) -> str:
    """Under which key a weight is kept while it is parametrized."""
    owner, dot, attribute = name.rpartition(".")
    return f"{owner}{dot}parametrizations.{attribute}.original"


def _plain(key: str) -> str:
    """The weight's name again."""
    owner, _, attribute = key.removesuffix(".original").rpartition("parametrizations.")
    return owner + attribute


def _factor(key: str) -> tuple[str, str]:
    """Should the key be that of a factor: the key of its original weight, and its own name."""
    place, _, name = key.rpartition(".0.")
    return f"{place}.original", name


def _matched(
    state: Mapping[str, Tensor], wanted: Mapping[str, Parametrized]
) -> dict[str, Parametrized]:
    """Which keys of a state dict are the wanted ones, within DDP or ``torch.compile`` too."""
    loosely = {stripped(key): treatment for key, treatment in wanted.items()}
    pairs = ((key, wanted.get(key) or loosely.get(stripped(key))) for key in state)
    found = {key: treatment for key, treatment in pairs if treatment is not None}
    if wanted and not found:
        expected, came = next(iter(wanted)), ", ".join(list(state)[:3]) or "none"
        raise ValueError(f"expected keys such as {expected}, got {came}; pass the whole model's")
    return found


def _copy(state: State) -> State:
    """A state that training will not move on."""
    return copy.deepcopy(state)


def _leader(owner: Optimizer, optimizers: Sequence[Optimizer]) -> Optimizer:
    """Whose learning rate factors follow: Muon's is not one for AdamW, if there is another."""
    others = [o for o in optimizers if not isinstance(o, torch.optim.Muon)]
    return others[0] if isinstance(owner, torch.optim.Muon) and others else owner


def _owner(optimizers: Sequence[Optimizer], leaf: Tensor) -> tuple[Optimizer, int]:
    """The optimizer that has ``leaf``, and in which of its groups."""
    found = ((o, group(o, leaf)) for o in optimizers)
    return next((owner, group) for owner, group in found if group is not None)


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler told a fused optimizer not to step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _refuse_second(owner: Optimizer, new: Treatment) -> None:
    """Refuse what is attached already; our hooks in the optimizer know."""
    hooks = cast(dict[int, Any], owner._optimizer_step_post_hooks)
    handles = [hook.__self__ for hook in hooks.values() if hasattr(hook, "__self__")]
    for old in (t for h in handles if isinstance(h, Handle) for t in h.treatments[owner]):
        if old.leaf is new.leaf and old.kind is new.kind:
            name = f"{new.kind.__name__} is attached to {new.slot.name}"
            raise ValueError(f"{name} already; close its handle first")
