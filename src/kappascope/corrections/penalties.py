"""Corrections that add a penalty on singular values to the loss, by its closed gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import theory
from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._targets import Target, target_values, target_values_of_matrix
from kappascope.corrections._treatments import AddedGradient, DecoupledStep, State, Treatment
from kappascope.corrections.correction import Correction, pure_form
from kappascope.matrix import tracking
from kappascope.matrix.components import SIGMA_FLOOR, floored_condition_number
from kappascope.model.weights import LiveWeight


def condition_penalty(
    weight: Float[Tensor, "*stack out in"],
    condition_number: Float[Tensor, "*#stack"],
    strength: float = 0.005,
    clip: float = 1.0,
) -> Float[Tensor, "*stack out in"]:
    """Gradient of ``strength * (log(kappa + 1) - log(condition_number + 1))**2``, clipped.

    Only the extreme singular values matter to kappa, so it lies along ``u1 v1'`` and ``ud vd'``;
    its Frobenius norm is at most ``clip``. The defaults, and the ones inside the logarithms, are
    the paper's.

    >>> condition_penalty(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor(2.0)).abs().max()
    tensor(0.)
    """
    wanted = (condition_number + 1).log()
    ends = tracking.extreme_triplets(weight)
    return ends.combined(_Hinge(wanted, wanted).slopes(ends, strength, clip))


class _Priced(torch.autograd.Function):
    """A value for every matrix of a stack, with its gradient given in closed form."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return received[0][..., None, None] * gradient, None, None


def _priced(weight: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """The value of every matrix, as a function of the weight with this gradient."""
    return cast(Tensor, _Priced.apply(weight, value, gradient))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Hinge:
    """The limits between which ``log(kappa + 1)`` costs nothing."""

    low: Tensor
    high: Tensor

    @classmethod
    def of_matrix(cls, target: Target, band: float, matrix: Tensor) -> _Hinge:
        """The limits that a target sets for a matrix that has no name."""
        return cls._of(target, band, target_values_of_matrix(target, matrix), matrix)

    @classmethod
    def of_weight(cls, target: Target, band: float, weight: LiveWeight) -> _Hinge:
        """The limits that a target sets for a weight of a model."""
        return cls._of(target, band, target_values(target, weight), weight.matrix())

    @classmethod
    def _of(cls, target: Target, band: float, wanted: Tensor | None, weight: Tensor) -> _Hinge:
        """The limits around the kappa of the spectrum wanted, or else below the target's kappa."""
        if wanted is not None:
            middle = (floored_condition_number(wanted) + 1).log()
            return cls(middle - band, middle + band)
        bound = target if isinstance(target, float) else _null(weight)
        high = torch.tensor(bound + 1.0, dtype=torch.float64, device=weight.device).log()
        return cls(torch.zeros_like(high), high)

    def _nearest(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.low.to(x)), self.high.to(x))

    def excess(self, values: Tensor) -> Tensor:
        """By how much ``log(kappa + 1)`` of these extreme values leaves the limits."""
        x = (floored_condition_number(values) + 1).log()
        return x - self._nearest(x)

    def slopes(
        self, ends: tracking.ExtremeTriplets, strength: float, clip: Tensor | float
    ) -> Tensor:
        """The derivatives of ``strength * excess**2`` with respect to the first and last value.

        Their norm, which is that of the gradient, is at most ``clip``.
        """
        kappa, last = floored_condition_number(ends.values), ends.values[..., -1] + SIGMA_FLOOR
        # with respect to kappa
        slope = 2 * strength * self.excess(ends.values) / (kappa + 1)
        # d kappa / d s1 = 1 / sd and d kappa / d sd = -kappa / sd
        at_first, at_last = slope / last, -slope * kappa / last
        size = torch.hypot(at_first, at_last)
        shrink = torch.where(size > clip, clip / size, 1.0)
        return torch.stack([shrink * at_first, shrink * at_last], dim=-1)

    def penalty(
        self,
        weight: Tensor,
        ends: tracking.ExtremeTriplets,
        strength: float,
        clip: Tensor | float,
    ) -> Tensor:
        """``strength * excess**2`` of each matrix; its backward is the clipped closed gradient."""
        gradient = ends.combined(self.slopes(ends, strength, clip))
        return _priced(weight, strength * self.excess(ends.values).square(), gradient)

    def room(self, ends: tracking.ExtremeTriplets, slopes: Tensor) -> Tensor:
        """By how many times the slopes both values may move before kappa is at its limit."""
        first, last = ends.values[..., 0], ends.values[..., -1] + SIGMA_FLOOR
        limit = self._nearest((floored_condition_number(ends.values) + 1).log()).expm1()
        closing = slopes[..., 0] - limit * slopes[..., 1]
        return torch.where(closing == 0, torch.inf, (first - limit * last) / closing)


@final
@dataclass(frozen=True)
class SpectralPenalty(Correction):
    """Add ``strength * excess**2`` to the loss: by how much ``log(kappa + 1)`` leaves its limits.

    Limits: kappa at most ``target`` if that is a number, or what 19 of 20 random matrices of its
    shape stay below if ``None``; within ``band`` (of the logarithm) of the target's kappa if there
    is a spectrum to compare with. The gradient is the closed one on the extreme singular pair
    (tracked by :mod:`kappascope.matrix.tracking`), of norm at most ``clip`` times the largest
    singular value.

    It is taken as a step of its own, ``every`` so many steps with as many times the learning rate
    (decoupled, as AdamW's weight decay is): the pair is always that of the weight it acts on, and
    no step carries kappa beyond the limit it goes to, so the smallest singular value never becomes
    the largest, at whatever scale and learning rate. The paper's own form, which does all of
    that otherwise, is :class:`PaperPenalty`.

    >>> weight = torch.diag(torch.tensor([8.0, 1.0])).requires_grad_()
    >>> SpectralPenalty(1.0, target=2.0, clip=0.125).penalty(weight).backward()
    >>> weight.grad        # smaller the largest, larger the smallest, of norm 1
    tensor([[ 0.1240, 0.0000],
            [ 0.0000, -0.9923]])
    """

    strength: float = 0.005
    target: Target = None
    band: float = 0.7  # log 2: within a factor of two
    clip: float = 1.0
    every: int = 1

    @pure_form
    def penalty(self, weight: Float[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
        """The penalty of each matrix; its backward is the clipped closed gradient."""
        hinge = _Hinge.of_matrix(self.target, self.band, weight)
        ends = tracking.extreme_triplets(weight.detach())
        return hinge.penalty(weight, ends, self.strength, self.clip * ends.values[..., 0])

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Take steps along the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            memory = vars(_Hinge.of_weight(self.target, self.band, weight)).copy()
            yield DecoupledStep(
                SpectralPenalty,
                weight,
                self._change,
                memory,
                _tracked,
                every=self.every,
                price=self._price,
            )

    def _price(self, memory: State) -> Tensor:
        """The penalty of what was last looked at."""
        hinge = _Hinge(memory["low"], memory["high"])
        return self.strength * hinge.excess(memory["values"]).square()

    def _change(self, matrix: Tensor, rate: float, memory: State) -> Tensor | None:
        hinge, warm = _Hinge(memory["low"], memory["high"]), memory.get("warm", {})
        ends = tracking.extreme_triplets(matrix, warm)
        memory |= {"warm": warm, "values": ends.values}
        if not hinge.excess(ends.values).any():
            return None
        slopes = hinge.slopes(ends, self.strength, self.clip * ends.values[..., 0])
        distance = hinge.room(ends, slopes).clamp(min=0.0, max=rate)
        return ends.combined(-distance[..., None] * slopes)


def _tracked(matrix: Tensor) -> State:
    """The form of what a penalty remembers of a matrix that it has looked at."""
    return {
        "warm": tracking.memory_form(matrix),
        "values": matrix.new_empty((*matrix.shape[:-2], 2), device="meta"),
    }


@final
@dataclass(frozen=True)
class PaperPenalty(Correction):
    """Add the paper's penalty on kappa to the gradient: its formula and clip to the letter.

    The gradient of ``strength * excess**2`` (as of :class:`SpectralPenalty`, without a band) is
    added to that of the weight, its Frobenius norm at most ``clip`` whatever the scale of the
    weight, and goes through the optimizer. This is what experiment 4 measures. On a weight of usual
    size one step can throw the smallest singular value past the largest, so for use rather than
    for comparison take :class:`SpectralPenalty`. ``every`` so many steps the singular pair is
    looked at anew and the old one used in between.

    >>> weight = torch.diag(torch.tensor([8.0, 1.0])).requires_grad_()
    >>> PaperPenalty(1.0, target=2.0).penalty(weight).backward()
    >>> weight.grad
    tensor([[ 0.1240, 0.0000],
            [ 0.0000, -0.9923]])
    """

    strength: float = 0.005
    target: Target = None
    band: float = 0.0
    clip: float = 1.0
    every: int = 1

    @pure_form
    def penalty(self, weight: Float[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
        """The penalty of each matrix; its backward is the clipped closed gradient."""
        hinge = _Hinge.of_matrix(self.target, self.band, weight)
        ends = tracking.extreme_triplets(weight.detach())
        return hinge.penalty(weight, ends, self.strength, self.clip)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Add the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            memory = vars(_Hinge.of_weight(self.target, self.band, weight)).copy()
            yield AddedGradient(
                PaperPenalty, weight, self._gradient, memory, _measured, price=self._price
            )

    def _gradient(self, read: Callable[[], Tensor], memory: State) -> Tensor | None:
        calls = memory.get("calls", -1) + 1
        if calls % self.every == 0:
            warm = memory.get("warm", {})
            memory["ends"] = vars(tracking.extreme_triplets(read(), warm))
            memory["warm"] = warm
        memory["calls"] = calls  # once measured: a weight that is not finite is due again
        hinge = _Hinge(memory["low"], memory["high"])
        ends = tracking.ExtremeTriplets(**memory["ends"])
        if not hinge.excess(ends.values).any():
            return None
        return ends.combined(hinge.slopes(ends, self.strength, self.clip))

    def _price(self, memory: State) -> Tensor:
        """The penalty of what was last measured."""
        hinge = _Hinge(memory["low"], memory["high"])
        return self.strength * hinge.excess(memory["ends"]["values"]).square()


def _measured(matrix: Tensor) -> State:
    """The form of what the paper's penalty remembers of a matrix that it has measured."""
    *stack, rows, columns = matrix.shape
    shapes = {"left": (*stack, rows, 2), "values": (*stack, 2), "right": (*stack, columns, 2)}
    ends = {name: matrix.new_empty(shape, device="meta") for name, shape in shapes.items()}
    return {"calls": 0, "ends": ends, "warm": tracking.memory_form(matrix)}


def _remembered(memory: State) -> Tensor | None:
    """The penalty of every matrix when it was last looked at; older states do not have it."""
    return memory.get("penalty")


def _null(weight: Tensor) -> float:
    """The kappa that 19 of 20 random matrices of this shape stay below."""
    shape = weight.shape[-2:]
    return 1.0 if min(shape) == 1 else float(theory.GaussianNull(*shape).quantile(0.95))


@final
@dataclass(frozen=True)
class OrthogonalPenalty(Correction):
    """Add ``strength * |W'W - I|_F^2`` (or ``|WW' - I|``, of a wide matrix) to the loss.

    With ``spectral``, the spectral norm instead, not squared: SRIP (Bansal et al. 2018), whose
    gradient lies on one extreme singular pair. Either gradient has norm at most ``clip`` times that
    of the weight, and is taken as a step of its own that
    carries no singular value past one.

    >>> OrthogonalPenalty(1.0).penalty(torch.diag(torch.tensor([2.0, 1.0])))
    tensor(9.)
    >>> OrthogonalPenalty(1.0, spectral=True).penalty(torch.diag(torch.tensor([2.0, 1.0])))
    tensor(3.)
    """

    strength: float = 1e-3
    spectral: bool = False
    clip: float = 1.0

    @pure_form
    def penalty(self, weight: Float[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
        """The penalty of each matrix; its backward is the clipped gradient."""
        value, gradient, _ = self._parts(weight.detach(), None)
        return _priced(weight, value, gradient)

    def _parts(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor, Tensor]:
        """The value, its clipped gradient, and how far along it no singular value passes one."""
        form = self._spectral if self.spectral else self._frobenius
        value, gradient, room = form(weight, memory)
        size, norm = torch.linalg.matrix_norm(gradient), torch.linalg.matrix_norm(weight)
        shrink = torch.where(size > 0, self.clip * norm / size, 1.0).clamp(max=1.0)
        return value, gradient * shrink[..., None, None], room / shrink

    def _frobenius(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor, Tensor]:
        w = weight if weight.shape[-2] >= weight.shape[-1] else weight.mT
        square = w.mT @ w
        rest = square - torch.eye(w.shape[-1]).to(w)
        gradient = 4 * self.strength * w @ rest
        value = self.strength * rest.square().sum((-2, -1))
        # s - r s (s^2 - 1) is on the same side of one as s if r s (s + 1) is at most one; the
        # largest row sum of W'W is above the largest s^2
        largest = square.abs().sum(-1).amax(-1).sqrt()
        room = 1 / (4 * self.strength * largest * (largest + 1))
        return value, gradient if w is weight else gradient.mT, room

    def _spectral(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor, Tensor]:
        ends = tracking.extreme_triplets(weight, memory)
        rest = ends.values.square() - 1
        farther = torch.nn.functional.one_hot(rest.abs().argmax(-1), 2).to(rest)
        slope = 2 * self.strength * ends.values * rest.sign() * farther
        distance = ((ends.values - 1).abs() * farther).sum(-1)
        room = distance / slope.abs().sum(-1)
        return self.strength * rest.abs().amax(-1), ends.combined(slope), room

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Take steps along the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            yield DecoupledStep(
                OrthogonalPenalty, weight, self._change, {}, self._grown, price=_remembered
            )

    def _grown(self, matrix: Tensor) -> State:
        form = {"penalty": matrix.new_empty(matrix.shape[:-2])}
        return form | ({"warm": tracking.memory_form(matrix), "calls": 0} if self.spectral else {})

    def _change(self, matrix: Tensor, rate: float, memory: State) -> Tensor:
        warm = memory.get("warm", {})
        memory["penalty"], gradient, room = self._parts(matrix, warm)
        if self.spectral:
            memory |= {"warm": warm, "calls": memory.get("calls", 0) + 1}
        return -room.nan_to_num(posinf=rate).clamp(max=rate)[..., None, None] * gradient


@final
@dataclass(frozen=True)
class SigmaMaxPenalty(Correction):
    """Add ``strength / 2 * sigma_1**2`` to the loss: spectral norm regularization.

    Yoshida and Miyato (2017) penalise the largest singular value alone, since it bounds by how much
    a layer can amplify a change of its input. The gradient is ``strength sigma_1 u1 v1'``; followed
    on its own for a time r, ``every`` so many steps as many times the learning rate, it
    multiplies the value by ``exp(-strength r)``, which is what is done here: no step can pass zero.
    Unlike :class:`SpectralDecay` it does not stop where the second value is met.

    >>> SigmaMaxPenalty(1.0).penalty(torch.diag(torch.tensor([4.0, 1.0])))
    tensor(8.)
    """

    strength: float = 0.01
    every: int = 1

    @pure_form
    def penalty(self, weight: Float[Tensor, "*stack out in"]) -> Float[Tensor, "*stack"]:
        """The penalty of each matrix; its backward is the closed gradient."""
        u, s, v = tracking.largest_triplet(weight.detach())
        gradient = (self.strength * s)[..., None, None] * (u[..., None] * v[..., None, :])
        return _priced(weight, self.strength / 2 * s.square(), gradient)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Take steps along the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            yield DecoupledStep(
                SigmaMaxPenalty,
                weight,
                self._change,
                {},
                self._grown,
                every=self.every,
                price=_remembered,
            )

    def _grown(self, matrix: Tensor) -> State:
        penalty = matrix.new_empty(matrix.shape[:-2])
        return {"warm": tracking.largest_form(matrix), "calls": 0, "penalty": penalty}

    def _change(self, matrix: Tensor, rate: float, memory: State) -> Tensor:
        warm = memory.get("warm", {})
        u, s, v = tracking.largest_triplet(matrix, warm)
        memory |= {"warm": warm, "calls": memory.get("calls", 0) + 1}
        memory["penalty"] = self.strength / 2 * s.square()
        lost = s * -math.expm1(-self.strength * rate)
        return -(lost[..., None] * u)[..., None] * v[..., None, :]
