"""Stacks of small models: the first dimension of every parameter counts trials."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from jaxtyping import Float
from torch import Tensor, nn


class Matrix(nn.Module):
    """A stack of matrices, each learned by itself."""

    def __init__(self, start: Float[Tensor, "trials out in"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def forward(self) -> Float[Tensor, "trials out in"]:
        """The matrices of all trials."""
        return self.weight.view_as(self.weight)  # a leaf would copy the gradient it is handed


class _Layers(nn.Module):
    """Stacked matrices, one a layer."""

    def __init__(self, starts: Sequence[Float[Tensor, "trials out in"]]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(start.clone() for start in starts)

    @property
    def product(self) -> Float[Tensor, "trials out in"]:
        """The product of the layers, the first next to the input."""
        return reduce(lambda product, layer: layer @ product, self.layers)


class DeepLinear(_Layers):
    """Layers without anything between them: in the end, a matrix."""

    def forward(self) -> Float[Tensor, "trials out in"]:
        """The matrix that the layers amount to."""
        return self.product


class Perceptron(_Layers):
    """Layers with a rectifier between them."""

    def forward(self, inputs: Float[Tensor, "trials rows in"]) -> Float[Tensor, "trials rows out"]:
        """The answers of the last layer."""
        first, *others = self.layers
        hidden = inputs @ first.mT
        for layer in others:
            hidden = hidden.relu() @ layer.mT
        return hidden
