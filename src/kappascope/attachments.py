"""How a correction holds on to a model and its optimizers, and lets go again.

A :class:`Slot` is one weight, wherever it is used; a :class:`Treatment` is what happens to it
around a step of its optimizer; a :class:`Handle` is all of a correction's treatments and how to
undo them; the :class:`Rounds` of an optimizer go through the treatments of all handles.

Everything hangs on ``optimizer.step()``: what a gradient scaler skips is skipped here, accumulated
gradients are complete, unscaled and averaged over processes by then, and no loop is rewritten.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from numbers import Real
from types import FrameType
from typing import Any, NoReturn, TypeAlias, cast

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
    """One call of ``optimizer.step()``: its number from 1, the weight's group, what scales."""

    index: int
    group: Mapping[str, Any]
    factor: float = 1.0

    @property
    def learning_rate(self) -> float:
        """Of the weight."""
        return float(self.group["lr"])

    @property
    def scale(self) -> float:
        """What the optimizer is handed, in parts of the gradient of what is to fall.

        A fused one takes what a scaler has not unscaled, and one that maximizes takes the gradient
        of what is to rise.
        """
        return -self.factor if self.group.get("maximize") else self.factor


class Treatment:
    """What happens to one weight around every step of its optimizer."""

    follows_rate: bool = False  # of the weight, which it cannot do without
    _memory: State
    _device: torch.device | None  # where the memory is known to be

    def __init__(self, kind: type, slot: Slot, memory: State) -> None:
        self.kind = kind  # of correction: a weight is treated once by each
        self.slot, self.leaves, self.leaf = slot, slot.leaves, slot.leaves[-1]
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

    def ready(self) -> bool:
        """Whether to act on the step about to be taken; a weight may be frozen for a while."""
        return all(leaf.requires_grad for leaf in self.leaves)

    def before(self, step: Step) -> None:
        """Gradients are complete; the weight has not moved yet."""

    def is_sound(self) -> bool:
        """Whether the gradient that the optimizer is about to follow is finite."""
        return all(leaf.grad is None or _all_finite(leaf.grad) for leaf in self.leaves)

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
    """Replaces the matrix, as stored, by ``rule(matrix, step, memory)`` unless that is ``None``."""

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
            new = self.rule(matrix, step, self.memory)
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
    return math.isfinite(x.sum()) or bool(torch.isfinite(x).all())


# --- factors --------------------------------------------------------------------------------------


class Parametrized(Treatment):
    """Makes the weight of itself and factors, which a private optimizer steps."""

    follows_rate = True

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
        self.spared: _Spared | None = None
        self.pending: list[Tensor] = []

    def install(self, undo: ExitStack, report: Callable[[float], None]) -> None:
        """Put the factors into every place of the weight."""
        used: list[Tensor] = []  # by the model, at every place, until the factors are merged
        undo.callback(lambda: report(self._change(used)))
        for module, attribute in self.slot.homes:
            order = list(module._parameters)
            _parametrize(module, attribute, self.module)
            undo.callback(_restore, module, attribute, order)
        undo.callback(self._merge, used)

    @torch.no_grad()
    def _merge(self, used: list[Tensor]) -> None:
        used += [weight.clone() for weight in self.weights()]
        self.leaf.copy_(used[0])

    @torch.no_grad()
    def _change(self, used: list[Tensor]) -> float:
        """The largest change of a weight, in parts of its largest entry."""
        largest = 0.0
        for new, old in zip(self.weights(), used, strict=False):  # none if installing failed
            size = float(old.abs().amax()) or 1.0
            largest = max(largest, float((new - old).abs().amax()) / size)
        return largest

    def weights(self) -> list[Tensor]:
        """What the model uses at every place."""
        return [getattr(module, attribute) for module, attribute in self.slot.homes]

    def gradients(self) -> list[Tensor]:
        """Of the factors: they follow from that of the weight, and what clips were to spare."""
        leaf, view = self.leaf, self.module.view
        if leaf.grad is None:
            return []
        matrices = precise(view.matrix(leaf.detach())), precise(view.matrix(leaf.grad))
        found = self.module.gradients(*matrices)
        if self.spared is None:
            return found
        return [a + b for a, b in zip(found, self.spared.lost, strict=True)]

    def ready(self) -> bool:
        """As of any; and what was spared is forgotten with the gradient of which it was."""
        if self.spared is not None and not self.spared.is_of(self.leaf.grad):
            self.spared = None
        return super().ready()

    def spare(self, full: list[Tensor]) -> None:
        """Have the gradients as they were, whatever happened to that of the weight since."""
        self.spared, gradient = None, self.leaf.grad
        if full and gradient is not None:
            lost = [a - b for a, b in zip(full, self.gradients(), strict=True)]
            self.spared = _Spared(gradient, gradient._version, lost)

    def before(self, step: Step) -> None:
        """Note the gradients while the weight is where they were taken."""
        found, self.spared = self.gradients(), None
        self.pending = found if step.scale == 1.0 else [g / step.scale for g in found]

    def is_sound(self) -> bool:
        """As of any; the factors' gradients are sums over that of the weight, and fewer."""
        return all(map(_all_finite, self.pending)) or super().is_sound()


@dataclass(frozen=True, eq=False)
class _Spared:
    """What the factors' gradients lost when that of the weight became what it is."""

    gradient: Tensor
    version: int
    lost: list[Tensor]

    def is_of(self, gradient: Tensor | None) -> bool:
        """Whether it is that gradient still, and nothing happened to it since."""
        return gradient is self.gradient and self.gradient._version == self.version


def _parametrize(module: nn.Module, attribute: str, factors: Factors) -> None:
    """Register a parametrization of a parameter, which is not touched.

    torch would call ``set_`` on it, and DDP never hear of its gradients again: a stand-in is
    registered and the parameter put in its place. And torch lets a module share its class, in which
    the property is, with its copies: here every one has its own, and may be restored alone.
    """
    weight = module._parameters[attribute]
    assert weight is not None
    if parametrize.is_parametrized(module):
        module.__class__ = _twin(type(module))
    module._parameters[attribute] = nn.Parameter(torch.empty_like(weight))
    parametrize.register_parametrization(module, attribute, factors, unsafe=True)
    cast(nn.ModuleDict, module.parametrizations)[attribute].original = weight
    kind = cast(Any, type(module))
    kind.__deepcopy__ = _of_its_own_class(kind.__deepcopy__)


def _of_its_own_class(copied: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A ``__deepcopy__`` that gives the copy a class of its own."""

    @wraps(copied)
    def deepcopy(module: nn.Module, memo: State) -> nn.Module:
        replica = copied(module, memo)
        if type(replica) is type(module):
            replica.__class__ = _twin(type(module))
        return replica

    return deepcopy


def _twin(kind: type) -> type:
    """The same class a second time."""
    body = {key: value for key, value in vars(kind).items() if key not in _PER_CLASS}
    return type(kind.__name__, kind.__bases__, body)


_PER_CLASS = {"__dict__", "__weakref__"}  # Python makes them for every class


@torch.no_grad()
def _restore(module: nn.Module, attribute: str, order: list[str]) -> None:
    """Remove the parametrization; put the parameter back where it was in the module's order."""
    if not parametrize.is_parametrized(module, attribute):
        return  # somebody else has removed it
    makings = cast(nn.ModuleDict, module.parametrizations)
    original = cast(nn.Parameter, makings.pop(attribute).original)
    kind = type(module)
    if makings:
        module.__class__ = _twin(kind)
        delattr(type(module), attribute)
    else:
        module.__class__ = kind.__bases__[0]
        del module.parametrizations
    module.register_parameter(attribute, original)
    for name in order:
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)


class Private:
    """The optimizer of a correction's own parameters; it follows the user's.

    Plain gradient steps (with the same momentum) where the user's optimizer is SGD, AdamW where it
    is anything else, at a part of the learning rate. Not a parameter group of the user's:
    schedulers would not expect it.
    """

    def __init__(
        self, owner: Optimizer, treatments: Sequence[Parametrized], leader: Optimizer
    ) -> None:
        self.treatments, self.leader, self.owner = treatments, leader, owner
        # one group of all that move alike: an optimizer takes its time for each
        together: dict[tuple[int | None, float, float], list[Parametrized]] = {}
        for t in treatments:
            followed = group(owner, t.leaf) if leader is owner else 0
            together.setdefault((followed, t.rate, t.weight_decay), []).append(t)
        self.parts = list(together.values())
        groups: list[dict[str, Any]] = [
            {"params": [f for t in part for f in t.module.factors], "weight_decay": decay}
            for (_, _, decay), part in together.items()
        ]
        self.optimizer: Optimizer
        if isinstance(owner, SGD):
            self.optimizer = SGD(groups)
        else:
            # many tiny tensors: unfused, a step of theirs is all overhead
            fused = all(p.device.type == "cpu" for its in groups for p in its["params"]) or None
            self.optimizer = AdamW(groups, fused=fused)

    def _pace(self, t: Parametrized) -> dict[str, Any]:
        """How the factors of a weight are to move, as the weight does now."""
        own = _group(self.owner, t.leaf)
        rate = own["lr"] if self.leader is self.owner else self.leader.param_groups[0]["lr"]
        pace = {"lr": t.rate * float(rate)}
        if isinstance(self.owner, SGD):
            return pace | {key: own[key] for key in ("momentum", "dampening", "nesterov")}
        return pace | {"betas": _betas(own.get("betas"))}

    @torch.no_grad()
    def step(self, acting: set[Treatment]) -> Iterator[Treatment]:
        """Step the factors of those acting; yield the treatments whose step was refused."""
        moving: list[tuple[Parametrized, list[Tensor]]] = []
        for its, part in zip(self.optimizer.param_groups, self.parts, strict=True):
            some = [t for t in part if t in acting]
            if some:
                its.update(self._pace(some[0]))
            moving += [(t, [factor.clone() for factor in t.module.factors]) for t in some]
        for t, _ in moving:
            for factor, gradient in zip(t.module.factors, t.pending, strict=False):
                factor.grad = gradient.to(factor).reshape(factor.shape)
        self.optimizer.step()
        for t, old in moving:
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


def _betas(found: Any) -> tuple[float, float]:
    """The first two, should an optimizer have others than Adam's; or Adam's defaults."""
    try:
        first, second = (float(beta) for beta in found[:2])
    except (TypeError, ValueError):
        return 0.9, 0.999
    return (first, second) if 0 <= min(first, second) <= max(first, second) < 1 else (0.9, 0.999)


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


# --- around a step --------------------------------------------------------------------------------


class Rounds:
    """Goes through what is attached to one optimizer, by whichever handles, around its steps.

    What adds to gradients comes before factors, whose gradients are to include it, in whichever
    order they were attached. A ``step`` that calls that of the class above it is one step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.handles: list[Handle] = []
        self.call: FrameType | None = None  # of the step being taken
        self.acting: list[tuple[Handle, Treatment, Step]] = []
        self.withheld: list[tuple[nn.Parameter, Tensor | None]] = []
        self.hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    @classmethod
    def of(cls, optimizer: Optimizer) -> Rounds | None:
        """Those of an optimizer, if something is attached: our hooks in it know."""
        hooks = cast(dict[int, Any], optimizer._optimizer_step_post_hooks).values()
        found = (getattr(hook, "__self__", None) for hook in hooks)
        return next((rounds for rounds in found if isinstance(rounds, cls)), None)

    def leave(self, handle: Handle) -> None:
        """Let go of a handle, and of the optimizer after the last."""
        self.handles.remove(handle)
        for hook in () if self.handles else self.hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = sys._getframe(1)
        if _is_within(call, self.call):
            return
        self.call, self.acting, self.withheld = call, [], []  # the last step may have raised
        if _skipped(optimizer):
            return
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ValueError("step(closure) computes gradients too late; call backward() first")
        with torch.no_grad(), spectra.without_autocast():
            self.acting = self._admitted(optimizer)
            for _, treatment, step in self.acting:
                treatment.before(step)
            self._withhold()

    def _admitted(self, optimizer: Optimizer) -> list[tuple[Handle, Treatment, Step]]:
        """Who acts on this step: those whose weight is trained."""
        found = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if found is None else float(found)
        groups = {id(p): its for its in optimizer.param_groups for p in its["params"]}
        admitted = [
            (handle, t, Step(handle._steps[optimizer] + 1, groups[id(t.leaf)], factor))
            for handle in self.handles
            for t in handle.treatments[optimizer]
            if id(t.leaf) in groups and t.ready()
        ]
        return sorted(admitted, key=lambda entry: isinstance(entry[1], Parametrized))

    def _withhold(self) -> None:
        """Keep the optimizer from following gradients that are not finite."""
        last = {t.leaf: t for _, t, _ in self.acting}  # factors, if there are
        bad = {leaf for leaf, t in last.items() if not t.is_sound()}
        if not bad:
            return
        for leaf in (leaf for its in bad for leaf in last[its].leaves):
            self.withheld.append((leaf, leaf.grad))
            leaf.grad = None
        refused = {(handle, t.leaf): t for handle, t, _ in self.acting if t.leaf in bad}
        for (handle, _), t in refused.items():
            handle._refuse(t)
        self.acting = [entry for entry in self.acting if entry[1].leaf not in bad]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is not self.call:
            return
        self.call = None
        if _skipped(optimizer):
            return
        for leaf, gradient in self.withheld:
            leaf.grad = gradient
        with torch.no_grad(), spectra.without_autocast():
            for handle, treatment, step in self.acting:
                if not treatment.after(step):
                    handle._refuse(treatment)
            acting = {treatment for _, treatment, _ in self.acting}
            for handle in self.handles:
                handle._stepped(optimizer, acting)
        self.acting, self.withheld = [], []


def _is_within(call: FrameType | None, outer: FrameType | None) -> bool:
    """Whether a call was made by another; one that has raised is on no stack any more."""
    while outer is not None and call is not None and call is not outer:
        call = call.f_back
    return outer is not None and call is outer


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler told a fused optimizer not to step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


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
    _steps: Counter[Optimizer] = field(default_factory=Counter, repr=False)
    _private: dict[Optimizer, Private] = field(default_factory=dict, repr=False)
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
            for treatment in sorted(treatments, key=lambda t: isinstance(t, Parametrized)):
                owner = _owner(optimizers, treatment.leaf)
                _refuse_clash(owner, treatment)
                _refuse_without_rate(owner, treatment, _leader(owner, optimizers))
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
            rounds = Rounds.of(owner) or Rounds(owner)
            rounds.handles.append(self)
            undo.callback(rounds.leave, self)

    def _note(self, difference: float) -> None:
        self.difference = max(self.difference or 0.0, difference)

    def _stepped(self, optimizer: Optimizer, acting: set[Treatment]) -> None:
        """An optimizer has stepped: so do the factors of those acting."""
        if (private := self._private.get(optimizer)) is not None:
            for treatment in private.step(acting):
                self._refuse(treatment)
        self._steps[optimizer] += 1

    def _refuse(self, treatment: Treatment) -> None:
        """Count a step that is not taken, and tell of the first of every weight."""
        name = treatment.slot.name
        if not self.refused[name]:
            text = f"a step of {treatment.kind.__name__} was refused: {name} would not be finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.refused[name] += 1

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        """Leave the multipliers out of what happens inside to the gradients of the weights.

        These are to be complete before; what is spared holds for the next step, and is forgotten if
        the gradients change or are cleared before it.

        >>> from kappascope.corrections import Multipliers
        >>> model = nn.Linear(2, 2)
        >>> handle = Multipliers().attach(model, SGD(model.parameters(), lr=0.1))
        >>> with handle.unclipped():
        ...     _ = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        """
        every = self._factored()
        with torch.no_grad(), spectra.without_autocast():
            full = [t.gradients() if t.ready() else [] for t in every]
        yield
        with torch.no_grad(), spectra.without_autocast():
            for t, before in zip(every, full, strict=True):
                t.spare(before)

    def _factored(self) -> list[Parametrized]:
        return [t for private in self._private.values() for t in private.treatments]

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
        for key, treatment in found.items():
            if lacking := treatment.module.state_dict().keys() - factors[key].keys():
                told = f"{key} comes without its factors {', '.join(sorted(lacking))}"
                raise ValueError(f"{told}; pass the whole model's state dict")
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
        return {_original(path): t for t in self._factored() for path, *_ in t.slot.places}

    # Letting go

    def close(self) -> None:
        """Merge, restore, and check that the weights are those the model used."""
        if self.difference is not None:
            return
        for treatment in self._factored():
            treatment.weights()  # what cannot be merged raises before anything is undone
        self._undo.close()
        self.difference = self.difference or 0.0
        for optimizer in self.treatments:
            self.treatments[optimizer] = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        told = "a handle cannot be copied or pickled: it is tied to its model and optimizer"
        raise TypeError(f"{told}; attach to the copies and load its state_dict()")


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


def _owner(optimizers: Sequence[Optimizer], leaf: Tensor) -> Optimizer:
    """The optimizer that has ``leaf``."""
    return next(o for o in optimizers if group(o, leaf) is not None)


def _group(optimizer: Optimizer, leaf: Tensor) -> dict[str, Any]:
    """The parameter group that holds ``leaf``."""
    found = group(optimizer, leaf)
    assert found is not None
    return optimizer.param_groups[found]


def _refuse_clash(owner: Optimizer, new: Treatment) -> None:
    """Refuse what is attached already, and factors of what another correction rewrites."""
    rounds = Rounds.of(owner)
    attached = [t for handle in rounds.handles for t in handle.treatments[owner]] if rounds else []
    for old in (t for t in attached if t.leaf is new.leaf):
        kinds = old.kind.__name__, new.kind.__name__
        if old.kind is new.kind:
            raise ValueError(f"{kinds[0]} is attached to {new.slot.name} already; close it first")
        if isinstance(old, Rewrite) and isinstance(new, Parametrized):
            told = f"{kinds[0]} rewrites {new.slot.name}, which {kinds[1]} would make of factors"
            raise ValueError(f"{told}; close it first")


def _refuse_without_rate(owner: Optimizer, treatment: Treatment, leader: Optimizer) -> None:
    """Refuse what follows a learning rate where there is none."""
    its = _group(owner, treatment.leaf) if leader is owner else leader.param_groups[0]
    if treatment.follows_rate and not isinstance(its.get("lr"), Real | Tensor):
        told = f"{treatment.kind.__name__} follows the learning rate of {treatment.slot.name}"
        came = f"{type(leader).__name__} has {its.get('lr')!r}"
        raise ValueError(f"{told}, and {came}; give it a number")
