"""The monitor: what a model learns and what its optimizer does, while it trains.

Everything hangs on ``optimizer.step()``, which a gradient scaler skips when it must, and which
comes when accumulated gradients are complete, unscaled and clipped: the gradient seen is the one
that the optimizer uses. Nothing of the model, the optimizer or a random state is changed, nothing
is measured between readings but norms that stay on their device, and an error here never stops the
training.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from kappascope.corrections.handle import correction_metrics, whole_gradients
from kappascope.corrections.optimizers import (
    MethodWrapper,
    has_steps_within,
    understood_optimizers,
)
from kappascope.matrix import spectra
from kappascope.model.sharded import is_flattened, is_sharded
from kappascope.model.weights import Where
from kappascope.monitor._ranks import Ranks
from kappascope.monitor.alerts import Watch
from kappascope.monitor.audit import STEPS as AUDIT_STEPS
from kappascope.monitor.audit import Audit, Auditor, audit
from kappascope.monitor.ghosts import Ghosts
from kappascope.monitor.meter import Meter
from kappascope.monitor.record import (
    VERSION,
    Alert,
    Recorder,
    Run,
    WriteLock,
    is_run,
    sole_writer,
    table_of,
)
from kappascope.monitor.report import write_run_page
from kappascope.monitor.ring import Ring, StepNorms, of_all_shards
from kappascope.monitor.source import Captured, Rule, StepTensors
from kappascope.monitor.summary import MAX_KEYS, aggregated, histograms
from kappascope.monitor.survey import (
    Item,
    Survey,
    masters,
    on_host,
    signature,
    stepped_parameters,
    stepped_twice,
    watched,
)
from kappascope.refusal import Refusal
from kappascope.system.extras import plugins
from kappascope.text import error_text, first_few


@dataclass(frozen=True)
class _Part:
    """What one process has to tell of a reading."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    norms: list[StepNorms] = field(default_factory=list)


Sink: TypeAlias = Callable[[int, dict[str, float]], object]
"""Whatever takes a step and a flat dictionary of numbers."""

GRADIENT_PARTS = {"signal", "update", "swallowed"}  # which need the gradient of the step
PARTS = ("signal", "update", "swallowed", "spectra")
SETTINGS = ("lr", "betas", "weight_decay", "momentum", "eps", "nesterov", "dampening", "amsgrad")
SPECTRA_READINGS = 10  # a whole spectrum comes with every tenth reading, unless told otherwise
RING_STEPS = 64
PENDING_LOGS = 64  # on the host, after which they are written though no reading is due
log = logging.getLogger("kappascope")
_numbers = itertools.count()


class Monitor:
    """Record what a model learns, every so many steps, in a folder that outlives the process.

    ``every`` is the cadence, in finished steps, of the components and of the ends of the spectrum;
    ``norms_every`` that of norms alone, which may be one; ``spectra_every`` that of whole spectra.
    ``budget`` is the share of the time that readings may take: matrices then come in turn.
    ``where`` and ``exclude`` choose matrices by name, pattern or test, as for corrections.
    ``quantities`` says what is recorded beside components: "signal", "update", "swallowed" and
    "spectra". With ``ghosts`` (four are enough) copies of the weights are trained on the same
    gradients with random signs, and the record tells how likely noise alone would have done what
    training did (:class:`~kappascope.monitor.ghosts.Ghosts`). A sink is called with the step and a
    flat dictionary of at most ``keys`` numbers; ``on_alert`` with every
    :class:`~kappascope.monitor.record.Alert`.

    >>> from tempfile import TemporaryDirectory
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with TemporaryDirectory() as folder:
    ...     with Monitor(folder, every=1).attach(model, optimizer) as monitor:
    ...         model(torch.ones(1, 3)).sum().backward()
    ...         optimizer.step()
    ...     sorted({row["step"] for row in monitor.table().to_pylist()})
    [0, 1]
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 50,
        *,
        norms_every: int | None = None,
        spectra_every: int | None = None,
        budget: float | None = None,
        where: Where = None,
        exclude: Where = None,
        quantities: Collection[str] = PARTS,
        sinks: Iterable[Sink | str] = (),
        on_alert: Callable[[Alert], object] | None = None,
        strict: bool = False,
        keys: int = MAX_KEYS,
        ghosts: int = 0,
    ) -> None:
        for name, value in (("every", every), ("norms_every", norms_every), ("keys", keys)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"expected {name} to be a whole number, at least 1; got {value!r}")
        if spectra_every is not None and (not isinstance(spectra_every, int) or spectra_every < 1):
            raise ValueError(f"expected spectra_every to be at least 1; got {spectra_every!r}")
        if budget is not None and not 0 < budget < 1:
            raise ValueError(
                f"expected budget to be a share of the time, in (0, 1); got {budget!r}"
            )
        quantities = {quantities} if isinstance(quantities, str) else quantities
        if unknown := set(quantities) - set(PARTS):
            known = ", ".join(PARTS)
            raise ValueError(f"expected quantities among {known}; got {', '.join(sorted(unknown))}")
        self.folder, self.every, self.budget = Path(folder), every, budget
        self.norms_every, self.spectra_every = (
            norms_every,
            spectra_every or SPECTRA_READINGS * every,
        )
        self.where, self.exclude, self.quantities = where, exclude, frozenset(quantities)
        if not isinstance(ghosts, int) or ghosts < 0 or ghosts == 1:
            raise ValueError(
                f"expected no ghosts or at least two, to have a spread; got {ghosts!r}"
            )
        self.sinks = tuple(_sink(sink) for sink in sinks)
        self.on_alert, self.strict, self.keys = on_alert, strict, keys
        self.ghosts = ghosts
        self.alerts: list[Alert] = []
        self.audited: Audit | None = None
        self._undo, self._backward_hooks, self._audit_hooks = ExitStack(), ExitStack(), ExitStack()
        self._number = next(_numbers)
        self._optimizers: list[Optimizer] = []
        self._survey: Survey | None = None
        self._recorder: Recorder | None = None
        self._claim: WriteLock | None = None
        self._warned: set[str] = set()
        self._is_paused = False
        self._counts: list[int] = [0]
        self._pending: list[dict[str, Any]] = []
        self._last: dict[str, float] = {}
        self._ghosts: Ghosts | None = None

    # --- attaching and letting go -----------------------------------------------------------------

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        step: int | None = None,
    ) -> Monitor:
        """Begin to record, with a first reading now; without an optimizer :meth:`read` reads again.

        In a folder that has a record the run goes on from its last step, or from ``step``. One that
        another monitor still writes is refused, here and on every process.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a module to watch; got {type(model).__name__}")
        if self._survey is not None:
            raise ValueError("the monitor is attached already; make another, or close it first")
        has_none = optimizer is None or optimizer == []
        self._optimizers = [] if has_none else understood_optimizers(optimizer)
        survey = watched(model, self.where, self.exclude)  # what is wrong with where= is told now
        if is_flattened(model):
            text = "FSDP1 keeps flat pieces of parameters, of which no matrix can be read"
            _warn(f"kappascope's monitor: {text}: use FSDP2 (fully_shard)")
        self._ranks = Ranks.joined(self._number)
        self._claim_folder()
        self._begin(survey)
        with self._contained("the record cannot be begun"):
            self._open(survey, step)
        for k, each in enumerate(self._optimizers):
            self._hook(k, each)
        if self._optimizers:
            self._hook_backward()
        if self.ghosts and self._optimizers:
            with self._contained("ghosts cannot be trained"):
                self._ghosts = self._undo.enter_context(self._with_ghosts(survey))
        with self._contained("the first reading failed"):
            self._read(list(survey.items), None, 0)
        self._spent, self._since = 0.0, time.perf_counter()
        return self

    def _with_ghosts(self, survey: Survey) -> Ghosts:
        """Begin to train ghosts of every weight that is a parameter, whole on this process."""
        owners = stepped_parameters(self._optimizers)
        weights = {item.name: survey.parameter(item) for item in survey.items}
        mine = {
            name: p
            for name, p in weights.items()
            if p is not None and id(p) in owners and not hasattr(p, "full_tensor")
        }
        return Ghosts(mine, self._optimizers, self.ghosts)

    def _claim_folder(self) -> None:
        """Keep other runs out of the folder; if one is there, refuse before training begins."""
        refusal = None
        if self._ranks.is_first:
            try:
                self._claim = sole_writer(self.folder)
            except Refusal as error:
                refusal = error
        refusal = self._ranks.told(refusal)
        if refusal is not None:
            raise refusal

    def _begin(self, survey: Survey) -> None:
        self._survey = survey
        self._counts = [0] * max(len(self._optimizers), 1)
        self._calls = list(self._counts)
        self._overflows: list[Tensor | None] = [None] * len(self._optimizers)
        self._captured: list[Captured | None] = [None] * len(self._optimizers)
        self._depths = [0] * len(self._optimizers)  # of steps within one another
        self._meter = Meter(self.quantities, self.spectra_every)
        self._latest: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._watch = Watch()
        steps = max(RING_STEPS, self.every if self.norms_every else 0)
        self._ring = Ring(steps * max(len(self._optimizers), 1))
        self._keeps_norms = True
        self._passes: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._pending = []
        self._ids: list[tuple[int, int, int]] = []
        self._items_kept: dict[int, tuple[Any, list[Item]]] = {}
        self._settings: list[Any] = [None] * len(self._optimizers)
        self._spent, self._since = 0.0, time.perf_counter()
        self._costs: dict[str, float] = {}
        self._turn = 0
        self._last = {}
        self._masters: dict[str, Tensor] = {}
        with self._contained("float32 copies of the weights cannot be told"):
            self._masters = masters(survey, self._optimizers)

    def _open(self, survey: Survey, step: int | None) -> None:
        cut, last = "", 0
        if self._ranks.is_first:
            with self._contained("the record cannot be begun"):  # others wait to be told of it
                cut, last = self._earlier(step)
                self._recorder = Recorder(self.folder, self._claim)
        begun = step if step is not None else self._ranks.told(last)
        self._counts = [begun] * len(self._counts)
        self._calls = list(self._counts)
        self._facts = self._all_facts(survey)
        options = {
            "norms_every": self.norms_every,
            "spectra_every": self.spectra_every,
            "budget": self.budget,
            "quantities": sorted(self.quantities),
            "processes": self._ranks.count,
            "gradient": "as the optimizer uses it, unscaled and clipped",
        }
        if self._recorder is not None:
            start = {"kind": "start", "step": begun, "version": VERSION, "time": time.time()}
            start |= {"model": type(survey.model).__name__, "every": self.every, "options": options}
            start |= {"matrices": self._facts, "skipped": dict(survey.skipped), "cut": cut}
            start |= {"optimizers": [type(o).__name__ for o in self._optimizers]}
            self._write(start | {"resumed": bool(cut)})
        if names := stepped_twice(survey, self._optimizers):
            what = "more than one optimizer or group steps it: leave it in one of them"
            text = f"{first_few(names)}: {what} (step {begun:,})"
            self._alert(self._watch.once(begun, "stepped-twice", names[0], text))

    def _earlier(self, step: int | None) -> tuple[str, int]:
        """Tell how the record in the folder ends, and at which step; "" and 0 if there is none."""
        if not is_run(self.folder):
            return "", 0
        earlier = Run.read(self.folder)
        last = earlier.step
        end = "was closed at" if earlier.is_closed else "was cut after"
        cut = f"the record before {end} step {last:,}"
        kept = (a for a in earlier.alerts if step is None or a.step <= step)
        self._watch.told |= {(a.name, matrix) for a in kept for matrix in (a.matrix, *a.others)}
        if step is not None and step < last:
            cut += f"; what it has after step {step:,} is superseded"
        return cut, last

    def _all_facts(self, survey: Survey) -> dict[str, dict[str, Any]]:
        vectors = {
            name: {
                "kind": "vector",
                "depth": None,
                "shape": list(p.shape),
                "dtype": str(p.dtype).removeprefix("torch."),
            }
            for name, p in survey.parameters.items()
            if p.ndim < 2
        }
        return survey.facts() | vectors

    def _hook(self, k: int, optimizer: Optimizer) -> None:
        untraced: Any = torch.compiler.disable  # where the user compiles the optimizer's step
        before = optimizer.register_step_pre_hook(untraced(lambda *args: self._before(k, args)))
        self._undo.callback(before.remove)
        gradients = optimizer.register_step_pre_hook(
            untraced(lambda *args: self._gradients(k, args))
        )
        self._undo.callback(gradients.remove)
        after = optimizer.register_step_post_hook(untraced(lambda *args: self._after(k, args)))
        self._undo.callback(after.remove)
        if has_steps_within(optimizer):
            outermost = MethodWrapper(optimizer, "step", partial(self._outermost, k))
            self._undo.callback(outermost.remove)
        # before what corrections do, and after it, whoever was attached first
        _hooks(optimizer, "pre").move_to_end(before.id, last=False)
        self._ids.append((before.id, gradients.id, after.id))

    def _hook_backward(self) -> None:
        """See each micro-batch as autograd adds it to the gradient of a weight."""
        assert self._survey is not None
        self._backward_hooks.close()
        for item in self._survey.items if "signal" in self.quantities else ():
            parameter = self._survey.parameter(item)
            if parameter is None or not parameter.requires_grad or is_sharded(parameter):
                continue
            added = partial(_added, weakref.ref(self), item, self._owner(item))
            hook = parameter.register_post_accumulate_grad_hook(torch.compiler.disable(added))
            self._backward_hooks.callback(hook.remove)

    def close(self) -> None:
        """Write what is left, and leave no hook behind."""
        if self._survey is None:
            return
        self._undo.close()
        self._end_audit()
        self._backward_hooks.close()
        with self._contained("the record could not be finished"):
            self._flush()
            self._write({"kind": "end", "step": self.step})
        if self._recorder is not None:
            self._recorder.release()
        if self._claim is not None:
            self._claim.close()
        self._recorder, self._claim, self._survey = None, None, None
        self._masters, self._captured = {}, []
        self._meter = Meter(self.quantities, self.spectra_every)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is not None and self._survey is not None:
            with self._contained("the last readings could not be written"):
                self._break(f"training ended with {kind.__name__}")
        self.close()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            "a monitor cannot be copied or pickled: it is tied to its model; attach anew"
        )

    # --- what a user asks for ---------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether there is a model that it watches."""
        return self._survey is not None

    @property
    def step(self) -> int:
        """The number of finished steps, of the optimizer that has taken most."""
        return max(self._counts)

    @property
    def last(self) -> dict[str, float]:
        """The latest readings as a flat dictionary, aggregated by kind and depth."""
        return dict(self._last)

    def read(self, step: int | None = None) -> None:
        """Take a reading of every matrix now, as after ``step`` finished steps if that is given."""
        if self._survey is None:
            raise ValueError("the monitor is not attached; call attach(model) first")
        if step is not None:
            self._counts = [step] * len(self._counts)
        with self._contained("a reading failed"):
            self._renew()
            self._read(list(self._survey.items), None, 0)

    def log(self, **values: float | Tensor) -> None:
        """Keep numbers of the user's own, as ``loss=``, beside the next finished step.

        A tensor on a device is read with the next reading: nothing waits for it here.
        """
        if self._survey is None:
            return
        with self._contained("what was logged is no number"):
            kept = {
                name: value.detach().clone() if isinstance(value, Tensor) else float(value)
                for name, value in values.items()
            }
            self._pending.append({"kind": "log", "step": self.step, "values": kept})
            is_many = len(self._pending) >= PENDING_LOGS and self._recorder is not None
            if is_many and all(t.device.type == "cpu" for t in _logged(self._pending).values()):
                self._flush()

    @torch.no_grad()
    def microbatch(self) -> None:
        """Tell that a micro-batch has been added to the gradients: noise is told between these.

        Where ``backward`` is called for each of them, nobody needs to: it is seen.
        """
        if self._survey is None or "signal" not in self.quantities:
            return
        with self._contained("a micro-batch was not seen"):
            for item in self._survey.items:
                parameter = self._survey.parameter(item)
                if parameter is None or parameter.grad is None or is_sharded(parameter):
                    continue
                if self._is_due(self._calls[self._owner(item)] + 1):
                    self._meter.add_microbatch(item, parameter.grad)

    def table(self) -> Any:
        """All rows of the record, as an Arrow table or, without pyarrow, a list of dictionaries.

        ``to_pylist`` gives dictionaries in both cases.
        """
        if self._survey is not None:
            with self._contained("pending entries could not be written"):
                self._flush()
        return table_of(Run.read(self.folder).rows)

    def report(self, path: str | Path) -> Path:
        """Write the run as it is now on one page that needs nothing but itself."""
        if self._survey is not None:
            with self._contained("pending entries could not be written"):
                self._flush()
        return write_run_page(self.folder, path)

    def audit(
        self, closure: Callable[[], Any] | None = None, steps: int = AUDIT_STEPS
    ) -> Audit | None:
        """Ask whether each optimizer does what its name says, in a few steps that are undone.

        Without a ``closure`` the next steps of the training itself are looked at instead, which is
        no more than that: nothing is taken or undone, and ``audited`` has the result after them.
        """
        if self._survey is None or not self._optimizers:
            raise ValueError("expected a monitor that is attached to an optimizer; attach it first")
        if steps < 1:
            raise ValueError(f"expected at least one step, got {steps}; leave it out")
        self._end_audit()
        if closure is None:
            self._begin_audit(steps)
            return None
        self._is_paused = True
        try:
            result = audit(self._survey.model, self._optimizers, closure, steps=steps)
        finally:
            self._is_paused = False
        self._judge(result)
        return result

    def _begin_audit(self, steps: int) -> None:
        """Look at the steps that the training takes next."""
        assert self._survey is not None
        self.audited, self._auditor = None, Auditor(self._survey.model, self._optimizers)
        self._audit_hooks.enter_context(self._auditor.raw_gradients())
        for optimizer in self._optimizers:
            around = partial(self._audited_step, self._auditor, optimizer, steps)
            self._audit_hooks.callback(MethodWrapper(optimizer, "step", around).remove)

    def _audited_step(
        self,
        auditor: Auditor,
        optimizer: Optimizer,
        steps: int,
        step: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take a step of the training, and compare it with what was promised."""
        around = ExitStack()
        with self._contained("a step was not audited"):
            around.enter_context(auditor.watching(optimizer))
        try:
            return step(*args, **kwargs)
        finally:
            with self._contained("a step was not audited"):
                around.close()
                if auditor.steps >= steps and optimizer is self._optimizers[-1]:
                    self._end_audit()
                    self._judge(auditor.result())

    def _end_audit(self) -> None:
        self._audit_hooks.close()

    def _judge(self, result: Audit) -> None:
        """Keep the result of an audit, and tell of one that failed."""
        self.audited = result
        if not result.passed:
            text = f"the optimizer does not do what its name says (step {self.step:,}): {result}"
            self._alert(self._watch.once(self.step, "audit", "", text))

    # --- around a step ----------------------------------------------------------------------------

    @torch.no_grad()
    def _added(self, item: Item, k: int, parameter: Tensor) -> None:
        """Note a micro-batch before a step that is due, where steps are known to have several."""
        gradient = parameter.grad
        if gradient is None or self._is_paused:
            return
        known, passes = self._passes.get(item.name, (None, 0))
        is_first = known is None or known() is not gradient  # of those that this gradient sums up
        self._passes[item.name] = (weakref.ref(gradient), 1 if is_first else passes + 1)
        if not self._is_due(self._calls[k] + 1) or (is_first and passes == 1):
            return
        with self._contained("a micro-batch was not seen"):
            if is_first:  # a scaler may have thrown the last ones away
                self._meter.forget_microbatches(item)
            self._meter.add_microbatch(item, gradient)

    def _outermost(self, k: int, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a step that may call others; whatever happens in it, the next one is a first."""
        self._depths[k] = 0
        return step(*args, **kwargs)

    def _before(self, k: int, given: tuple[Any, ...]) -> None:
        """Remember the weights before anybody else touches them, if a reading is due after."""
        if not has_steps_within(given[0]):
            self._depths[k] = 0  # the last step may have raised
        self._depths[k] += 1
        if self._is_paused or self._depths[k] > 1:
            return
        self._captured[k] = None
        began = time.perf_counter()
        with self._contained("a step was not seen"):
            _hooks(given[0], "post").move_to_end(self._ids[k][2])
            if self._is_due(self._calls[k] + 1):
                self._renew()
                chosen = self._chosen(k)
                if not chosen and self.budget is not None:
                    return  # not even vectors: they cost time, too
                captured = Captured(chosen)
                if self.quantities & {"update", "swallowed"}:
                    for key, tensor in self._stepped(k, captured.items):
                        captured.before[key] = tensor.detach().clone()
                self._captured[k] = captured
        self._spent += time.perf_counter() - began

    def _gradients(self, k: int, given: tuple[Any, ...]) -> None:
        """Copy the gradients just before the optimizer uses them, since it may change them."""
        captured = self._captured[k] if k < len(self._captured) else None
        if self._is_paused or captured is None or self._depths[k] > 1:
            return
        if next(reversed(_hooks(given[0], "pre"))) != self._ids[k][1]:
            return  # somebody came later, and may add to them: not what is used; see _after
        began = time.perf_counter()
        with self._contained("gradients were not seen"):
            if not _has_closure(given):
                self._capture_gradients(k, captured)
        self._spent += time.perf_counter() - began

    def _capture_gradients(self, k: int, captured: Captured) -> None:
        whole = whole_gradients(self._optimizers[k])  # where a correction trains factors
        for key, tensor in self._stepped(k, captured.items):
            gradient = whole.get(id(tensor), tensor.grad)
            if gradient is not None:
                captured.stepped.add(key)
                if gradient.layout == torch.strided and self.quantities & GRADIENT_PARTS:
                    captured.gradients[key] = gradient.detach().clone()

    def _after(self, k: int, given: tuple[Any, ...]) -> None:
        """Count a finished step; take the reading that is due."""
        self._depths[k] = max(0, self._depths[k] - 1)
        if self._is_paused or self._depths[k]:
            return
        began = time.perf_counter()
        with self._contained("a step was not recorded"):
            self._finish(k, given[0], _has_closure(given))
        self._spent += time.perf_counter() - began

    def _finish(self, k: int, optimizer: Optimizer, has_closure: bool) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # of a scaler, to a fused optimizer
        if isinstance(overflow, Tensor) and overflow.device.type == "cpu":
            if bool(overflow):
                self._captured[k] = None
                return
        elif isinstance(overflow, Tensor):  # not asked now: that would wait for the device
            known = self._overflows[k]
            self._overflows[k] = overflow.clone() if known is None else known + overflow
        self._calls[k] += 1
        self._counts[k] += 1
        _hooks(optimizer, "pre").move_to_end(self._ids[k][1])
        captured, self._captured[k] = self._captured[k], None
        self._remember_settings(k, optimizer)
        self._remember_norms(k)
        if captured is not None:
            if has_closure:  # which computed them within the step
                self._capture_gradients(k, captured)
            self._read(captured.items, captured, k)
        elif self._is_due(self._calls[k]):  # and there was no time for it
            self._let_go()

    def _is_due(self, count: int) -> bool:
        return count % self.every == 0

    def _remember_settings(self, k: int, optimizer: Optimizer) -> None:
        groups = [{s: g[s] for s in SETTINGS if s in g} for g in optimizer.param_groups]
        if any(isinstance(v, Tensor) for group in groups for v in group.values()):
            groups = [
                {s: v.detach().clone() if isinstance(v, Tensor) else v for s, v in group.items()}
                for group in groups
            ]
        elif groups == self._settings[k]:
            return
        self._settings[k] = groups
        entry = {"kind": "settings", "step": self.step, "optimizer": k, "groups": groups}
        self._pending.append(entry)

    def _remember_norms(self, k: int) -> None:
        """Keep the norms of this step on their device, in a ring that forgets."""
        if not self._keeps_norms:
            return
        named = [(key, t) for key, t in self._stepped(k, self._items_of(k)) if t.numel()]
        self._ring.add(self.step, dict(named))

    # --- which work -------------------------------------------------------------------------------

    def _owner(self, item: Item) -> int:
        """The number of the last optimizer that steps a part of an item; the first if none does."""
        assert self._survey is not None
        owners = stepped_parameters(self._optimizers)
        numbers = [owners[id(p)][0] for p in self._survey.leaves(item) if id(p) in owners]
        return max(numbers, default=0)

    def _items_of(self, k: int) -> list[Item]:
        assert self._survey is not None
        key = (id(self._survey), sum(len(o.param_groups) for o in self._optimizers))
        if k not in self._items_kept or self._items_kept[k][0] != key:
            mine = [item for item in self._survey.items if self._owner(item) == k]
            self._items_kept[k] = (key, mine)
        return self._items_kept[k][1]

    def _chosen(self, k: int) -> list[Item]:
        """The items of this reading: all, or with a budget as many as it allows, in turn."""
        items = self._items_of(k)
        if self.budget is None:
            return items
        left = self.budget * (time.perf_counter() - self._since) - self._spent
        count, keeps_norms = 0, left > 0
        for place in range(len(items) if keeps_norms else 0):
            left -= self._costs.get(items[(self._turn + place) % len(items)].name, 0.0)
            if left < 0:
                break
            count += 1
        count, self._keeps_norms = self._ranks.told((count, keeps_norms))
        chosen = [items[(self._turn + place) % len(items)] for place in range(count)]
        self._turn += count
        return chosen

    def _stepped(self, k: int, items: Iterable[Item]) -> Iterator[tuple[str, Tensor]]:
        """Parameters that an optimizer steps, by plain name: weights of items, and vectors."""
        assert self._survey is not None
        owners = stepped_parameters(self._optimizers)
        wanted = {id(p) for item in items if (p := self._survey.parameter(item)) is not None}
        for name, parameter in self._survey.parameters.items():
            if id(parameter) in wanted or parameter.ndim < 2:
                tensor = self._masters.get(name, parameter)
                if owners.get(id(tensor), (None, None))[0] == k:
                    yield name, tensor

    def _renew(self) -> None:
        """Look at the model anew where layers came, went or changed their shape."""
        assert self._survey is not None
        if signature(self._survey.model) == self._survey.signature:
            return
        old = self._facts
        self._survey = watched(self._survey.model, self.where, self.exclude)
        self._facts = self._all_facts(self._survey)
        self._masters = masters(self._survey, self._optimizers)
        self._meter.forget([n for n, facts in old.items() if self._facts.get(n) != facts])
        self._latest = {name: q for name, q in self._latest.items() if name in self._facts}
        if self._optimizers:
            self._hook_backward()
        new = {name: facts for name, facts in self._facts.items() if old.get(name) != facts}
        if new:
            self._write({"kind": "matrices", "step": self.step, "matrices": new})

    # --- a reading --------------------------------------------------------------------------------

    @torch.no_grad()
    def _read(self, items: list[Item], captured: Captured | None, k: int) -> None:
        began = time.perf_counter()
        mine, failure = _Part(), None
        try:
            mine = self._measured_by_this_process(items, captured, k)
        except Exception as error:  # the others wait for what this process has
            failure = error
        parts = self._ranks.gathered(mine)
        if failure is not None:
            raise failure
        if parts is None:
            self._let_go()
            return
        step, rows = self.step, dict[str, dict[str, Any]]()  # one clock for all optimizers
        for part in parts:
            rows |= part.rows
        self._latest |= {name: self._latest.get(name, {}) | row for name, row in rows.items()}
        matrices = [name for name in rows if self._facts.get(name, {}).get("kind") != "vector"]
        overall: dict[str, Any] = {"matrices_read": float(len(matrices))}
        if captured is not None:
            passed = time.perf_counter() - self._since
            overall["overhead"] = (self._spent + time.perf_counter() - began) / max(passed, 1e-9)
        self._flush()
        if self._is_sharded:
            self._ring.refresh(of_all_shards([part.norms for part in parts]))
        self._write_norms(step)
        entry = {"kind": "reading", "step": step, "time": time.time()}
        self._write(entry | {"seconds": time.perf_counter() - began, "rows": rows | {"": overall}})
        for part in parts:
            self._alert(part.alerts)
        self._tell_of_drift(step, [part.sums for part in parts])
        new = list(self._watch.reading(step, rows, self._facts))
        self._alert(new)
        for alert in new:
            if alert.name == "non-finite":
                self._break(f"{alert.matrix} is not finite")
        self._last = aggregated(self._latest, self._facts, self.keys - 3)
        self._last |= {f"monitor/{name}": value for name, value in overall.items()}
        self._last["monitor/alerts"] = float(len(self.alerts))
        self._feed_sinks(step, rows)

    @property
    def _is_sharded(self) -> bool:
        """Whether parameters are spread over processes."""
        assert self._survey is not None
        return any(is_sharded(p) for p in self._survey.parameters.values())

    def _measured_by_this_process(
        self, items: list[Item], captured: Captured | None, k: int
    ) -> _Part:
        """The readings of the items that fall to this process; sharded ones are gathered by all."""
        assert self._survey is not None
        sums, corrected = self._small_numbers(k, captured is not None)
        step, sharded = self._counts[k], self._is_sharded
        numbered = {id(item): i for i, item in enumerate(self._survey.items)}
        mine = [item for item in items if self._ranks.owns(numbered.get(id(item), 0))]
        readings: dict[str, dict[str, Any]] = {}
        stepped = dict(self._stepped(k, items))
        source = StepTensors(self._survey, captured, stepped, self._rules(k, stepped))
        if not sharded:
            source = source.on_host(mine, vectors=self._ranks.is_first)
        for item in items if sharded else mine:
            began = time.perf_counter()
            held = source.gathered(item) if sharded else source
            if item not in mine:
                continue
            with self._contained("could not be measured", item.name), _undisturbed():
                readings |= self._meter.measured(item, held, step)
                weight = self._survey.parameter(item)
                if self._ghosts and captured is not None and weight is not None:
                    for name, found in self._ghosts.quantities(item, weight).items():
                        readings[name] = readings.get(name, {}) | found
            self._costs[item.name] = time.perf_counter() - began
        if captured is not None and "swallowed" in self.quantities and self._ranks.is_first:
            held = source.gathered(None) if sharded else source
            with self._contained("gains and biases could not be measured"), _undisturbed():
                vectors = {name: self._meter.of_vector(name, held) for name in held.vectors()}
                readings |= {name: quantities for name, quantities in vectors.items() if quantities}
        elif captured is not None and "swallowed" in self.quantities and sharded:
            source.gathered(None)
        for name, quantities in corrected.items():
            readings[name] = readings.get(name, {}) | quantities
        alerts = self._nobody_steps(self.step) if captured is not None else []
        return _Part(readings, alerts, sums, self._ring.fresh if sharded else [])

    def _small_numbers(
        self, k: int, is_after_step: bool
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Bring what was kept on devices to the host, all by one wait.

        That is losses, norms, micro-batches and skipped steps, which stay where they are kept; sums
        by which replicas are compared, and what corrections tell, which are given back.
        """
        metrics = correction_metrics(self._optimizers[k]) if is_after_step else {}
        of_corrections = {
            (name, quantity): value
            for name, quantities in metrics.items()
            for quantity, value in quantities.items()
        }
        norms, logs = self._ring.fresh, _logged(self._pending)
        sums, batches = self._sums(), self._meter.microbatches()
        skipped = self._overflows[k] if self._overflows else None
        tensors: dict[Any, Tensor] = {
            **{
                ("correction", *key): v
                for key, v in of_corrections.items()
                if isinstance(v, Tensor)
            },
            **{("weights", place): each.weights for place, each in enumerate(norms)},
            **{("gradients", place): each.gradients for place, each in enumerate(norms)},
            **{("log", *key): value for key, value in logs.items()},
            **{("sum", name): value for name, value in sums.items()},
            **{("microbatch", *key): value for key, value in batches.items()},
            **({} if skipped is None else {("skipped",): skipped}),
        }
        host = on_host(tensors)
        self._ring.refresh(
            [
                replace(each, weights=host["weights", place], gradients=host["gradients", place])
                for place, each in enumerate(norms)
            ]
        )
        for place, name in logs:
            self._pending[place]["values"][name] = _mean(host["log", place, name])
        for name, place in batches:
            self._meter.memory[name].microbatches[place] = host["microbatch", name, place]
        if skipped is not None:
            self._counts[k] = self._calls[k] - int(host["skipped",])
        corrected: dict[str, dict[str, float]] = {}
        for (name, quantity), value in of_corrections.items():
            number = float(host.get(("correction", name, quantity), value))
            corrected.setdefault(name, {})[quantity] = number
        return {name: float(host["sum", name]) for name in sums}, corrected

    def _rules(self, k: int, stepped: Mapping[str, Tensor]) -> dict[str, Rule]:
        """How an optimizer steps each parameter, with the tensors of its state."""
        if not self._optimizers or not self.quantities & {"update", "swallowed"}:
            return {}
        optimizer, owners = self._optimizers[k], stepped_parameters(self._optimizers)
        rules = {}
        for name, tensor in stepped.items():
            state = optimizer.state.get(tensor, {})
            kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            group = optimizer.param_groups[owners[id(tensor)][1]]
            rules[name] = Rule(type(optimizer).__name__, group, kept)
        return rules

    # --- alerts -----------------------------------------------------------------------------------

    def _alert(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self.alerts.append(alert)
            log.warning("%s", alert.text)
            self._write(
                {
                    "kind": "alert",
                    "step": alert.step,
                    "name": alert.name,
                    "matrix": alert.matrix,
                    "text": alert.text,
                }
                | ({"others": list(alert.others)} if alert.others else {})
            )
            if self.on_alert is not None:
                with self._contained("on_alert raised"):
                    self.on_alert(alert)

    def _nobody_steps(self, step: int) -> list[Alert]:
        """Parameters with a gradient that no optimizer has."""
        assert self._survey is not None
        owners = stepped_parameters(self._optimizers)
        names = [
            name
            for name, p in self._survey.parameters.items()
            if p.requires_grad
            and p.grad is not None
            and id(p) not in owners
            and name not in self._masters
        ]
        if not names:
            return []
        what = "it has a gradient and no optimizer steps it: pass it to one, or freeze it"
        text = f"{first_few(names)}: {what} (step {step:,})"
        return list(self._watch.once(step, "not-stepped", names[0], text))

    def _sums(self) -> dict[str, Tensor]:
        """Sums by which replicas are compared; nothing where there are none."""
        assert self._survey is not None
        if self._ranks.count == 1 or is_flattened(self._survey.model):
            return {}
        whole = ((n, p) for n, p in self._survey.parameters.items() if not is_sharded(p))
        return {name: parameter.detach().double().sum() for name, parameter in whole}

    def _tell_of_drift(self, step: int, sums: Sequence[dict[str, float]]) -> None:
        drifted = [name for name in sums[0] if len({repr(each.get(name)) for each in sums}) > 1]
        if drifted:
            what = "the replicas differ between processes: look for what one of them does alone"
            text = f"{first_few(drifted)}: {what} (step {step:,})"
            self._alert(self._watch.once(step, "drift", drifted[0], text))

    def _break(self, why: str) -> None:
        """Write the ring of the last norms, and who was first to move."""
        if self._recorder is None:
            return
        self._flush()
        entry = self._ring.entry(self.step)
        if entry is not None:
            entry["text"] = f"{why}; {entry['text']}" if entry["text"] else why
            self._write(entry)

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, entry: dict[str, Any]) -> None:
        if self._recorder is not None:
            with self._contained("the record cannot be written"):
                self._recorder.write(entry)

    def _write_norms(self, step: int) -> None:
        """Write the norms of the steps since the last reading, where they were asked for."""
        for each in self._ring.tell():
            if self.norms_every and each.step % self.norms_every == 0 and each.step != step:
                rows = {
                    name: {"frobenius_norm": norm}
                    for name, norm in zip(each.names, each.weights.tolist(), strict=True)
                }
                if "update" in self.quantities:
                    for name, norm in zip(each.names, each.gradients.tolist(), strict=True):
                        rows[name] |= {"gradient_norm": norm} if norm else {}  # zero: there is none
                entry = {"kind": "norms", "step": each.step, "time": time.time()}
                self._write(entry | {"rows": rows})

    def _let_go(self) -> None:
        """Write what is pending without a reading; where another process writes, forget it."""
        if self._recorder is not None:
            self._flush()
        else:
            self._pending.clear()
            self._ring.tell()

    def _flush(self) -> None:
        """Write what was pending: settings, and what the user logged."""
        pending, self._pending = self._pending, []
        for entry in _with_numbers(pending):
            self._write(entry)
            if entry["kind"] == "log":
                self._look_at(entry["step"], entry["values"])

    def _look_at(self, step: int, logged: Mapping[str, float]) -> None:
        """Remember the loss that the user logged, and tell of a number that is not finite."""
        if "loss" in logged:
            self._ring.log(step, logged["loss"])
        for name, value in logged.items():
            if not math.isfinite(value):
                text = f"{name} is not finite: look at the last batches (step {step:,})"
                if new := list(self._watch.once(step, "non-finite", name, text)):
                    self._alert(new)
                    self._break(f"{name} is not finite")

    def _feed_sinks(self, step: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
        spectra_by_kind = histograms(rows, self._facts)
        for sink in self.sinks:
            with self._contained("a sink raised"):
                sink(step, dict(self._last))
                if spectra_by_kind and hasattr(sink, "histograms"):
                    sink.histograms(step, spectra_by_kind)

    @contextmanager
    def _contained(self, what: str, matrix: str = "") -> Iterator[None]:
        """Turn an error of ours into one warning: training goes on, unless ``strict``.

        What fails for one ``matrix`` may fail for hundreds: the first of a kind of error is named.
        """
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            told = f"{what}: {type(error).__name__}" if matrix else what
            if told not in self._warned:
                self._warned.add(told)
                what = f"{matrix} {what}".lstrip()
                _warn(f"kappascope's monitor: {what}: {error_text(error)}; training goes on")


def _added(monitor: weakref.ref[Monitor], item: Item, k: int, parameter: Tensor) -> None:
    """Tell a monitor of a micro-batch; autograd would keep one that is held here for ever."""
    if (watching := monitor()) is not None:
        watching._added(item, k, parameter)


def _has_closure(given: tuple[Any, ...]) -> bool:
    """Whether a step, of which a hook is given the optimizer and the arguments, has a closure."""
    _, positional, named = given
    return any(callable(value) for value in (*positional, *named.values()))


def _sink(given: Sink | str) -> Sink:
    """Take a sink, or the name under which an installed package offers one."""
    if callable(given):
        return given
    offered = plugins("sinks")
    if given not in offered:
        known = ", ".join(offered) or "none is installed"
        raise ValueError(f"expected a function of (step, dict) or one of: {known}; got {given!r}")
    return cast(Sink, offered[given])


def _warn(text: str) -> None:
    """Warn, also where warnings are errors: those would stop the training."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        log.warning("%s", text)


def _mean(values: Tensor) -> float:
    """The number that a logged tensor on the host stands for."""
    return float(values.double().mean())


def _logged(entries: list[dict[str, Any]]) -> dict[tuple[int, str], Tensor]:
    """The tensors among what the user logged, by place and name."""
    return {
        (place, name): value
        for place, entry in enumerate(entries)
        if entry["kind"] == "log"
        for name, value in entry["values"].items()
        if isinstance(value, Tensor)
    }


def _with_numbers(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Entries of the record with numbers for tensors, all of which are waited for together."""
    host = on_host(_logged(entries))
    for place, entry in enumerate(entries):
        numbers: dict[str, Any] = {}
        if entry["kind"] == "log":
            kept = {name: host.get((place, name), v) for name, v in entry["values"].items()}
            numbers = {n: _mean(v) if isinstance(v, Tensor) else v for n, v in kept.items()}
        yield entry | ({"values": numbers} if numbers else {})


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Measure copies on the host outside the caller's modes: autocast, or one that counts calls."""
    with _disable_current_modes(), spectra.without_autocast(), torch.no_grad():
        yield


def _hooks(optimizer: Optimizer, which: str) -> OrderedDict[int, Any]:
    """The hooks before or after a step, in the order in which they run."""
    return cast("OrderedDict[int, Any]", getattr(optimizer, f"_optimizer_step_{which}_hooks"))
