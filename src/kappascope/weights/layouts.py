"""How a stored tensor is cut into matrices: the words in which every cut is said.

A :class:`Layout` is a reshape, a permutation and a list of indices, so it can be sent to another
process. Nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from torch import Tensor, nn

from kappascope.weights.heads import Config

Shape: TypeAlias = tuple[int, ...]
Near: TypeAlias = Callable[[str], Shape | None]  # the shape under another key, or nothing
Index: TypeAlias = tuple[int | slice, ...]
Parts: TypeAlias = tuple[tuple[str, Index], ...]
ALL = slice(None)
MOST_PARTS = 1024  # the largest stacks in use have 512 experts; a file may claim millions

# Layers that hold gate and up in this order, each with the layer that reads what they make, half as
# wide as they are long. The gate is the one that goes through the nonlinearity.
GATED = {
    "gate_up_proj": ("down_proj", "gate up"),  # Phi-3, GLM-4, stacks of experts
    "dense_h_to_4h": ("dense_4h_to_h", "gate up"),  # ChatGLM
    "input_linear": ("output_linear", "gate up"),  # Granite's experts
    "w12": ("w3", "gate up"),  # DINOv2
    "weights_in": ("weights_out", "gate up"),  # DINOv2 in transformers
    "Wi": ("Wo", "gate up"),  # ModernBERT
    "gated_layers": ("wo", "gate up"),  # MosaicBERT
    "ff_proj": ("ff_out", "up gate"),  # OLMo
    "net.0.proj": ("net.2", "up gate"),  # diffusers
    "fc1": ("fc2", "up gate"),  # flash-attn, if its config speaks of a gated linear unit
}


@dataclass(frozen=True)
class Place:
    """A stored tensor's key and shape, and what is known around it."""

    key: str
    shape: Shape
    near: Near = lambda _: None
    owner: nn.Module | None = None
    config: Config = field(default_factory=Config)

    @property
    def path(self) -> str:
        """The key of the layer, without ``.weight``."""
        return self.key.removesuffix(".weight")

    def beside(self, leaf: str, layer: str = "") -> Shape:
        """Shape of the sibling ``leaf``, two numbers at least: zeros if there is none."""
        layer = layer or self.path.rpartition(".")[2]
        stem, end = self.path.removesuffix(layer), self.key.removeprefix(self.path)
        found = self.near(f"{stem}{leaf}") or self.near(f"{stem}{leaf}{end or '.weight'}")
        return found if found is not None and len(found) > 1 else (0, 0)


@dataclass(frozen=True)
class Layout:
    """A tensor as a grid whose last dimension are columns, and the parts of the grid.

    >>> import torch
    >>> halves = Layout((2, 3, 4), (0, 1, 2), (("gate", (0,)), ("up", (1,))))
    >>> [(label, tuple(matrix.shape)) for label, matrix in halves.cut(torch.zeros(6, 4))]
    [('', (6, 4)), ('gate', (3, 4)), ('up', (3, 4))]
    """

    shape: Shape
    order: Shape
    parts: tuple[tuple[str, Index], ...] = ()
    columns: int = 1  # how many of the last dimensions are columns

    @property
    def crowd(self) -> int:
        """How many matrices of a stack are looked at together alone, being too many to part.

        >>> Layout((2000, 3, 4), (0, 1, 2)).crowd, Layout((2000, 1, 4), (0, 1, 2)).crowd
        (2000, 0)
        """
        rows = prod(self.shape[i] for i in self.order[1 : -self.columns])
        return self.shape[0] if rows > 1 and self.shape[0] > MOST_PARTS and not self.parts else 0

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The whole as a matrix, then the parts with their labels; views where possible."""
        grid = tensor.reshape(self.shape).permute(self.order).flatten(-self.columns)
        yield "", grid.flatten(0, -2)
        yield from ((label, grid[index].flatten(0, -2)) for label, index in self.parts)


def numbered(count: int) -> Parts:
    """Every matrix of a stack, unless there is only one, or a crowd.

    >>> numbered(2), numbered(10**9)
    ((('0', (0,)), ('1', (1,))), ())
    """
    return tuple((str(i), (i,)) for i in range(count)) if 1 < count <= MOST_PARTS else ()
