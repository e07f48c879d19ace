"""Corrections that rewrite the singular values of a weight after a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._targets import Target, target_values, target_values_of_matrix
from kappascope.corrections._treatments import OptimizerStep, Rewrite, State, Treatment
from kappascope.corrections.correction import (
    Correction,
    has_zero_matrix,
    pure_form,
    why_not_written,
)
from kappascope.matrix import spectra, tracking
from kappascope.matrix.components import SIGMA_FLOOR
from kappascope.model.weights import LiveWeight, precise

MAX_ROUNDING_TRIES = 8  # at a spectrum that rounding leaves within a bound; two are usual


def toward_spectrum(
    weight: Float[Tensor, "*stack out in"],
    singular_values: Float[Tensor, "*#stack rank"],
    step: float = 0.1,
) -> Float[Tensor, "*stack out in"]:
    """The same singular vectors with singular values moved a part of the way to others.

    >>> toward_spectrum(torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([4.0, 1.0]), step=0.5)
    tensor([[3.5000, 0.0000],
            [0.0000, 1.0000]])
    """
    return _moved(*spectra.decomposition(weight), singular_values, step)


def _moved(u: Tensor, s: Tensor, vt: Tensor, wanted: Tensor, step: float) -> Tensor:
    moved = torch.lerp(s, wanted.to(s), step).clamp(min=SIGMA_FLOOR)
    return (u * moved[..., None, :]) @ vt


def banded(
    singular_values: Float[Tensor, "*stack rank"], kappa: float | Float[Tensor, "*#stack 1"]
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


@final
@dataclass(frozen=True)
class SVDCorrection(Correction):
    """Every so many steps, move the singular values a part of the way, ``step``, to the target's.

    Without a target these are the initial ones: training turns the matrix but cannot reshape it
    for long, and a matrix that begins at zero is left out. A number bounds kappa: the nearest
    spectrum that has it is the target. Singular vectors are kept. (``rate`` is an older name of
    ``step``; elsewhere a rate is a multiple of the learning rate, which plays no part here.)

    >>> SVDCorrection(step=0.5, target=lambda weight: torch.tensor([4.0, 1.0])).corrected(
    ...     torch.diag(torch.tensor([3.0, 1.0])))
    tensor([[3.5000, 0.0000],
            [0.0000, 1.0000]])
    """

    every: int = 20
    step: float = 0.1
    target: Target = None
    rate: InitVar[float | None] = None

    def __post_init__(self, rate: float | None) -> None:
        if rate is not None:
            object.__setattr__(self, "step", rate)
        super().__post_init__()

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """One step of the weight; without a target it is its own."""
        return self._moved(weight, target_values_of_matrix(self.target, weight))

    def _moved(self, weight: Tensor, wanted: Tensor | None) -> Tensor:
        if isinstance(self.target, float):
            u, s, vt = spectra.decomposition(weight)
            return _moved(u, s, vt, banded(s, self.target), self.step)
        return weight if wanted is None else toward_spectrum(weight, wanted, self.step)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten, or has no spectrum to be kept at, if that is so."""
        if self.target is None and has_zero_matrix(weight):
            return "it is zero at first, and would be pulled back to that; pass a target"
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight every so many steps, unless the step is zero."""
        target = spectra.singular_values if self.target is None else self.target
        wanted, rank = target_values(target, weight), min(weight.matrix().shape[-2:])
        if wanted is not None and wanted.shape[-1] != rank:
            its = f"{weight.name} has {rank} singular values"
            raise ValueError(f"{its}, the target {wanted.shape[-1]}; choose by where=")
        if self.step:
            memory = {} if wanted is None else {"values": wanted}
            yield Rewrite(SVDCorrection, weight, self._rewritten, memory)

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        if step.index % self.every:
            return None
        return self._moved(precise(matrix), memory.get("values"))


@final
@dataclass(frozen=True)
class SpectralDecay(Correction):
    """Weight decay of some singular values only; ``part`` says which, counted from the largest.

    Decay composes: ``every`` so many steps those values are multiplied by ``exp(-strength * r)``
    with r the sum of the learning rates of the steps since the last time, so how often it acts
    does not matter, a schedule is followed, and no value reaches zero. A value is *held* at the
    next one that does not decay: the largest falls to the second and no further, for below that
    another direction would be the largest. The default acts on the largest (Yoshida and Miyato
    2017); ``slice(1, None)`` on all others, ``slice(-8, None)`` on the eight smallest.

    >>> SpectralDecay(strength=math.log(2)).corrected(torch.diag(torch.tensor([4.0, 1.0])))
    tensor([[2., 0.],
            [0., 1.]])
    """

    strength: float = 0.1
    part: slice = field(default_factory=lambda: slice(1), hash=False)  # slices have none in 3.11
    every: int = 10

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight after a decay by ``strength``: a step with a learning rate of one."""
        return self._decayed(weight, self.strength)

    def _decayed(self, weight: Tensor, amount: float) -> Tensor:
        u, s, vt = spectra.decomposition(weight)
        decaying = set(range(s.shape[-1])[self.part])
        lost = []
        for i in sorted(decaying):
            value = s[..., i] * math.exp(-amount)
            held_at = next((j for j in range(i, s.shape[-1]) if j not in decaying), None)
            if held_at is not None:
                value = torch.maximum(value, s[..., held_at])
            lost.append(s[..., i] - value)
        if not lost:
            return weight
        change = u[..., self.part] * torch.stack(lost, -1)[..., None, :]
        return weight - change @ vt[..., self.part, :]  # not rebuilt: what stays is not rounded

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten, if that is so."""
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight every so many steps, unless the strength is zero."""
        if self.strength:
            due = torch.zeros((), dtype=torch.float64)  # learning rates that wait for their turn
            treatment = Rewrite(SpectralDecay, weight, self._rewritten, {"due": due})
            treatment.follows_rate = True
            yield treatment

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        memory["due"] = memory["due"] + step.learning_rate
        if step.index % self.every:
            return None
        amount = self.strength * float(memory["due"])
        memory["due"] = torch.zeros_like(memory["due"])
        return self._decayed(precise(matrix), amount)


@final
@dataclass(frozen=True)
class SingularValueBound(Correction):
    """Keep the condition number at most ``kappa``, from the first step on.

    A weight beyond the bound is replaced by the nearest one a little (``slack``) inside of it; the
    weight is not re-initialised and no parameter is added. Of a large weight two Cholesky
    factorizations prove that nothing has to be done. Where they fail, the few values that are too
    small are found by inverse iteration and raised (from a kappa of 10 on), which is proven again;
    the SVD is taken only where that does not do. What all of it costs is in docs/corrections.md.

    It holds of the weight as it is stored: where rounding might break it (in 16 bits, or of a kappa
    in the thousands) the stored weight is looked at, and what would be beyond the bound is taken
    further inside. No rounded matrix is quite orthogonal: kappa gets no nearer to one than 1.01 in
    bfloat16, 1.001 in float16 and 1.000001 in float32, whatever the bound.

    >>> SingularValueBound(2.0).corrected(torch.diag(torch.tensor([4.0, 2.0, 0.0])))
    tensor([[3.2000, 0.0000, 0.0000],
            [0.0000, 2.0000, 0.0000],
            [0.0000, 0.0000, 1.6000]])
    """

    kappa: float = 100.0
    slack: float = 0.05

    @pure_form
    def corrected(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The nearest weight within the bound."""
        u, s, vt = spectra.decomposition(weight)
        return self._lifted(weight, u, banded(s, self.kappa) - s, vt)

    def _rewritten(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        wide = precise(matrix)
        if tracking.within(wide, self.kappa, memory):
            return None
        if not self._rounding_matters(matrix):
            few = tracking.lifted(wide, self.kappa, self.slack, memory)
            if few is not None:
                return few
        wide = wide.double() if self._rounding_matters(matrix) else wide
        u, s, vt = spectra.decomposition(wide)
        if bool((s[..., 0] <= self.kappa * s[..., -1]).all()):
            return None
        tight = max(1.0, self.kappa / (1 + self.slack))
        new = self._lifted(wide, u, banded(s, tight) - s, vt)
        for _ in range(MAX_ROUNDING_TRIES if self._rounding_matters(matrix) else 0):
            if tight == 1.0 or (reached := _worst(new.to(matrix.dtype))) <= self.kappa:
                break
            # of the largest value, by how much rounding lowered the smallest: a fifth more, as it
            # will not do the same again
            lost = 1.2 * (1 / tight - 1 / reached)
            tight = max(1.0, min(1 / (1 / self.kappa + lost), 0.99 * tight))
            new = self._lifted(wide, u, banded(s, tight) - s, vt)
        return new

    def _rounding_matters(self, matrix: Tensor) -> bool:
        """Whether the error of storing, or of an SVD in this type, may use up the room there is.

        It is at most a unit times the Frobenius norm, thus times the root of the rank times the
        largest value, which is kappa times the smallest.
        """
        unit = torch.finfo(matrix.dtype).eps / 2
        room = min(self.slack, self.kappa - 1)
        return self.kappa * unit * min(matrix.shape[-2:]) ** 0.5 > room / 4

    @staticmethod
    def _lifted(weight: Tensor, u: Tensor, change: Tensor, vt: Tensor) -> Tensor:
        """With singular values changed; added to the weight, so that what stays is not rounded."""
        return weight + (u * change[..., None, :]) @ vt

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight cannot be rewritten, if that is so."""
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite the weight whenever it is beyond the bound."""
        yield Rewrite(SingularValueBound, weight, self._rewritten, {}, tracking.bound_form)


def _worst(stored: Tensor) -> float:
    """The largest condition number."""
    s = spectra.singular_values(stored.double())
    return float((s[..., 0] / s[..., -1]).amax())
