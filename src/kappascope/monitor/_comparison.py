"""One step of one parameter beside the step that was expected: how far apart, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.precision import half_ulps
from kappascope.monitor.promises import Candidate
from kappascope.text import number

# Half-ulps of the weight: rounded after decay, after the step and once more, each uniform within
# one, that is 1 in the mean square, and 1 for a factor 1 - decay that is itself rounded; for a
# tensor of one entry 4 at worst.
ROUNDINGS = 2.0
# Units in the last place that the arithmetic of a formula may lose besides.
ARITHMETIC = 16
# Two honest roundings of a formula differ by sqrt(2) of one, and more in small tensors.
NOISE = 2.5


@dataclass(frozen=True)
class Comparison:
    """One step of one parameter: the weight before, the gradient, what came, the decay in it.

    ``undecided`` are the entries whose sign depends on rounding.
    """

    weight: Tensor
    gradient: Tensor
    came: Tensor
    shrunk: Tensor
    undecided: Tensor | None = None

    def distance(self, step: Candidate, rounded: Tensor) -> tuple[float, float]:
        """The distance of what came from a step, and the distance that rounding explains."""
        gap, noise = step.projected(self.came - step.update), rounded.double() - step.update
        unseen = ~noise.isfinite()  # what the weights' own type cannot hold
        if self.weight.dtype is torch.float16:  # where any intermediate result may overflow
            unseen |= ~gap.isfinite()
        unseen = unseen if self.undecided is None else unseen | self.undecided
        gap, noise = (x.masked_fill(unseen, 0.0) for x in (gap, noise))
        if not gap.isfinite().all():
            return float("inf"), 0.0
        size, weight = euclidean(step.update), self.weight.double()
        # a rate or a count that is a tensor is kept in float32, also for float64 weights
        dtype = torch.float32 if self.weight.dtype is torch.float64 else self.weight.dtype
        largest = torch.maximum(weight.abs(), (weight + self.came).abs()).nan_to_num(0.0, 0.0)
        ulps = euclidean(half_ulps(largest, dtype))
        rounding = (ROUNDINGS + ROUNDINGS / weight.numel() ** 0.5) * ulps
        # nobody promises whether the decay is taken off before the step or after it
        order = euclidean(self.shrunk) / (euclidean(weight) or 1.0)
        relative = ARITHMETIC * torch.finfo(dtype).eps + order + step.slack
        return euclidean(gap), rounding + relative * size + NOISE * euclidean(noise)

    def decay(
        self, step: Tensor, rounded: Tensor, momentum: Tensor
    ) -> Iterator[tuple[float, float, float]]:
        """How much more of the weight went than was stated, the doubt in that, and what was stated.

        Newton and Schulz's iteration in bfloat16 differs by several per cent between honest
        implementations, by more than a decay. But that moves the singular values of the update: it
        is not seen in the part of the weight that has nothing of the momentum's singular pairs.
        """
        weight, gap = self.weight.double().flatten(1), (self.came - step).flatten(1)
        share = euclidean(self.shrunk) / (euclidean(weight) or 1.0)
        glimpse = abs(float((gap * weight).sum())) / (euclidean(weight) ** 2 or 1.0)
        if share <= 4 * torch.finfo(self.weight.dtype).eps or glimpse <= 0.5 * share:
            return
        u, _, vt = spectra.decomposition(momentum.double().flatten(1))
        weight = weight - (u * torch.einsum("or,oi,ri->r", u, weight, vt)) @ vt
        square = float(weight.square().sum())
        if not square:
            return
        noise = (rounded.double() - step).flatten(1)
        excess, shift = (-float((x * weight).sum()) / square for x in (gap, noise))
        yield excess, abs(shift) + euclidean(gap) / (weight.numel() * square) ** 0.5, share

    def described(self, step: Tensor) -> str:
        """What came, in words, beside the step that was expected."""
        came, weight, gap = self.came, self.weight.double(), self.came - step
        if not came.isfinite().all():
            return "NaN or Inf"
        if not came.any():
            return "no move"
        if not step.any():
            return "a move"
        alike, size = cosine(came, step), euclidean(came) / euclidean(step)
        if alike > 0.9999 and abs(size - 1) > 1e-3:
            return f"{number(size)} times that step"
        if abs(cosine(gap, weight)) > 0.95:
            stated, extra = (
                -float((x * weight).sum()) / euclidean(weight) ** 2 for x in (self.shrunk, gap)
            )
            return decay_text(stated + extra, stated)
        words = [f"cosine {number(alike)} with it, {number(size)} times its size"]
        if alike > 0.9999:
            words = [
                f"a step that differs by {number(euclidean(gap) / euclidean(step))} of its size"
            ]
        moved = came - self.shrunk
        if abs(cosine(moved, self.gradient.double())) > 0.999:
            words.append("along the gradient, as SGD's")
        elif moved.numel() > 1 and moved.abs().std() < 0.02 * moved.abs().mean():
            words.append("all entries of one size, as Adam's first or a sign's")
        return "; ".join(words)

    def spectrum(self, rate: float) -> str:
        """The range of the singular values of the step that came, in units of the learning rate."""
        step = (self.came - self.shrunk).flatten(1)
        if not step.isfinite().all():
            return "that are not finite"
        values = spectra.singular_values(step) / (rate or 1.0)
        return f"{number(float(values[-1]))} ... {number(float(values[0]))}"


def decay_text(came: float, stated: float) -> str:
    """The decay that came, of which rounding leaves a little where there was none.

    >>> decay_text(0.002, 0.001), decay_text(-0.01, 0.0)
    ('decay by 0.00200 of the weight, not by 0.00100', '0.0100 of the weight less decay')
    """
    if not stated:  # where there is one, it is in the gradient
        return f"{number(abs(came))} of the weight {'more' if came > 0 else 'less'} decay"
    if abs(came) < 0.01 * abs(stated):
        return f"no decay, not by {number(stated)}"
    return f"decay by {number(came)} of the weight, not by {number(stated)}"


def flatness(matrix: Tensor) -> float:
    """Nuclear over Frobenius norm, relative to that of an orthogonal matrix: one is the most."""
    values = spectra.singular_values(matrix)
    return float(values.sum()) / ((euclidean(matrix) or 1.0) * len(values) ** 0.5)


def euclidean(tensor: Tensor) -> float:
    """Euclidean norm of all entries, in float64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two tensors; zero where one of them is zero."""
    scale = euclidean(a) * euclidean(b)
    return float((a * b).sum()) / scale if scale else 0.0
