"""Does an optimizer do what its class name and its settings promise?

A few steps are taken and undone. Before each of them weights and gradients are read as the
optimizer finds them, after it the weights; what came is compared with what
:mod:`~kappascope.monitor.promises` computes from the gradients alone, in float64. How far apart
the two may be is not a tolerance that was chosen: the same formula in the weights' own type tells
what rounding makes of it.

>>> model = torch.nn.Linear(3, 2)
>>> optimizer = torch.optim.AdamW(model.parameters())
>>> audit(model, optimizer, lambda: model(torch.ones(4, 3)).square().sum())
audit of AdamW: passed, 2 of 2 parameters moved as promised in 5 steps
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kappascope.matrix import spectra
from kappascope.matrix.precision import half_ulps
from kappascope.model import names
from kappascope.model.matrices import Unit, plan
from kappascope.monitor._snapshot import restored
from kappascope.monitor.promises import (
    Partition,
    Promise,
    Settings,
    State,
    Step,
    Steps,
    Unpromised,
    promise_of,
)
from kappascope.text import first_few, number, plural

Closure: TypeAlias = Callable[[], Any]
STEPS = 5  # bias correction, momentum and decay have all shown themselves by then


@dataclass(frozen=True)
class AuditRow:
    """What was expected of one parameter, and what came.

    ``error`` is the distance between them relative to what was expected, at the step where it was
    largest, and ``allowed`` the distance that rounding explains there; without a formula to compare
    with (``is_checked`` is false) they are missing, and only invariants were looked at.
    """

    matrix: str
    optimizer: str
    expected: str
    came: str
    passed: bool
    is_checked: bool = True
    step: int | None = None  # where it failed first
    error: float | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        at = f" at step {self.step}" if self.step else ""
        return f"{self.matrix}: expected {self.expected}; came{at} {self.came}"


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of an audit: one row for every parameter that is, or should be, stepped."""

    rows: tuple[AuditRow, ...]
    optimizers: tuple[str, ...]
    steps: int

    @property
    def passed(self) -> bool:
        """Whether nothing came that contradicts what was promised."""
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> tuple[AuditRow, ...]:
        """The rows of what did not come as promised."""
        return tuple(row for row in self.rows if not row.passed)

    def __str__(self) -> str:
        checked = [row for row in self.rows if row.is_checked]
        kept = sum(row.passed for row in checked)
        lines = [
            f"audit of {' and '.join(self.optimizers)}: {'passed' if self.passed else 'FAILED'}, "
            f"{kept} of {plural(len(checked), 'parameter')} moved as promised "
            f"in {plural(self.steps, 'step')}"
        ]
        lines += [f"  {row}" for row in self.failed]
        unchecked: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.is_checked and row.passed:
                unchecked.setdefault(row.expected, []).append(row.matrix)
        lines += [f"  {first_few(them)}: {why}" for why, them in unchecked.items()]
        return "\n".join(lines)

    __repr__ = __str__


def audit(
    model: nn.Module, optimizer: Any, closure: Closure, *, steps: int = STEPS
) -> Audit:
    """Take a few steps, compare each with what the optimizer's name and settings promise; undo all.

    ``closure`` computes the loss and calls backward, once or for several micro-batches; one that
    only returns the loss is accepted, too, and is told by the gradients that it leaves missing.
    ``optimizer`` may be a sequence of optimizers that share the model.

    Weights, buffers, gradients, the optimizer's state and random states are put back to the bit, also
    if the closure raises. Batches that the closure draws from an iterator are gone.

    >>> model = nn.Linear(3, 2)
    >>> class Adam(torch.optim.SGD):
    ...     "It is not what it says."
    >>> optimizer = Adam(model.parameters(), lr=0.1)
    >>> result = audit(model, optimizer, lambda: model(torch.ones(4, 3)).square().sum())
    >>> result.passed
    False
    """
    optimizers = [_unwrapped(each) for each in _listed(optimizer)]
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}; leave steps at {STEPS}")
    with restored(model, *_listed(optimizer), closure=closure):
        auditor = Auditor(model, optimizers)
        for _ in range(steps):
            for parameter in auditor.parameters:
                parameter.grad = None
            if not any(map(_needs_closure, optimizers)):
                _backward(closure, auditor.parameters)
            for each in optimizers:
                with auditor.watching(each):
                    each.step(closure) if _needs_closure(each) else each.step()
        return auditor.result()


def _listed(optimizer: Any) -> Sequence[Any]:
    found = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in found:
        if not (callable(getattr(each, "step", None)) and _groups(each)):
            kind = type(each).__name__
            raise TypeError(f"expected an optimizer with step and param_groups, got {kind}")
    return found


# Wrappers that step another optimizer and promise nothing themselves.
TRANSPARENT = ("AcceleratedOptimizer", "LightningOptimizer")


def _unwrapped(optimizer: Any) -> Any:
    if any(kind.__name__ in TRANSPARENT for kind in type(optimizer).__mro__):
        return _unwrapped(optimizer.optimizer)
    return optimizer


def _groups(optimizer: Any) -> Sequence[dict[str, Any]]:
    """The parameter groups of an optimizer, or of the one that it wraps."""
    found = getattr(optimizer, "param_groups", None)
    inner = getattr(optimizer, "optimizer", None)
    return found if found or inner is None else _groups(inner)


def _states(optimizer: Any) -> Mapping[Any, Any]:
    found = getattr(optimizer, "state", None)
    inner = getattr(optimizer, "optimizer", None)
    return found if isinstance(found, Mapping) or inner is None else _states(inner)


def _needs_closure(optimizer: Any) -> bool:
    """Whether ``step`` calls the closure itself and cannot be called without it."""
    try:
        parameters = inspect.signature(optimizer.step).parameters
    except (TypeError, ValueError):
        return False
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _backward(closure: Closure, parameters: Iterable[Tensor]) -> None:
    """Call the closure, and backward after it if it did not."""
    loss = closure()
    if any(parameter.grad is not None for parameter in parameters):
        return
    if not (isinstance(loss, Tensor) and loss.requires_grad):
        raise ValueError(
            "expected a closure that calls backward or returns the loss, got "
            f"{type(loss).__name__} and no gradient; return the loss from it"
        )
    loss.backward()


@dataclass
class _Watched:
    """One parameter under audit: what is promised, and how well it has been kept so far."""

    name: str
    optimizer: str
    promise: Promise | None
    reason: str = ""  # why nothing is promised
    settings: Settings = field(default_factory=dict)
    exact: State = field(default_factory=State)  # in float64
    rounded: State = field(default_factory=State)  # as the weight's own type makes it
    agreed: set[str] | None = None  # the conventions that every step so far agrees with
    failure: tuple[int, str, str] | None = None  # step, expected and came
    error: float = 0.0
    allowed: float = 0.0
    decay_seen: list[tuple[float, float, float]] = field(default_factory=list)
    hidden: bool = False  # whether rounding hid all that was expected


class Auditor:
    """Compares the steps of optimizers with what they promise, one by one, as they are taken.

    It changes nothing and keeps no history: :meth:`before` and :meth:`after` go around each step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.model, self.optimizers, self.steps = model, tuple(optimizers), 0
        named = dict(model.named_parameters())
        self._names = {id(p): name for name, p in named.items()}
        owners: dict[int, list[str]] = {}
        self._owned: dict[int, Tensor] = {}
        for optimizer in self.optimizers:
            for i, group in enumerate(_groups(optimizer)):
                for j, p in enumerate(group["params"]):
                    self._names.setdefault(id(p), f"group {i}, parameter {j}")
                    owners.setdefault(id(p), []).append(type(optimizer).__name__)
                    self._owned[id(p)] = p
        self._owners = owners
        self.parameters = list({id(p): p for p in (*named.values(), *self._owned.values())}.values())
        self._units = {unit.parts[0].name: unit for unit in plan(model).units}
        embedded = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self._embedded = {id(module.weight) for module in embedded}
        self._watched: dict[int, _Watched] = {}
        self._orphans: dict[str, int] = {}
        self._moved_frozen: dict[str, int] = {}
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._after: dict[int, Tensor] = {}

    # --- around one step --------------------------------------------------------------------------

    @contextmanager
    def watching(self, optimizer: Any) -> Iterator[None]:
        """Watch one call of ``optimizer.step()``.

        Other hooks of the optimizer, such as a correction's, do their work outside of what is
        compared: gradients are read after them, and weights before them.
        """
        with ExitStack() as hooks:
            self.before(optimizer)
            hooked = _hooked(optimizer)
            if hooked is not None:
                is_open = [True]

                def begin(*_: Any) -> None:
                    if is_open.pop() if is_open else False:
                        self.before(optimizer)

                def end(*_: Any) -> None:
                    self._after = {id(p): p.detach().clone() for p in _parameters(optimizer)}

                first = hooked.register_step_pre_hook(begin)
                hooks.callback(first.remove)
                last = hooked.register_step_post_hook(end)
                hooks.callback(last.remove)
                hooked._optimizer_step_post_hooks.move_to_end(last.id, last=False)
            yield
        self.after(optimizer)

    @torch.no_grad()
    def before(self, optimizer: Any) -> None:
        """Note weights and gradients as the optimizer finds them."""
        self._after = {}
        self._before = {id(p): (p.detach().clone(), _copied(p.grad)) for p in self.parameters}
        for group in _groups(optimizer):
            for p in group["params"]:
                if id(p) not in self._watched:
                    self._watched[id(p)] = self._met(optimizer, p)
                self._watched[id(p)].settings = self._settings(optimizer, group, p)

    @torch.no_grad()
    def after(self, optimizer: Any) -> None:
        """Compare what came with what was expected."""
        self.steps += optimizer is self.optimizers[0]
        mine = {id(p) for p in _parameters(optimizer)}
        for p in self.parameters:
            weight, gradient = self._before[id(p)]
            now = self._after.get(id(p), p.detach())
            name = self._names[id(p)]
            if not p.requires_grad and not _same(weight, now):
                self._moved_frozen.setdefault(name, self.steps)
            elif id(p) in mine:
                with spectra.without_autocast():
                    self._compare(self._watched[id(p)], weight, gradient, now)
            elif id(p) not in self._owned and gradient is not None and gradient.any():
                self._orphans.setdefault(name, self.steps)

    def _met(self, optimizer: Any, p: Tensor) -> _Watched:
        """A parameter at the first step, with the state that the optimizer has for it."""
        name, kind = self._names[id(p)], type(optimizer).__name__
        kept = dict(_states(optimizer).get(p, {})) if _states(optimizer) else {}
        group = next(g for g in _groups(optimizer) if any(q is p for q in g["params"]))
        kept.setdefault("step", group.get("step", 0))
        settings = self._settings(optimizer, group, p)
        try:
            promise = promise_of(optimizer, settings)
        except Unpromised as missing:
            return _Watched(name, kind, None, str(missing))
        exact, rounded = _begun(kept, torch.float64), _begun(kept, _real(p).dtype)
        rounded.is_exact = False
        if settings.get("capturable") or settings.get("differentiable"):
            rounded.time = torch.tensor(float(rounded.time))  # counted in float32 there
        return _Watched(name, kind, promise, exact=exact, rounded=rounded)

    def _settings(self, optimizer: Any, group: Mapping[str, Any], p: Tensor) -> Settings:
        """What group, optimizer and model say about one parameter."""
        said = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | str)}
        said |= {key: _plain(value) for key, value in group.items() if key != "params"}
        state = _states(optimizer)
        flag = state[p].get("use_muon") if state and p in state else None
        if "use_muon" not in said and isinstance(flag, bool):  # Moonlight's Muon keeps it there
            said["use_muon"] = flag
        name = self._names[id(p)]
        kind = names.kind(name)
        said["is_hidden"] = id(p) not in self._embedded and kind not in ("embedding", "head")
        said["dtype"] = _real(p).dtype
        if p.ndim > 1:
            said["partitions"] = _partitions(self._units.get(name), kind, tuple(p.shape), said)
        if p.grad is not None and p.grad.is_sparse:
            said["touched"] = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
            indices = p.grad.coalesce().indices()
            said["touched"][tuple(indices)] = True
        return said

    def _compare(
        self, watched: _Watched, weight: Tensor, gradient: Tensor | None, now: Tensor
    ) -> None:
        weight, now = _real(weight), _real(now)
        came = now.double() - weight.double()
        if watched.promise is None or watched.failure:
            return
        if not (gradient is None or (gradient.isfinite().all() and weight.isfinite().all())):
            watched.promise, watched.reason = None, "its gradient is not finite"
            return
        if gradient is None:
            if not came.any():
                return  # without a gradient a step is skipped
            gradient = torch.zeros_like(weight)  # or taken with zeros in its place
        gradient = _real(gradient)
        states = ((watched.exact, torch.float64), (watched.rounded, weight.dtype))
        try:
            (exact, shrunk), (rounded, _) = (
                watched.promise.steps(watched.settings, s, weight.to(d), gradient.to(d))
                for s, d in states
            )
        except Unpromised as missing:
            watched.promise, watched.reason = None, str(missing)
            return
        self._judge(watched, _Comparison(weight, gradient, came, shrunk), exact, rounded)

    def _judge(self, watched: _Watched, seen: _Comparison, exact: Steps, rounded: Steps) -> None:
        """Which of the conventions agree with what came; none that has agreed so far is a failure."""
        undecided = watched.exact.undecided
        found = {
            name: seen.distance(step, rounded[name].update, undecided)
            for name, step in exact.items()
        }
        agreeing = {name for name, (error, allowed, _) in found.items() if not error > allowed}
        left = agreeing if watched.agreed is None else watched.agreed & agreeing
        nearest = min(left or found, key=lambda name: found[name][0] / (found[name][1] or 1e-300))
        error, allowed, size = found[nearest]
        if size:
            watched.error = max(watched.error, error / size)
            watched.allowed = max(watched.allowed, allowed / size)
        watched.hidden = allowed >= size > 0
        if left:
            watched.agreed = left
            share = watched.promise.decay(watched.settings)[1] if watched.promise else 0.0
            watched.decay_seen.append(seen.decay(exact[nearest].update, share))
            return
        expected = f"the step of {watched.optimizer}" + (f" ({nearest})" if nearest else "")
        watched.failure = self.steps, expected, seen.described(exact[nearest].update)

    # --- what came of it --------------------------------------------------------------------------

    def result(self) -> Audit:
        """The verdict on every parameter, from all steps so far."""
        rows = [self._row(watched) for watched in self._watched.values()]
        rows = [row for row in rows if row.matrix not in self._moved_frozen]
        for name, step in self._moved_frozen.items():
            rows.append(_fact(name, "no step: it does not require a gradient", "a move", step))
        for p, owners in ((self._owned[key], owners) for key, owners in self._owners.items()):
            if len(owners) > 1:
                who = " and ".join(owners)
                came = f"two: it is in the groups of {who}"
                rows.append(_fact(self._names[id(p)], "one step at a time", came, None))
        selective = {"Muon", "SparseAdam"} & {
            kind.__name__ for each in self.optimizers for kind in type(each).__mro__
        }
        for name, step in self._orphans.items():
            expected = "a step of some optimizer, or requires_grad=False"
            if selective:  # which by nature take some parameters and not others
                why = f"no optimizer that was passed steps it; {min(selective)} need not"
                rows.append(AuditRow(name, "nobody", why, "no step", True, is_checked=False))
            else:
                rows.append(_fact(name, expected, "a gradient, and no optimizer that has it", step))
        kinds = tuple(type(each).__name__ for each in self.optimizers)
        return Audit(tuple(rows), kinds, self.steps)

    def _row(self, watched: _Watched) -> AuditRow:
        name, kind = watched.name, watched.optimizer
        if watched.failure is None and watched.promise is not None:
            watched.failure = self._failed_decay(watched)
        if watched.failure:
            step, expected, came = watched.failure
            numbers = (watched.error, watched.allowed) if watched.promise else (None, None)
            is_checked = watched.promise is not None
            return AuditRow(name, kind, expected, came, False, is_checked, step, *numbers)
        if watched.promise is None:
            why = f"only invariants were checked ({watched.reason})"
            return AuditRow(name, kind, why, "nothing that contradicts them", True, False)
        if watched.agreed is None:
            return AuditRow(name, kind, "a gradient", "none in any step", True, False)
        came = "it, as far as rounding lets one see" if watched.hidden else "it"
        expected = f"the step of {kind}"
        return AuditRow(
            name, kind, expected, came, True, True, None, watched.error, watched.allowed
        )

    def _failed_decay(self, watched: _Watched) -> tuple[int, str, str] | None:
        """Whether the decay that came is not the stated one, where the step itself is too noisy.

        Newton and Schulz's iteration in bfloat16 differs by several per cent between honest
        implementations, more than a decay; but none of that points along the weight.
        """
        seen = [each for each in watched.decay_seen if each[1] > 0]
        if not seen:
            return None
        excess = sum(each[0] for each in seen) / len(seen)
        doubt = sum(each[1] ** 2 for each in seen) ** 0.5 / len(seen)
        share = sum(each[2] for each in seen) / len(seen)
        if share == 0 or abs(excess) <= max(6 * doubt, 0.3 * share):
            return None
        stated, came = number(share), number(share + excess)
        return self.steps, f"decay by {stated} of the weight a step", f"decay by {came}"


def _fact(name: str, expected: str, came: str, step: int | None) -> AuditRow:
    return AuditRow(name, "", expected, came, False, False, step)


# --- one comparison -------------------------------------------------------------------------------

# Half-ulps of the weight: rounded after decay, after the step and once more, each uniform within one,
# that is 1 in the mean square; 3 at worst, for a tensor of one entry. Stochastic rounding has 1.2.
ROUNDINGS = 1.5
# Units in the last place that the arithmetic of a formula may lose besides; some count in float32.
ARITHMETIC = 16
# Two honest roundings of a formula differ by sqrt(2) of one, and more in small tensors.
NOISE = 2.5


@dataclass(frozen=True)
class _Comparison:
    """One step of one parameter: the weight before, the gradient, what came, the decay in it."""

    weight: Tensor
    gradient: Tensor
    came: Tensor
    shrunk: Tensor

    def distance(
        self, step: Step, rounded: Tensor, undecided: Tensor | None
    ) -> tuple[float, float, float]:
        """How far what came is from a step, how far it may be, and the size of the step."""
        update = step.update
        gap, noise = self.came - update, rounded.double() - update
        if undecided is not None:
            gap, noise = gap.masked_fill(undecided, 0.0), noise.masked_fill(undecided, 0.0)
        if not noise.isfinite().all():  # the weights' own type cannot hold what is promised
            return 0.0, float("inf"), 0.0
        size, dtype = _norm(update), self.weight.dtype
        largest = torch.maximum(self.weight.abs(), (self.weight + self.came).abs()).double()
        rounding = (ROUNDINGS + ROUNDINGS / self.weight.numel() ** 0.5) * _norm(
            half_ulps(largest, dtype)
        )
        precision = max(torch.finfo(kind).eps for kind in (dtype, torch.float32))
        # before or after the step: nobody promises when the decay is taken off
        order = _norm(self.shrunk) / max(_norm(self.weight), 1e-300)
        relative = ARITHMETIC * precision + order + step.slack
        error = _norm(gap) if gap.isfinite().all() else float("inf")
        return error, rounding + relative * size + NOISE * _norm(noise), size

    def decay(self, update: Tensor, share: float) -> tuple[float, float, float]:
        """How much more of the weight went than was stated, its standard error, what was stated."""
        gap, weight = self.came - update, self.weight.double()
        square = float(weight.square().sum())
        if not square or weight.ndim < 2 or share < 4 * torch.finfo(self.weight.dtype).eps:
            return 0.0, 0.0, share
        excess = -float((gap * weight).sum()) / square
        return excess, _norm(gap) / (weight.numel() * square) ** 0.5, share

    def described(self, update: Tensor) -> str:
        """What came, in words, beside the step that was expected."""
        came = self.came
        if not came.any():
            return "no move"
        size = _norm(came) / _norm(update) if update.any() else float("inf")
        alike = _cosine(came, update)
        gap, weight = came - update, self.weight.double()
        share = -float((gap * weight).sum()) / max(float(weight.square().sum()), 1e-300)
        if alike > 0.9999 and abs(size - 1) > 1e-3:
            return f"{number(size)} times that step"
        if abs(_cosine(gap, weight)) > 0.95:
            stated = -float((self.shrunk * weight).sum()) / float(weight.square().sum())
            return f"decay by {number(stated + share)} of the weight, not {number(stated)}"
        if alike > 0.9999:
            return f"a step that differs by {number(_norm(gap) / _norm(update))} of its size"
        words = [f"cosine {number(alike)} with it, {number(size)} times its size"]
        step = came - self.shrunk
        if abs(_cosine(step, self.gradient.double())) > 0.999:
            words.append("along the gradient, as SGD's")
        elif step.abs().std(correction=0) < 0.02 * step.abs().mean():
            words.append("all entries of one size, as Adam's first or a sign's")
        return "; ".join(words)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _cosine(a: Tensor, b: Tensor) -> float:
    scale = _norm(a) * _norm(b)
    return float((a * b).sum()) / scale if scale else 0.0


# --- which matrices are orthogonalised -------------------------------------------------------------

HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")


def _partitions(
    unit: Unit | None, kind: str, shape: tuple[int, ...], said: Settings
) -> dict[str, Partition]:
    """How a tensor may be cut into matrices that are made orthogonal one by one.

    As a whole, by its logical matrices, or by heads; only as the settings say, where they do.
    """
    found: dict[str, Partition] = {"": lambda t: [t.flatten(1)]}
    if unit is not None and len(unit.layout.parts) > 1:
        found["its parts"] = lambda t: [piece for _, piece in unit.layout.cut(t)][1:]
    stated = next((int(said[key]) for key in HEADS if said.get(key)), 0)
    heads = stated or (unit.heads if unit is not None else 0)
    if heads and len(shape) == 2 and kind not in ("output", "up", "down", "gate"):
        queries = next((p.shape[0] for p in unit.parts if p.kind == "query"), 0) if unit else 0
        size = (queries or shape[0]) // heads
        if size and shape[0] % size == 0:
            found["its heads"] = lambda t: list(t.split(size))
    if heads and kind == "output" and shape[1] % heads == 0:
        found["its heads"] = lambda t: list(t.split(shape[1] // heads, dim=1))
    attention = kind in ("query", "key", "value", "fused")
    if stated and attention and "its heads" in found:
        return {"its heads": found["its heads"]}
    if any(said.get(key) for key in ("split_qkv", "split_fused")) and "its parts" in found:
        del found[""]
    return found


# --- small things ---------------------------------------------------------------------------------


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in _groups(optimizer) for p in group["params"]]


def _hooked(optimizer: Any) -> Any:
    """The optimizer that runs hooks of others around its step, itself or the one it wraps."""
    inner = getattr(optimizer, "optimizer", None)
    own = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
    if any(own.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        return optimizer
    return None if inner is None or inner is optimizer else _hooked(inner)


def _begun(kept: Mapping[str, Any], dtype: torch.dtype) -> State:
    """A copy of an optimizer's state of one parameter, in a type."""

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.item() if x.ndim == 0 else _real(x.detach()).to(dtype, copy=True)
        return x

    return State({key: value(x) for key, x in kept.items()})


def _plain(value: Any) -> Any:
    """A setting as numbers, where it is held in tensors of one entry."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value


def _copied(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
