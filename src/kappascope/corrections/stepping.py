"""The hooks around ``optimizer.step()`` that run what corrections have attached to it.

An :class:`Attachment` is all that one correction does to the weights of one optimizer, and the
:class:`StepHooks` of that optimizer run its attachments.

Everything hangs on ``optimizer.step()``: what a gradient scaler skips is skipped here, accumulated
gradients are complete, unscaled and averaged over processes by then, and no loop is rewritten.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from inspect import currentframe
from traceback import walk_stack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections.factors import FactorOptimizer, TrainedFactors
from kappascope.corrections.treatments import OptimizerStep, Treatment
from kappascope.matrix import spectra


@dataclass(eq=False)
class Attachment:
    """All that one correction does to the weights of one optimizer.

    ``leader`` is the optimizer whose learning rate factors follow. ``refused`` counts by weight the
    steps that were not taken; a handle shares one counter among its attachments.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    >>> Attachment(optimizer, optimizer).steps
    0
    """

    optimizer: Optimizer
    leader: Optimizer
    treatments: list[Treatment] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    factors: FactorOptimizer | None = None
    steps: int = 0

    def finish(self, acting: set[Treatment]) -> None:
        """Step the correction's own parameters after the user's optimizer has stepped."""
        for treatment in () if self.factors is None else self.factors.step(acting):
            self.refuse(treatment)
        self.steps += 1

    def refuse(self, treatment: Treatment) -> None:
        """Count a step that is not taken, and warn of the first of every weight."""
        name = treatment.weight.name
        if not self.refused[name]:
            text = f"a step of {treatment.kind.__name__} was refused: {name} would not be finite"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.refused[name] += 1


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
        self.acting: list[tuple[Attachment, Treatment, OptimizerStep]] = []
        self.withheld: list[tuple[nn.Parameter, Tensor | None]] = []
        self.hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepHooks | None:
        """Find the hooks of an optimizer, if something is attached to it."""
        hooks = cast(dict[int, Any], optimizer._optimizer_step_post_hooks).values()
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def leave(self, attachment: Attachment) -> None:
        """Let go of an attachment, and of the optimizer after the last."""
        self.attachments.remove(attachment)
        for hook in () if self.attachments else self.hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_within_a_step(optimizer):
            return
        self.acting, self.withheld = [], []  # the last step may have raised: nothing of it is left
        if _is_skipped(optimizer):
            return
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ValueError("step(closure) computes gradients too late; call backward() first")
        with torch.no_grad(), spectra.without_autocast():
            self.acting = self._admitted(optimizer)
            for _, treatment, step in self.acting:
                treatment.before(step)
            self._withhold_gradients()

    def _admitted(self, optimizer: Optimizer) -> list[tuple[Attachment, Treatment, OptimizerStep]]:
        """List who acts on this step: the treatments of weights that are trained now."""
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else float(scale)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        admitted = [
            (attachment, t, OptimizerStep(attachment.steps + 1, groups[id(t.leaf)], factor))
            for attachment in self.attachments
            for t in attachment.treatments
            if id(t.leaf) in groups and t.is_ready()
        ]
        return sorted(admitted, key=lambda entry: isinstance(entry[1], TrainedFactors))

    def _withhold_gradients(self) -> None:
        """Keep the optimizer from following gradients that are not finite."""
        last = {t.leaf: t for _, t, _ in self.acting}  # that of factors, if there is one
        bad = {leaf for leaf, t in last.items() if not t.has_finite_gradient()}
        if not bad:
            return
        for leaf in (leaf for main in bad for leaf in last[main].leaves):
            self.withheld.append((leaf, leaf.grad))
            leaf.grad = None
        refused = {(attachment, t.leaf): t for attachment, t, _ in self.acting if t.leaf in bad}
        for (attachment, _), t in refused.items():
            attachment.refuse(t)
        self.acting = [entry for entry in self.acting if entry[1].leaf not in bad]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_within_a_step(optimizer) or _is_skipped(optimizer):
            return
        for leaf, gradient in self.withheld:
            leaf.grad = gradient
        with torch.no_grad(), spectra.without_autocast():
            for attachment, treatment, step in self.acting:
                if not treatment.after(step):
                    attachment.refuse(treatment)
            acting = {treatment for _, treatment, _ in self.acting}
            for attachment in self.attachments:
                attachment.finish(acting)
        self.acting, self.withheld = [], []


_HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code that runs the hooks around every ``step``, of whichever class."""


def _is_within_a_step(optimizer: Optimizer) -> bool:
    """Whether the call of ``step`` whose hooks run now was made by another of the same optimizer.

    That takes a class with two steps that run hooks, its own and its parent's; no optimizer of
    torch's has them. For such a class the stack tells: a call that has raised is not on it any
    more, whoever keeps its traceback, and what other hooks make of the arguments does not matter.
    """
    steps: list[Any] = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    # AdamW and Adam have hooks of their own around the same function
    if len({step.__wrapped__ for step in steps if getattr(step, "hooked", False)}) < 2:
        return False
    frames = (frame for frame, _ in walk_stack(currentframe()) if frame.f_code is _HOOKED_STEP)
    return sum(frame.f_locals["self"] is optimizer for frame in frames) > 1


def _is_skipped(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler told a fused optimizer not to step."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)
