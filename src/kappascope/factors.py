"""Parametrizations with factors of their own: of rows, of columns, of singular values.

Their gradients come from the weight's. For ``W_eff = M W``, dW = M'G, and where M is diagonal in a
known basis the chain rule's answer for its entries is a sum of products of dW and W, divided by
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from kappascope import spectra
from kappascope.placement import Free
from kappascope.slots import View, precise


class Factors(nn.Module):
    """A parametrization with factors of its own, linear in the weight, the identity at first.

    The factors take no gradient from autograd: theirs follows from that of the weight, which a
    scaler has unscaled, DDP has averaged and the user's ``zero_grad`` clears. They are parameters
    nevertheless, so that averages of a model (EMA) include them, and detached when they are used,
    for a model may be told to require all its gradients.
    """

    view: View  # of the weight as a matrix

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of any module, but not below float32: a model in 16 bits keeps what was learned."""

        def moved(x: Tensor) -> Tensor:
            new = fn(x)
            return x.to(new.device) if new.is_floating_point() and new.itemsize < 4 else new

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch gives none

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """Gradients of :attr:`factors`, from the original weight and its gradient."""
        raise NotImplementedError

    @property
    def factors(self) -> list[nn.Parameter]:
        """The factors, in order."""
        # parameters() would look for modules inside this one, at every step of every weight
        return [p for p in self._parameters.values() if p is not None]

    def settle(self, weight: Tensor) -> bool:
        """Called after every step; True if the factors were merged into the weight."""
        return False


class Scale(Factors):
    """Factors of rows, of columns, or one."""

    def __init__(self, matrix: Tensor, view: View, sides: Free, scalar: bool) -> None:
        super().__init__()
        self.view, self.mask = view, None if scalar else sides.mask(matrix.shape[-2])
        ones = torch.ones_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
        rows = ones[..., :1, 0] if scalar else ones[..., 0]
        if sides.rows:
            self.rows = nn.Parameter(rows.clone(), requires_grad=False)
        if sides.columns:
            self.columns = nn.Parameter(ones[..., 0, :].clone(), requires_grad=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with factors applied."""
        matrix = self.view.matrix(weight)
        if hasattr(self, "rows"):
            matrix = self.rows.detach()[..., None] * matrix
        if hasattr(self, "columns"):
            columns = self.columns.detach()[..., None, :]
            matrix = matrix.mul_(columns) if hasattr(self, "rows") else matrix * columns
        return self.view.weight(matrix.to(weight.dtype))

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """As dW = r G c, what the chain rule gives for r is the sum of dW W, over r."""
        found, product = [], weight * gradient
        if hasattr(self, "rows"):
            summed = product.sum(-1)
            if self.rows.shape != summed.shape:
                summed = summed.sum(-1, keepdim=True)
            summed = _quotient(summed, self.rows)
            found.append(summed if self.mask is None else summed * self.mask.to(summed))
        if hasattr(self, "columns"):
            found.append(_quotient(product.sum(-2), self.columns))
        return found


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``, and 0 where b is: a factor of zero has silenced what it multiplies."""
    return torch.where(b == 0, 0.0, a / b)


class Spectrum(Factors):
    """Factors of singular values, in the basis of the shorter side."""

    basis: Tensor
    age: Tensor

    def __init__(self, matrix: Tensor, view: View, every: int) -> None:
        super().__init__()
        self.view, self.every = view, every
        self.tall = matrix.shape[-2] > matrix.shape[-1]
        basis = self._vectors(matrix)
        self.register_buffer("basis", basis)
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))
        self.values = nn.Parameter(torch.ones_like(basis[..., 0, :]), requires_grad=False)

    def _vectors(self, matrix: Tensor) -> Tensor:
        wide = precise(matrix.mT if self.tall else matrix)
        return spectra.decomposition(wide)[0]

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with factors applied."""
        matrix = self.view.matrix(weight)
        wide = precise(matrix.mT if self.tall else matrix)
        with torch.autocast(weight.device.type, enabled=False):
            # added to the weight, so that factors of one change no bit
            factors = (self.values.detach() - 1)[..., None]
            change = self.basis @ (factors * (self.basis.mT @ wide))
        new = wide + change
        return self.view.weight((new.mT if self.tall else new).to(weight.dtype))

    def gradients(self, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        """As dW = U m U' G, what the chain rule gives for m is the sum of U'dW U'W, over m."""
        if self.tall:
            weight, gradient = weight.mT, gradient.mT
        product = (self.basis.mT @ weight) * (self.basis.mT @ gradient)
        return [_quotient(product.sum(-1), self.values)]

    def settle(self, weight: Tensor) -> bool:
        """Merge, and turn the basis, when it is time."""
        self.age += 1
        if int(self.age) % self.every:
            return False
        weight.copy_(self(weight))
        self.basis.copy_(self._vectors(self.view.matrix(weight)))
        self.values.fill_(1.0)
        return True
