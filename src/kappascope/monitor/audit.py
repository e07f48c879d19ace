"""Whether an optimizer does what its class name and its settings promise.

A few steps are taken and undone. Before each of them weights and gradients are read as the
optimizer finds them, after it the weights; what came is compared with what
:mod:`~kappascope.monitor.promises` computes from the gradients alone, in float64. How far apart
the two may be is no tolerance that somebody chose: the same formula in the weights' own type tells
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

from kappascope.corrections.optimizers import unwrapped_optimizer
from kappascope.matrix import spectra
from kappascope.model import names
from kappascope.model.matrices import Unit, plan
from kappascope.model.weights import unwrapped
from kappascope.monitor._comparison import Comparison, cosine, decay_text, euclidean, flatness
from kappascope.monitor._snapshot import restored
from kappascope.monitor.promises import (
    Candidates,
    Partition,
    Promise,
    Settings,
    State,
    Unpromised,
    promise_of,
)
from kappascope.text import first_few, number, plural

Closure: TypeAlias = Callable[[], Any]
STEPS = 5  # bias correction, momentum and decay have all shown themselves by then


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditRow:
    """What was expected of one parameter, and what came.

    ``error`` is the distance between them and ``allowed`` what rounding explains, both relative to
    the step that was expected, where they were farthest apart. Where no formula is promised
    (``is_checked`` is false) they are missing, and only invariants were looked at.
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
        return f"{self.matrix}: expected {self.expected}; came{at}: {self.came}"


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
        moved = f"{kept} of {plural(len(checked), 'parameter')} moved as promised"
        lines = [
            f"audit of {' and '.join(self.optimizers)}: {'passed' if self.passed else 'FAILED'}, "
            f"{moved if checked else 'no formula is known for any parameter,'} "
            f"in {plural(self.steps, 'step')}"
        ]
        lines += [f"  {row}" for row in self.failed]
        notes: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.is_checked and row.passed:
                notes.setdefault(row.expected, []).append(row.matrix)
        lines += [f"  {first_few(them)}: {why}" for why, them in notes.items()]
        return "\n".join(lines)

    __repr__ = __str__


# --- taking the steps -----------------------------------------------------------------------------


def audit(model: nn.Module, optimizer: Any, closure: Closure, *, steps: int = STEPS) -> Audit:
    """Take a few steps, compare each with what the optimizer's name and settings promise, undo all.

    ``closure`` computes the loss and calls backward, once or for several micro-batches; one that
    only returns the loss is accepted, too, and is told by the gradients that it leaves missing.
    Pass a list of optimizers where several share the model.

    Weights, buffers, gradients, the optimizer's state and random states are put back to the bit,
    also if the closure raises. Batches that the closure draws from an iterator are gone.

    >>> model = nn.Linear(3, 2)
    >>> class Adam(torch.optim.SGD):
    ...     "It is not what it says."
    >>> optimizer = Adam(model.parameters(), lr=0.1)
    >>> result = audit(model, optimizer, lambda: model(torch.ones(4, 3)).square().sum())
    >>> result.passed
    False
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [unwrapped_optimizer(each) for each in given]
    for each in optimizers:
        if not (callable(getattr(each, "step", None)) and _groups(each)):
            kind = type(each).__name__
            raise TypeError(f"expected an optimizer with step and param_groups, got {kind}")
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}; leave steps at {STEPS}")
    with restored(model, *given, closure=closure), ExitStack() as hooks:
        auditor = Auditor(model, optimizers)
        hooks.enter_context(auditor.raw_gradients())

        def backward() -> Any:
            for parameter in auditor.parameters:
                parameter.grad = None
            return _backward(closure, auditor.parameters)

        for _ in range(steps):
            backward()
            for each in optimizers:
                with auditor.watching(each):
                    _take_step(each, backward)
        return auditor.result()


def _backward(closure: Closure, parameters: Iterable[Tensor]) -> Any:
    """Call the closure, and backward after it if it did not."""
    with torch.enable_grad():
        loss = closure()
        if any(parameter.grad is not None for parameter in parameters):
            return loss
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            raise ValueError(
                "expected a closure that calls backward or returns the loss, got "
                f"{type(loss).__name__} and no gradient; return the loss from it"
            )
        loss.backward()
    return loss


def _take_step(optimizer: Any, backward: Closure) -> None:
    """Take a step, with a closure where the optimizer does not step without."""
    accepted = inspect.signature(optimizer.step).parameters.get("closure")
    if accepted is not None and accepted.default is inspect.Parameter.empty:
        optimizer.step(backward)
        return
    try:
        optimizer.step()
    except Exception:
        # what has a known formula needs none: its error is its own
        if accepted is None or _promise(optimizer, {"lr": 0.0}) is not None:
            raise
        optimizer.step(backward)


def _groups(optimizer: Any) -> Sequence[dict[str, Any]]:
    """The parameter groups of an optimizer, or of the one that it wraps."""
    groups: Sequence[dict[str, Any]] = getattr(optimizer, "param_groups", None) or ()
    inner = getattr(optimizer, "optimizer", None)
    return groups if groups or inner is None else _groups(inner)


def _state(optimizer: Any, p: Tensor) -> Mapping[str, Any]:
    """What an optimizer, or the one that it wraps, remembers of a parameter."""
    states, inner = getattr(optimizer, "state", None), getattr(optimizer, "optimizer", None)
    if isinstance(states, Mapping):
        kept = states.get(p)
        return kept if isinstance(kept, Mapping) else {}
    return {} if inner is None else _state(inner, p)


def _promise(optimizer: Any, settings: Settings) -> Promise | None:
    try:
        return promise_of(optimizer, settings)
    except Unpromised:
        return None


# --- watching them --------------------------------------------------------------------------------


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
    worst: tuple[float, float] = (0.0, 1.0)  # error and allowed
    is_hidden: bool = False  # whether rounding hid all that was expected
    is_foreign: bool = False  # whether it is no parameter of the model, such as a copy of one
    steps: int = 0
    decays: list[tuple[float, float, float]] = field(default_factory=list)


class Auditor:
    """Compares the steps of optimizers with what they promise, one by one, as they are taken.

    It changes nothing and keeps no history: :meth:`before` and :meth:`after` go around each step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.optimizers, self.steps = tuple(optimizers), 0
        model = unwrapped(model)
        named = dict(model.named_parameters())
        self._names = {id(p): name for name, p in named.items()}
        self._of_model = set(self._names)
        self._owners: dict[int, list[str]] = {}
        owned: dict[int, Tensor] = {}
        for optimizer in self.optimizers:
            for i, group in enumerate(_groups(optimizer)):
                for j, p in enumerate(group["params"]):
                    self._names.setdefault(id(p), f"group {i}, parameter {j}")
                    self._owners.setdefault(id(p), []).append(type(optimizer).__name__)
                    owned[id(p)] = p
        self.parameters = list({id(p): p for p in (*named.values(), *owned.values())}.values())
        self._units = {unit.parts[0].name: unit for unit in plan(model).units}
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self._tables = {id(module.weight) for module in tables}
        self._watched: dict[int, _Watched] = {}
        self._orphans: dict[str, int] = {}
        self._moved: dict[str, int] = {}  # though frozen
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._after: dict[int, Tensor] = {}
        self._raw: dict[int, Tensor] = {}

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

                def begin(*_: Any) -> None:  # a step may call that of the class above it
                    if is_open:
                        is_open.pop()
                        self.before(optimizer)

                def end(*_: Any) -> None:
                    self._after = {id(p): p.detach().clone() for p in self.parameters}

                first = hooked.register_step_pre_hook(begin)
                hooks.callback(first.remove)
                last = hooked.register_step_post_hook(end)
                hooks.callback(last.remove)
                _put_first(last.id, hooked._optimizer_step_post_hooks)
            yield
        self.after(optimizer)

    @contextmanager
    def raw_gradients(self) -> Iterator[None]:
        """Sum the gradients that backward computes, before other hooks change them."""
        with ExitStack() as hooks:
            for p in (p for p in self.parameters if p.requires_grad and p.ndim > 1 and p.is_leaf):

                def add(gradient: Tensor, key: int = id(p)) -> None:
                    gradient = gradient.detach()
                    self._raw[key] = self._raw[key] + gradient if key in self._raw else gradient

                hook = p.register_hook(add)
                hooks.callback(hook.remove)
                _put_first(hook.id, p._backward_hooks)
            yield

    @torch.no_grad()
    def before(self, optimizer: Any) -> None:
        """Note weights and gradients as the optimizer finds them."""
        self._after = {}
        self._before = {id(p): (p.detach().clone(), _copied(p.grad)) for p in self.parameters}
        flags = self._muon_flags(optimizer)
        for group in _groups(optimizer):
            for p in group["params"]:
                settings = self._settings(optimizer, group, p) | flags.get(id(p), {})
                if id(p) not in self._watched:
                    self._watched[id(p)] = self._met(optimizer, group, p, settings)
                self._watched[id(p)].settings = settings

    @torch.no_grad()
    def after(self, optimizer: Any) -> None:
        """Compare what came with what was expected."""
        self.steps += optimizer is self.optimizers[0]
        mine = {id(p) for p in _parameters(optimizer)}
        for p in self.parameters:
            weight, gradient = self._before[id(p)]
            now, name = self._after.get(id(p), p.detach()), self._names[id(p)]
            if not p.requires_grad and not _same(weight, now):
                self._moved.setdefault(name, self.steps)
            elif id(p) in mine:
                with spectra.without_autocast():
                    self._compare(self._watched[id(p)], weight, gradient, now)
                    self._compare_with_backward(self._watched[id(p)], id(p), gradient)
            elif id(p) not in self._owners and gradient is not None and gradient.any():
                if not _same(weight, p.detach()):
                    continue  # a hook of this optimizer steps it, such as a correction's
                self._orphans.setdefault(name, self.steps)
        if optimizer is self.optimizers[-1]:
            self._raw = {}

    # --- what is promised -------------------------------------------------------------------------

    def _met(
        self, optimizer: Any, group: Mapping[str, Any], p: Tensor, settings: Settings
    ) -> _Watched:
        """A parameter at the first step, with the state that the optimizer has for it."""
        name, kind = self._names[id(p)], type(optimizer).__name__
        try:
            promise = promise_of(optimizer, settings)
        except Unpromised as missing:
            return _Watched(name, kind, None, str(missing))
        kept = {"step": group.get("step", 0), **_state(optimizer, p)}
        exact, rounded = _begun(kept, torch.float64), _begun(kept, _real(p).dtype)
        rounded.is_exact = False
        if settings.get("capturable") or settings.get("differentiable"):
            rounded.time = torch.tensor(float(rounded.time))  # counted in float32 there
        is_foreign = id(p) not in self._of_model
        return _Watched(name, kind, promise, exact=exact, rounded=rounded, is_foreign=is_foreign)

    def _settings(self, optimizer: Any, group: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
        """What group, optimizer and model say about one parameter."""
        said: dict[str, Any] = {
            k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | str)
        }
        said |= {key: _plain(value) for key, value in group.items() if key != "params"}
        said |= {"dtype": _real(p).dtype, "is_hidden": self._is_hidden(p)}
        if p.ndim > 1:
            name = self._names[id(p)]
            shape = tuple(p.shape)
            said["partitions"] = _partitions(self._units.get(name), names.kind(name), shape, said)
        if p.grad is not None and p.grad.is_sparse:
            touched = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
            touched[tuple(p.grad.coalesce().indices())] = True
            said["touched"] = touched
        return said

    def _is_hidden(self, p: Tensor) -> bool:
        """Whether a weight is neither an embedding nor a head, so that Muon is meant for it."""
        kind = names.kind(self._names[id(p)])
        return p.ndim > 1 and id(p) not in self._tables and kind not in ("embedding", "head")

    def _muon_flags(self, optimizer: Any) -> dict[int, dict[str, bool]]:
        """Which parameters a Muon leaves to its Adam: by a flag, or by settings that are Adam's.

        An optimizer called Muon in which no hidden matrix is Muon's has lost its flags.
        """
        promise = _promise(optimizer, {"lr": 0.0})
        if promise is None or promise.name != "Muon":
            return {}
        groups = _groups(optimizer)
        has_both = any("momentum" in group for group in groups)
        flags: dict[int, dict[str, bool]] = {}
        for group in groups:
            is_adams = has_both and "betas" in group and "momentum" not in group
            for p in group["params"]:
                flag = group.get("use_muon", _state(optimizer, p).get("use_muon"))
                if is_adams or flag is not None:
                    flags[id(p)] = {"use_muon": bool(flag) and not is_adams}
        hidden = [p for p in _parameters(optimizer) if self._is_hidden(p)]
        is_lost = hidden and all(flags.get(id(p)) == {"use_muon": False} for p in hidden)
        return {id(p): {"use_muon": True} for p in hidden} if is_lost else flags

    # --- what came --------------------------------------------------------------------------------

    def _compare(
        self, watched: _Watched, weight: Tensor, gradient: Tensor | None, now: Tensor
    ) -> None:
        weight, now = _real(weight), _real(now)
        came = now.double() - weight.double()
        if watched.promise is None or watched.failure or not weight.numel():
            return
        if gradient is None:
            if not came.any():
                return  # without a gradient a step is skipped
            if watched.is_foreign:
                watched.promise, watched.reason = None, "its gradient is made within the step"
                return
            gradient = torch.zeros_like(weight)  # or taken with zeros in its place
        gradient = _real(gradient)
        if not (gradient.isfinite().all() and weight.isfinite().all()):
            watched.promise, watched.reason = None, "it or its gradient was not finite"
            return
        try:
            exact, shrunk = watched.promise.steps(
                watched.settings, watched.exact, weight.double(), gradient.double()
            )
            rounded, _ = watched.promise.steps(
                watched.settings, watched.rounded, weight, gradient.to(weight)
            )
        except Unpromised as missing:
            watched.promise, watched.reason = None, str(missing)
            return
        watched.steps += 1
        seen = Comparison(weight, gradient, came, shrunk, watched.exact.undecided)
        self._judge(watched, seen, exact, rounded)

    def _judge(
        self, watched: _Watched, seen: Comparison, exact: Candidates, rounded: Candidates
    ) -> None:
        """Keep the conventions that agree with what came; if none is left, that is a failure."""
        distances = {
            name: seen.distance(step, rounded[name].update) for name, step in exact.items()
        }
        agreeing = {name for name, (error, allowed) in distances.items() if error <= allowed}
        left = agreeing if watched.agreed is None else watched.agreed & agreeing
        nearest = min(
            left or distances, key=lambda name: distances[name][0] / (distances[name][1] or 1e-300)
        )
        step = exact[nearest].update
        error, allowed = (x / (euclidean(step) or 1.0) for x in distances[nearest])
        watched.worst = max(watched.worst, (error, allowed), key=lambda e: e[0] / (e[1] or 1e-300))
        watched.is_hidden = allowed >= 1
        if left:
            watched.agreed = left
            momentum = watched.exact.get("momentum_buffer")
            if exact[nearest].slack and isinstance(momentum, Tensor):
                watched.decays += seen.decay(step, rounded[nearest].update, momentum)
            return
        came = seen.described(step)
        if exact[nearest].slack:
            came += f"; singular values {seen.spectrum(watched.settings['lr'])} times the rate"
        expected = f"the step of {watched.optimizer}" + (f" ({nearest})" if nearest else "")
        watched.failure = self.steps, expected, came

    def _compare_with_backward(self, watched: _Watched, key: int, gradient: Tensor | None) -> None:
        """Find what was made orthogonal before Muon came to it, such as every micro-batch alone."""
        raw = self._raw.get(key)
        if raw is None or gradient is None or watched.failure or watched.promise is None:
            return
        if watched.promise.name != "Muon" or watched.settings.get("use_muon") is False:
            return
        raw, gradient = raw.double().flatten(1), gradient.double().flatten(1)
        if cosine(raw, gradient) > 0.99 or not (raw.isfinite().all() and raw.any()):
            return  # clipped or scaled, or not at all changed
        if flatness(gradient) > max(0.8, flatness(raw) + 0.1):
            watched.failure = (
                self.steps,
                "a gradient that Muon makes orthogonal once a step",
                "one that was made orthogonal before, as by micro-batch",
            )

    # --- the verdict ------------------------------------------------------------------------------

    def result(self) -> Audit:
        """The verdict on every parameter, from all steps so far."""
        rows = [_row(w) for w in self._watched.values() if w.name not in self._moved]
        for name, step in self._moved.items():
            rows.append(_fact(name, "no step: it does not require a gradient", "a move", step))
        for key, owners in self._owners.items():
            if len(owners) > 1:
                came = f"one each of {' and '.join(owners)}"
                rows.append(_fact(self._names[key], "the step of one optimizer", came))
        rows += self._orphaned_rows()
        kinds = tuple(type(each).__name__ for each in self.optimizers)
        return Audit(tuple(rows), kinds, self.steps)

    def _orphaned_rows(self) -> Iterator[AuditRow]:
        """What has a gradient and no optimizer.

        That is nobody's fault where an optimizer takes some parameters only, as Muon does, where
        the first layers up to some depth are left as they are, and where it steps copies in more
        digits.
        """
        promises = [_promise(each, {"lr": 0.0}) for each in self.optimizers]
        is_selective = any(p is None or p.name in ("Muon", "SparseAdam") for p in promises)
        order = [self._names[id(p)] for p in self.parameters if p.requires_grad]
        first = next((i for i, p in enumerate(order) if p not in self._orphans), len(order))
        is_of_another = self._steps_another_model()
        if not is_of_another and (is_selective or set(order[:first]) >= set(self._orphans)):
            for name in self._orphans:
                why = "no optimizer that was passed steps it"
                yield AuditRow(name, "", why, "no step", passed=True, is_checked=False)
            return
        came = "a gradient, and no optimizer that has it"
        if is_of_another:
            came += "; one has a copy of it, and was made before the model was copied or made anew"
        for name, step in self._orphans.items():
            expected = "a step of some optimizer, or requires_grad=False"
            yield _fact(name, expected, came, step)

    def _steps_another_model(self) -> bool:
        """Whether nothing of the model is stepped, but something like each of its parameters."""
        if self._of_model & set(self._owners):
            return False
        others = {(p.shape, p.dtype) for p in self.parameters if id(p) not in self._of_model}
        ours = (p for p in self.parameters if self._names[id(p)] in self._orphans)
        return all((p.shape, p.dtype) in others for p in ours)


def _fact(name: str, expected: str, came: str, step: int | None = None) -> AuditRow:
    return AuditRow(name, "", expected, came, passed=False, is_checked=False, step=step)


def _row(watched: _Watched) -> AuditRow:
    name, kind = watched.name, watched.optimizer
    if watched.failure is None and watched.promise is not None:
        watched.failure = _failed_decay(watched)
    if watched.failure:
        step, expected, came = watched.failure
        return AuditRow(name, kind, expected, came, False, True, step, *watched.worst)
    if watched.promise is None:
        why = f"only invariants were checked ({watched.reason})"
        return AuditRow(name, kind, why, "nothing that contradicts them", True, is_checked=False)
    if watched.agreed is None:
        why = "no gradient came in any step"
        return AuditRow(name, kind, why, "no step", passed=True, is_checked=False)
    came = "it, as far as rounding lets one see" if watched.is_hidden else "it"
    return AuditRow(name, kind, f"the step of {kind}", came, True, True, None, *watched.worst)


SIGMAS = 8  # the smallest doubt that is taken for a fact, among thousands of matrices


def _failed_decay(watched: _Watched) -> tuple[int, str, str] | None:
    """Whether in every step another decay came than the stated one."""
    if len(watched.decays) < max(watched.steps, 2):
        return None
    count = len(watched.decays)
    excess, doubt, share = (sum(each) / count for each in zip(*watched.decays, strict=True))
    if abs(excess) <= max(SIGMAS * doubt, 0.5 * share):
        return None
    expected = f"decay by {number(share)} of the weight a step"
    return watched.steps, expected, decay_text(share + excess, share)


# --- which matrices are made orthogonal -----------------------------------------------------------

HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
SPLITS = ("split_qkv", "split_fused", "fused_qkv")


def _partitions(
    unit: Unit | None, kind: str, shape: tuple[int, ...], said: Settings
) -> dict[str, Partition]:
    """How a tensor may be cut into matrices that are made orthogonal one by one.

    As a whole, by its logical matrices, or by heads; only as the settings say, where they do.
    """
    partitions: dict[str, Partition] = {"": lambda t: [t.flatten(1)]}
    if unit is not None and len(unit.layout.parts) > 1:
        partitions["its parts"] = lambda t: [piece for _, piece in unit.layout.cut(t)][1:]
    stated = next((int(said[key]) for key in HEADS if said.get(key)), 0)
    heads = stated or (unit.heads if unit is not None else 0)
    if heads and len(shape) == 2 and kind not in ("output", "up", "down", "gate"):
        queries = next((p.shape[0] for p in unit.parts if p.kind == "query"), 0) if unit else 0
        size = (queries or shape[0]) // heads
        if size and shape[0] % size == 0:
            partitions["its heads"] = lambda t: list(t.split(size))
    if heads and kind == "output" and shape[1] % heads == 0:
        partitions["its heads"] = lambda t: list(t.split(shape[1] // heads, dim=1))
    if stated and "its heads" in partitions and kind in ("query", "key", "value", "fused"):
        return {"its heads": partitions["its heads"]}
    if any(said.get(key) for key in SPLITS):
        if "its parts" in partitions:
            del partitions[""]
        elif shape[0] % 3 == 0:  # a name that tells nothing
            partitions["its thirds"] = lambda t: list(t.flatten(1).chunk(3))
    return partitions


# --- tensors --------------------------------------------------------------------------------------


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in _groups(optimizer) for p in group["params"]]


def _hooked(optimizer: Any) -> Any:
    """The optimizer that runs hooks of others around its step, itself or the one it wraps."""
    own = getattr(optimizer, "__dict__", {})
    if any(own.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        return optimizer
    inner = own.get("optimizer")
    return None if inner is None else _hooked(inner)


def _put_first(key: int, hooks: Any) -> None:
    """Let one hook run before all others, also where autograd reads the plain order."""
    others = {other: hook for other, hook in hooks.items() if other != key}
    own = hooks[key]
    hooks.clear()
    hooks.update({key: own, **others})


def _begun(kept: Mapping[str, Any], dtype: torch.dtype) -> State:
    """A copy of an optimizer's state of one parameter, in a type."""

    def value(x: Any) -> Any:
        if isinstance(x, Tensor) and not x.is_sparse:
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
