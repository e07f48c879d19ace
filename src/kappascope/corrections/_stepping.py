"""The hooks in one optimizer that run what corrections have attached to it.

Everything hangs on ``optimizer.step()``: what a gradient scaler skips is skipped here, accumulated
gradients are complete, unscaled and averaged over processes by then, and no loop is rewritten.
While the optimizer steps, the parameter of a weight with factors holds its direction, and ``.grad``
the direction's gradient; before and after, the weight and the gradient that is the user's.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections._attachment import Attachment, check_state, load_state, state_of
from kappascope.corrections._factors import TrainedFactors, WeightMark
from kappascope.corrections._replicas import Replicas, share_memories
from kappascope.corrections._treatments import (
    AddedGradient,
    DecoupledStep,
    OptimizerStep,
    Rewrite,
    State,
    Treatment,
    is_surely_finite,
)
from kappascope.corrections.optimizers import (
    STATE_KEY,
    MethodWrapper,
    has_steps_within,
    is_skipped,
    with_value,
)
from kappascope.matrix import spectra
from kappascope.model.sharded import is_sharded

K = TypeVar("K", bound=Hashable)
Writing = TypeVar("Writing", Rewrite, DecoupledStep)


@dataclass(eq=False)
class _Step:
    """A step that is being taken: who acts in it, and what it has to put back."""

    acting: list[tuple[Attachment, Treatment, OptimizerStep]] = field(default_factory=list)
    factored: dict[TrainedFactors, Attachment] = field(default_factory=dict)
    gradients: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)
    replicas: Replicas | None = None
    inside: list[TrainedFactors] = field(default_factory=list)  # with the direction in the model

    def keep_gradient(self, leaf: nn.Parameter) -> None:
        """Keep the gradient that the user has, to be put back after the step."""
        self.gradients.append((leaf, leaf.grad))

    def give_gradients_back(self) -> None:
        """Put the gradients back, the first that was kept of each parameter last."""
        for leaf, gradient in reversed(self.gradients):
            leaf.grad = gradient
        self.gradients = []


class StepHooks:
    """The hooks in one optimizer, which run what is attached to it by whichever handles.

    What adds to gradients comes before factors, whose gradients are to include it, in whichever
    order they were attached. A ``step`` that calls that of the class above it is one step.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    >>> hooks = StepHooks(optimizer)
    >>> StepHooks.of(optimizer) is hooks
    True
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.attachments: list[Attachment] = []
        self.running: _Step | None = None
        self.depth = 0  # of calls of ``step`` within one another
        self.is_guarded = False
        self.replicas: Replicas | None = None
        self.is_alone: bool | None = None  # not known yet
        self.hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            MethodWrapper(optimizer, "step", self._guarded),
            # torch has hooks for these two, which optimizers with methods of their own do not run
            MethodWrapper(optimizer, "state_dict", self._save),
            MethodWrapper(optimizer, "load_state_dict", self._load),
        ]
        # what others do after a step, such as averaging, is to find the weights and no directions
        after = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        after.move_to_end(self.hooks[1].id, last=False)
        for name in ("train", "eval"):  # in which a schedule-free optimizer moves the weights
            if callable(getattr(optimizer, name, None)):
                self.hooks.append(MethodWrapper(optimizer, name, self._in_directions))

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepHooks | None:
        """Find the hooks of an optimizer, if something is attached to it."""
        hooks = cast(dict[int, Any], optimizer._optimizer_step_post_hooks).values()
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def join(self, attachment: Attachment) -> None:
        """Take up what was attached."""
        self.attachments.append(attachment)
        self.is_alone = None

    def leave(self, attachment: Attachment) -> None:
        """Let go of an attachment, and of the optimizer after the last."""
        self.abandon()
        self.attachments.remove(attachment)
        for hook in () if self.attachments else self.hooks:
            hook.remove()

    # Before the optimizer steps

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.depth = self.depth + 1 if has_steps_within(optimizer) else 1
        if self.depth > 1:
            return None
        self.abandon()  # a step that raised where nobody noticed
        if is_skipped(optimizer):
            return None
        args, kwargs, closure = with_value(args, kwargs)
        with self._timed(), torch.no_grad(), spectra.without_autocast():
            self.running = step = _Step(replicas=self._replicas())
            self._admit(optimizer, step)
            added = self._add_gradients(step)
            self._pull_back(step, added)
            step.inside = list(step.factored)
            for t in step.inside:
                t.enter()
        if closure is not None:
            closure.watch(p for group in optimizer.param_groups for p in group["params"])
        return args, kwargs

    def _admit(self, optimizer: Optimizer, step: _Step) -> None:
        """List who acts on this step: the treatments of weights that are trained now."""
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else float(scale)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for attachment in self.attachments:
            for t in attachment.treatments:
                if (group := groups.get(id(t.leaf))) is None:
                    continue
                if isinstance(t, TrainedFactors):
                    step.factored[t] = attachment
                if t.is_ready():
                    call = OptimizerStep(attachment.steps + 1, group, factor)
                    step.acting.append((attachment, t, call))

    def _replicas(self) -> Replicas | None:
        """The other processes that train a copy, asked for before the first step; all start alike.

        What was read from the weights when they were attached is that of the first process, whose
        weights DDP has given to all.
        """
        if self.is_alone is None:
            treatments = [t for attachment in self.attachments for t in attachment.treatments]
            self.replicas = Replicas.of([t.leaf for t in treatments])
            self.is_alone = self.replicas is None
            if self.replicas is not None:
                for t in treatments:
                    begun = t.module.state() if isinstance(t, TrainedFactors) else t.memory
                    kept = (t.begun or begun).keys() & begun.keys()
                    self.replicas.send(begun[k] for k in sorted(kept) if torch.is_tensor(begun[k]))
        return self.replicas

    def _add_gradients(self, step: _Step) -> dict[nn.Parameter, list[Tensor]]:
        """Add to gradients; give what is to be added where factors have to be considered."""
        added: dict[nn.Parameter, list[Tensor]] = {t.leaf: [] for t in step.factored}
        penalties = [(t, call) for _, t, call in step.acting if isinstance(t, AddedGradient)]
        for (t, call), result in zip(penalties, self._computed(step, penalties), strict=True):
            gradient = t.taken(call, *result)
            if gradient is not None and t.leaf in added:
                added[t.leaf].append(gradient)
            elif gradient is not None:
                for leaf in t.leaves:
                    step.keep_gradient(leaf)
                t.weight.add_gradient(gradient)
        return added

    def _computed(
        self, step: _Step, penalties: Sequence[tuple[AddedGradient, OptimizerStep]]
    ) -> Iterator[tuple[int, Tensor | None]]:
        """The gradients to add, each as the process to which the matrix belongs has it."""
        replicas = step.replicas
        if replicas is None:
            yield from (t.computed() for t, _ in penalties)
            return
        sharded = any(is_sharded(t.leaf) for t, _ in penalties)
        # a sharded matrix is gathered by all, so all compute, and hold one at a time
        for some in ([penalty] for penalty in penalties) if sharded else [penalties]:
            mine = [replicas.owns(t.leaf) for t, _ in some]
            own = [
                t.computed() if sharded or is_mine else (0, None)
                for (t, _), is_mine in zip(some, mine, strict=True)
            ]
            own_statuses = [
                result[0] if is_mine else 0 for result, is_mine in zip(own, mine, strict=True)
            ]
            statuses = replicas.owners_answers(own_statuses, some[0][0].leaf.device) if some else []
            if not sharded:
                share_memories(replicas, [t for t, _ in some])
            for (t, _), status, (_, gradient) in zip(some, statuses, own, strict=True):
                shared = None
                if status == 1:
                    dtype = torch.promote_types(t.leaf.dtype, torch.float32)
                    form = torch.empty(t.weight.layout.shape, dtype=dtype, device=t.leaf.device)
                    shared = form if gradient is None else gradient.to(dtype)
                    replicas.send_owned(t.leaf, [shared])
                yield status, shared

    def _pull_back(self, step: _Step, added: Mapping[nn.Parameter, list[Tensor]]) -> None:
        """Give the optimizer the gradients of directions, and none that is not finite."""
        scales = {t.leaf: call.gradient_scale for _, t, call in step.acting}
        users: dict[TrainedFactors, Tensor | None] = {}

        def pull_back(t: TrainedFactors) -> None:
            t.pull_back(users[t], added[t.leaf], scales.get(t.leaf, 1.0))

        for t, attachment in step.factored.items():
            users[t] = t.leaf.grad
            step.keep_gradient(t.leaf)
            attachment.follow(t)
            pull_back(t)
        self._note_gradients(step)
        # all that only the device knows is asked in one question: it would be waited for each time
        penalties = {t for _, t, _ in step.acting if isinstance(t, AddedGradient)}
        last = {t.leaf: t for _, t, _ in step.acting}
        last |= {t.leaf: t for t in step.factored if t.leaf in last}
        answers = _answered(
            {("same", t): [t.mark.same(t.leaf)] for t in step.factored}
            | {("finite", leaf): t.finite_gradient() for leaf, t in last.items()}
            | {("added", t): [torch.as_tensor(t.was_finite)] for t in penalties},
            step.replicas,
        )
        for penalty in penalties:
            penalty.was_finite = answers["added", penalty]
        written = [
            t for t in step.factored if not answers["same", t] or t.mark.version != t.leaf._version
        ]
        for t in written:
            step.factored[t].take_up(t)
            pull_back(t)
        for t in step.factored:  # what was loaded may have left this weight out
            t.was_loaded = False
        if written:
            self._note_gradients(step)
        if step.replicas is not None:
            # sums, and products of matrices
            step.replicas.send(g for t in step.factored for g in t.pending)
            made = [t.leaf.grad for t in step.factored if not t.module.is_elementwise]
            step.replicas.send(gradient for gradient in made if gradient is not None)
        suspects = [leaf for leaf in last if not answers["finite", leaf]]  # in all processes alike
        finite = [last[leaf].has_finite_gradient() for leaf in suspects]
        if suspects and step.replicas is not None:  # whoever withholds alone waits for the others
            flags = torch.tensor(finite, device=suspects[0].device)
            finite = step.replicas.all_agree(flags).tolist()
        self._withhold(
            step, {leaf for leaf, good in zip(suspects, finite, strict=True) if not good}
        )

    def _note_gradients(self, step: _Step) -> None:
        """Let factors have their gradients, from what was pulled back."""
        for attachment in self.attachments:
            if attachment.factors is not None:
                own = [t for t in attachment.factors.treatments if t in step.factored]
                attachment.factors.note_gradients(own)

    def _withhold(self, step: _Step, bad: set[nn.Parameter]) -> None:
        """Keep the optimizer from following gradients that are not finite."""
        refused = {(a, t.leaf): t for a, t, _ in step.acting if t.leaf in bad}
        for (attachment, _), t in refused.items():
            attachment.refuse(t)
            for leaf in t.leaves:
                step.keep_gradient(leaf)
                leaf.grad = None
        step.acting = [entry for entry in step.acting if entry[1].leaf not in bad]

    # After it

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth or (step := self.running) is None:
            return
        step.give_gradients_back()
        with self._timed(), torch.no_grad(), spectra.without_autocast():
            asked = self._rewrite(step)
            acting = {t for _, t, _ in step.acting}
            moved: dict[Treatment, TrainedFactors] = {}
            for attachment in self.attachments:
                if attachment.factors is not None:
                    moved |= {t: t for t in attachment.factors.step(acting)}
            for factored in step.factored:
                factored.leave()
                self._make_equal(step, factored)
            asked |= self._move(step)
            flags = {t: [flag] for t, flag in asked.items()}
            images = {t: [t.mark.image] for t in moved.values()}
            answers = _answered({**flags, **images}, step.replicas)
            for attachment, t, call in step.acting:
                if t in moved:
                    continue
                if not (answers[t] if t in asked else t.after(call)):
                    attachment.refuse(t)
            for factored in step.factored:  # what was moved after the product was written
                if factored.mark.version != factored.leaf._version:
                    factored.adopt()
                    factored.write()  # the product to the bit, as a restart will find it
            for factored in moved.values():
                self._conclude(step.factored[factored], factored, answers[factored])
                self._make_equal(step, factored)
        for attachment in self.attachments:
            attachment.steps += 1
        self.running = None

    def _rewrite(self, step: _Step) -> dict[Treatment, Tensor]:
        """Rewrite weights, and directions where there are factors; give what is to be asked."""
        rewrites = [(t, call) for _, t, call in step.acting if isinstance(t, Rewrite)]
        return self._divided(step, rewrites, Rewrite.rewrite)

    def _move(self, step: _Step) -> dict[Treatment, Tensor]:
        """Take the steps that penalties take on their own, of whole weights."""
        moving = [(t, call) for _, t, call in step.acting if isinstance(t, DecoupledStep)]
        return self._divided(step, moving, lambda t, call: torch.tensor(t.after(call)))

    @staticmethod
    def _divided(
        step: _Step,
        treatments: Sequence[tuple[Writing, OptimizerStep]],
        act: Callable[[Writing, OptimizerStep], Tensor],
    ) -> dict[Treatment, Tensor]:
        """Let the process to which a weight belongs act on it, and give what it wrote to all."""
        sharded = any(is_sharded(t.leaf) for t, _ in treatments)
        if step.replicas is None or sharded or not treatments:
            return {t: act(t, call) for t, call in treatments}
        counts: list[int] = []
        flags: list[int] = []
        for t, call in treatments:
            before, good = t.count, True
            t.is_done_elsewhere = not step.replicas.owns(t.leaf)
            if not t.is_done_elsewhere:
                good = bool(act(t, call))
            counts.append(t.count - before)
            flags.append(int(not good))
        device = treatments[0][0].leaf.device
        answers = step.replicas.owners_answers([*counts, *flags], device)
        share_memories(step.replicas, [t for t, _ in treatments])
        for (t, _), count, own in zip(treatments, answers, counts, strict=False):
            t.count += count - own
        written: dict[nn.Parameter, Treatment] = {
            t.leaf: t for (t, _), n in zip(treatments, answers, strict=False) if n
        }
        for leaf, writer in written.items():
            step.replicas.send_owned(leaf, chain(writer.leaves, writer.beside))
        bad = answers[len(treatments) :]
        return {t: torch.tensor(not b) for (t, _), b in zip(treatments, bad, strict=True)}

    def _make_equal(self, step: _Step, t: TrainedFactors) -> None:
        """Give all processes the same bits of what a product of matrices has made."""
        if step.replicas is not None and not t.module.is_elementwise:
            state = t.module.state()
            tensors = [state[key] for key in sorted(state) if torch.is_tensor(state[key])]
            step.replicas.send([t.leaf, t.direction, *tensors])
            t.mark = WeightMark(t.leaf)

    def _conclude(self, attachment: Attachment, t: TrainedFactors, good: bool) -> None:
        """Take a step of factors back if the product is not finite; else do what is due then."""
        assert attachment.factors is not None
        if not good and not is_surely_finite(t.leaf):
            attachment.factors.take_back(t)
            t.write()
            attachment.refuse(t)
        elif t.module.settle(t.direction):
            attachment.factors.forget(t)
            t.write()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        yield
        for attachment in self.attachments:
            attachment.seconds += perf_counter() - start

    # When something goes wrong, or happens outside of a step

    def abandon(self) -> None:
        """Undo what was begun for a step that did not come to its end."""
        step, self.running = self.running, None
        if step is None:
            return
        step.give_gradients_back()
        with torch.no_grad():
            for t in step.inside:
                if t.product is not None:
                    t.put_back()

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a step; should it raise, the weights are as they were."""
        if self.is_guarded:  # a step that calls itself
            return call(*args, **kwargs)
        self.is_guarded, self.depth = True, 0
        try:
            return call(*args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.is_guarded, self.depth = False, 0

    def _in_directions(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let the optimizer move directions, which are what it knows, outside of a step."""
        factored = [t for attachment in self.attachments for t in attachment.factored]
        with torch.no_grad():
            for attachment in self.attachments:
                attachment.take_up_what_others_wrote()
            for t in factored:
                t.enter()
            try:
                result = call(*args, **kwargs)
            except BaseException:
                for t in factored:
                    t.put_back()
                raise
            for t in factored:
                t.leave()
        return result

    # What the optimizer's state dict carries

    def _save(self, call: Callable[..., State], *args: Any, **kwargs: Any) -> State:
        states = [state_of([attachment]) for attachment in self.attachments]
        return {**call(*args, **kwargs), STATE_KEY: states}

    def _load(self, call: Callable[..., Any], state_dict: State, *args: Any, **kwargs: Any) -> Any:
        fitting = self._fitting(state_dict.get(STATE_KEY) or [])
        known = {key: value for key, value in state_dict.items() if key != STATE_KEY}
        result = call(known, *args, **kwargs)
        for attachment, state in fitting:
            load_state([attachment], state)
        return result

    def _fitting(self, states: Sequence[State]) -> list[tuple[Attachment, State]]:
        """The saved states of what is attached here; what does not fit is told and left alone."""
        fitting = []
        for attachment in self.attachments if states else ():
            problems = []
            for saved in states:
                try:
                    check_state([attachment], saved)
                except ValueError as error:
                    problems.append(str(error).partition(";")[0])
                else:
                    fitting.append((attachment, saved))
                    break
            else:
                kind = attachment.treatments[0].kind.__name__
                text = f"the optimizer's state has none of this {kind}, which goes on as it is"
                warnings.warn(f"{text} ({'; '.join(problems)})", RuntimeWarning, stacklevel=4)
        return fitting


def _answered(questions: Mapping[K, Sequence[Tensor]], replicas: Replicas | None) -> dict[K, bool]:
    """Wait once for all answers (on every device), which are no if a replica says so.

    The answer to flags is whether all are set, to numbers whether all are finite. Nearly always
    all are, so that is what is asked first.
    """
    by_device: dict[torch.device, dict[K, Sequence[Tensor]]] = {}
    for key, question in questions.items():
        by_device.setdefault(question[0].device, {})[key] = question
    answers: dict[K, bool] = {}
    for here in by_device.values():
        if replicas is None and bool(_are_good(chain.from_iterable(here.values()))):
            answers |= dict.fromkeys(here, True)
            continue
        flags = torch.stack([_are_good(question) for question in here.values()])
        if replicas is not None:
            flags = replicas.all_agree(flags)
        answers |= dict(zip(here, flags.tolist(), strict=True))
    return answers


def _are_good(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all flags are set and all numbers finite."""
    flags: list[Tensor] = []
    numbers: list[Tensor] = []
    for tensor in tensors:
        (flags if tensor.dtype == torch.bool else numbers).append(tensor.reshape(-1))
    if numbers:
        flags.append(torch.isfinite(torch.cat(numbers)))
    return torch.cat(flags).all()
