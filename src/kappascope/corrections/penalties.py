"""Corrections that add a penalty on the shape of the spectrum to the loss, by its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope import theory
from kappascope.corrections.analysis import AnalysedModel
from kappascope.corrections.correction import Correction, pure_form
from kappascope.corrections.targets import Target, target_values, target_values_of_matrix
from kappascope.corrections.treatments import AddedGradient, State, Treatment
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
    return _Hinge(wanted, wanted).slope(tracking.extreme_triplets(weight), strength, clip)


@dataclass(frozen=True)
class _Hinge:
    """The limits between which ``log(kappa + 1)`` costs nothing."""

    low: Tensor
    high: Tensor

    def excess(self, kappa: Tensor) -> Tensor:
        x = (kappa + 1).log()
        return x - torch.minimum(torch.maximum(x, self.low.to(x)), self.high.to(x))

    def slope(self, found: tracking.ExtremeTriplets, strength: float, clip: float) -> Tensor:
        """Gradient of ``strength * excess**2``, its Frobenius norm at most ``clip``."""
        kappa, last = floored_condition_number(found.values), found.values[..., -1] + SIGMA_FLOOR
        slope = 2 * strength * self.excess(kappa) / (kappa + 1)  # with respect to kappa
        # d kappa / d s1 = 1 / sd and d kappa / d sd = -kappa / sd
        at_first, at_last = slope / last, -slope * kappa / last
        shrink = (clip / torch.hypot(at_first, at_last)).clamp(max=1.0)
        return found.combined(torch.stack([shrink * at_first, shrink * at_last], dim=-1))


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


@final
@dataclass(frozen=True)
class SpectralPenalty(Correction):
    """Add ``strength * excess**2`` to the loss: by how much ``log(kappa + 1)`` leaves its limits.

    Limits: kappa at most ``target`` if that is a number, or what 19 of 20 random matrices of its
    shape stay below if ``None``; within ``band`` (of the logarithm) of the target's kappa if there
    is a spectrum to compare with. The gradient is the closed one on the extreme singular pair, of
    norm at most ``clip``, with the pair tracked by :mod:`kappascope.matrix.tracking`; ``every`` so
    many steps it is looked at anew and the old one used in between. The paper's penalty is
    ``SpectralPenalty(0.005, target=lambda weight: known_singular_values, band=0.0)``.

    >>> weight = torch.diag(torch.tensor([8.0, 1.0])).requires_grad_()
    >>> SpectralPenalty(1.0, target=2.0).penalty(weight).backward()
    >>> weight.grad        # smaller the largest, larger the smallest, clipped to norm 1
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
        hinge = self._hinge(target_values_of_matrix(self.target, weight), weight)
        found = tracking.extreme_triplets(weight.detach())
        value = self.strength * hinge.excess(floored_condition_number(found.values)).square()
        return _Priced.apply(  # type: ignore[no-untyped-call]  # torch gives it none
            weight, value, hinge.slope(found, self.strength, self.clip)
        )

    def _hinge(self, wanted: Tensor | None, weight: Tensor) -> _Hinge:
        if wanted is not None:
            middle = (floored_condition_number(wanted) + 1).log()
            return _Hinge(middle - self.band, middle + self.band)
        bound = self.target if isinstance(self.target, float) else _null(weight)
        high = torch.tensor(bound + 1.0, dtype=torch.float64, device=weight.device).log()
        return _Hinge(torch.zeros_like(high), high)

    def _gradient(self, read: Callable[[], Tensor], memory: State) -> Tensor | None:
        calls = memory.get("calls", -1) + 1
        if calls % self.every == 0:
            warm = memory.get("warm", {})
            memory["ends"] = vars(tracking.extreme_triplets(read(), warm))
            memory["warm"] = warm
        memory["calls"] = calls  # once measured: a weight that is not finite is due again
        hinge, found = (
            _Hinge(memory["low"], memory["high"]),
            tracking.ExtremeTriplets(**memory["ends"]),
        )
        if not hinge.excess(floored_condition_number(found.values)).any():
            return None
        return hinge.slope(found, self.strength, self.clip)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Add the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            hinge = self._hinge(target_values(self.target, weight), weight.matrix())
            memory = {"low": hinge.low, "high": hinge.high}
            yield AddedGradient(
                SpectralPenalty, weight, self._gradient, memory, _measured, price=self._price
            )

    def _price(self, memory: State) -> Tensor:
        """The penalty of what was last measured."""
        excess = _Hinge(memory["low"], memory["high"]).excess(
            floored_condition_number(memory["ends"]["values"])
        )
        return self.strength * excess.square()


def _measured(matrix: Tensor) -> State:
    """The form of what a spectral penalty remembers of a matrix that it has measured."""
    *stack, rows, columns = matrix.shape
    shapes = {"left": (*stack, rows, 2), "values": (*stack, 2), "right": (*stack, columns, 2)}
    ends = {name: matrix.new_empty(shape, device="meta") for name, shape in shapes.items()}
    return {"calls": 0, "ends": ends, "warm": tracking.memory_form(matrix)}


def _null(weight: Tensor) -> float:
    """The kappa that 19 of 20 random matrices of this shape stay below."""
    shape = weight.shape[-2:]
    return 1.0 if min(shape) == 1 else float(theory.GaussianNull(*shape).quantile(0.95))


@final
@dataclass(frozen=True)
class OrthogonalPenalty(Correction):
    """Add ``strength * |W'W - I|_F^2`` (or ``|WW' - I|``, of a wide matrix) to the loss.

    With ``spectral``, the spectral norm instead, not squared: SRIP (Bansal et al. 2018), whose
    gradient lies on one extreme singular pair. Either gradient has norm at most ``clip``.

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
        value, gradient = self._priced(weight.detach(), None)
        return _Priced.apply(  # type: ignore[no-untyped-call]  # torch gives it none
            weight, value, gradient
        )

    def _priced(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor]:
        form = self._spectral if self.spectral else self._frobenius
        value, gradient = form(weight, memory)
        size = torch.linalg.matrix_norm(gradient)
        return value, gradient * (self.clip / size).clamp(max=1.0)[..., None, None]

    def _frobenius(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor]:
        w = weight if weight.shape[-2] >= weight.shape[-1] else weight.mT
        rest = w.mT @ w - torch.eye(w.shape[-1]).to(w)
        gradient = 4 * self.strength * w @ rest
        value = self.strength * rest.square().sum((-2, -1))
        return value, gradient if w is weight else gradient.mT

    def _spectral(self, weight: Tensor, memory: State | None) -> tuple[Tensor, Tensor]:
        found = tracking.extreme_triplets(weight, memory)
        rest = found.values.square() - 1
        farther = torch.nn.functional.one_hot(rest.abs().argmax(-1), 2).to(rest)
        slope = 2 * self.strength * found.values * rest.sign() * farther
        return self.strength * rest.abs().amax(-1), found.combined(slope)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Add the gradient of the penalty, unless its strength is zero."""
        if self.strength:
            yield AddedGradient(OrthogonalPenalty, weight, self._gradient, {}, self._tracked)

    def _tracked(self, matrix: Tensor) -> State:
        return tracking.memory_form(matrix) if self.spectral else {}

    def _gradient(self, read: Callable[[], Tensor], memory: State) -> Tensor:
        return self._priced(read(), memory)[1]
