"""Corrections of scale, of shape and of both, for the weights of any module.

Each is a frozen value with a pure form on ``(..., out, in)`` tensors, and attaches in one line:

    handle = Hybrid().attach(model, optimizer)     # ...train as before...
    handle.close()                                 # plain weights, the same function

A ``target`` says which spectrum is wanted: a number bounds kappa, a state dict gives the spectra of
its weights, and a function is asked once, with the weight as it is when attached, for singular
values (so ``spectra.singular_values`` means the initial ones, and ``lambda weight: known`` is the
oracle of the paper's experiments). ``None`` is the default that each class states; it needs no
oracle.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope import pairs, placement, spectra, theory
from kappascope.attachments import (
    Factors, Gradient, Handle, Parametrized, Rewrite, Slot, State, Step, Treatment, View, Where,
    choose, unwrapped,
)  # fmt: skip

FLOOR = 1e-10  # the paper's guard against a vanishing singular value; it shows in its digits

Target: TypeAlias = float | Mapping[str, Tensor] | Callable[[Tensor], Tensor] | None


# --- pure functions -------------------------------------------------------------------------------


def scaled(
    weight: Float[Tensor, "*stack out in"],
    rows: Float[Tensor, "*stack out"],
    columns: Float[Tensor, "*stack in"],
) -> Float[Tensor, "*stack out in"]:
    """``diag(rows) W diag(columns)``: learnable multipliers (Velikanov et al. 2026).

    >>> scaled(torch.ones(2, 2), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0]))
    tensor([[ 1., 10.],
            [ 2., 20.]])
    """
    return rows[..., None] * weight * columns[..., None, :]


def floored_condition_number(
    singular_values: Float[Tensor, "*stack rank"],
) -> Float[Tensor, "*stack"]:
    """The paper's kappa: the smallest singular value is raised by 1e-10.

    >>> floored_condition_number(torch.tensor([2.0, 0.0], dtype=torch.float64))
    tensor(2.0000e+10, dtype=torch.float64)
    """
    return singular_values[..., 0] / (singular_values[..., -1] + FLOOR)


def condition_penalty(
    weight: Float[Tensor, "*stack out in"],
    condition_number: Float[Tensor, "*stack"],
    strength: float = 0.005,
    clip: float = 1.0,
) -> Float[Tensor, "*stack out in"]:
    """Gradient of ``strength * (log(kappa + 1) - log(condition_number + 1))**2``, clipped.

    Only the extreme singular values matter to kappa, so it lies along ``u1 v1'`` and ``ud vd'``; its
    Frobenius norm is at most ``clip``. The defaults, and the ones inside the logarithms, are the
    paper's.

    >>> condition_penalty(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor(2.0)).abs().max()
    tensor(0.)
    """
    wanted = (condition_number + 1).log()
    return _Hinge(wanted, wanted).slope(pairs.ends(weight), strength, clip)


def toward_spectrum(
    weight: Float[Tensor, "*stack out in"],
    singular_values: Float[Tensor, "*stack rank"],
    step: float = 0.1,
) -> Float[Tensor, "*stack out in"]:
    """The same singular vectors with singular values moved a part of the way to others.

    >>> toward_spectrum(torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([4.0, 1.0]), step=0.5)
    tensor([[3.5000, 0.0000],
            [0.0000, 1.0000]])
    """
    u, s, vt = spectra.decomposition(weight)
    moved = torch.lerp(s, singular_values.to(s), step).clamp(min=FLOOR)
    return (u * moved[..., None, :]) @ vt


def banded(
    singular_values: Float[Tensor, "*stack rank"], kappa: float
) -> Float[Tensor, "*stack rank"]:
    """The nearest values (in the sum of squares) whose largest is at most ``kappa`` smallest.

    They are the given ones clamped to ``[a, kappa a]``; the distance is convex in ``a``.

    >>> banded(torch.tensor([4.0, 2.0, 0.0]), kappa=2.0)
    tensor([3.2000, 2.0000, 1.6000])
    """
    s = singular_values
    low, high = s[..., -1:], s[..., :1]
    for _ in range(60):  # halvings: down to float64's rounding
        a = (low + high) / 2
        rising = (a - s).clamp(min=0).sum(-1, keepdim=True)
        falling = (s - kappa * a).clamp(min=0).sum(-1, keepdim=True)
        too_high = rising > kappa * falling
        low, high = torch.where(too_high, low, a), torch.where(too_high, a, high)
    within = s[..., :1] <= kappa * s[..., -1:]
    return torch.where(within, s, torch.minimum(torch.maximum(s, high), kappa * high))


@dataclass(frozen=True)
class _Hinge:
    """The limits between which ``log(kappa + 1)`` costs nothing."""

    low: Tensor
    high: Tensor

    def excess(self, kappa: Tensor) -> Tensor:
        x = (kappa + 1).log()
        return x - torch.minimum(torch.maximum(x, self.low), self.high)

    def slope(self, found: pairs.Ends, strength: float, clip: float) -> Tensor:
        """Gradient of ``strength * excess**2``, its Frobenius norm at most ``clip``."""
        kappa, last = floored_condition_number(found.values), found.values[..., -1] + FLOOR
        slope = 2 * strength * self.excess(kappa) / (kappa + 1)  # with respect to kappa
        # d kappa / d s1 = 1 / sd and d kappa / d sd = -kappa / sd
        at_first, at_last = slope / last, -slope * kappa / last
        shrink = clip / torch.hypot(at_first, at_last).clamp(min=clip)
        return found.combined(torch.stack([shrink * at_first, shrink * at_last], dim=-1))


class _Priced(torch.autograd.Function):
    """A value for every matrix of a stack, with its gradient given in closed form."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor, gradient: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        (gradient,) = ctx.saved_tensors
        return received[0][..., None, None] * gradient, None, None


# --- what all corrections share -------------------------------------------------------------------


class Correction(ABC):
    """A change to how weight matrices are learned."""

    @abstractmethod
    def _treatments(self, slot: Slot) -> Iterator[Treatment]:
        """What happens to one weight, which is in a model by now."""

    def _objections(self, model: nn.Module) -> Callable[[Slot], Iterator[tuple[bool, str]]]:
        """Why a weight cannot be treated, beyond what holds for all corrections."""
        return lambda slot: iter(())

    def attach(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], where: Where = None
    ) -> Handle:
        """Correct the weights that ``where`` selects, until the handle is closed.

        ``where`` is a name or pattern (``"blocks.*.weight"``), several, or a test of a name. By
        default it is every matrix that an optimizer trains, except embeddings; the handle's
        ``left_out`` has the reasons.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        choice = choose(model, optimizers, where, self._objections(unwrapped(model)))
        treatments = [t for slot in choice.taken for t in self._treatments(slot)]
        return Handle.of(choice, optimizers, treatments)


def _kind(treatment: Treatment, correction: Correction) -> Treatment:
    treatment.kind = type(correction)
    return treatment


def _needs_plain(slot: Slot) -> Iterator[tuple[bool, str]]:
    rnn = any(isinstance(module, nn.RNNBase) for _, module, _ in slot.places)
    yield slot.makings is not None, "it is made of other tensors, into which nothing can be merged"
    yield rnn, "recurrent layers keep references to their weights"


def _needs_writing(slot: Slot) -> Iterator[tuple[bool, str]]:
    yield not slot.writable(), "it is made of other tensors, and its making has no inverse"


def _reference(target: Target, slot: Slot) -> Tensor | None:
    """Singular values wanted of a weight, or ``None`` if the target is not about them."""
    if isinstance(target, Mapping):
        names = [name for name, *_ in slot.places if name in target]
        if not names:
            raise ValueError(f"the target has no {slot.name}; it has {', '.join(target)}")
        return spectra.singular_values(slot.view.matrix(target[names[0]]))
    return target(slot.matrix()).detach() if callable(target) else None
