"""Tensors that a file holds as codes: decoded when they are read, with how far rounding may reach.

A quantized weight is stored as small whole numbers with scales. What was rounded lies within half a
step of what the codes stand for, so a decoded matrix comes with its half steps, from which the
interval of its condition number follows as it does from the dtype of other matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import StorageLocation, TensorLocation

PANEL_ENTRIES = 1 << 22  # numbers decoded at a time: sixteen megabytes


def panels(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of rows that are decoded together, each but the last a multiple of rows.

    >>> list(panels(5, PANEL_ENTRIES // 2, multiple=2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    height = max(1, PANEL_ENTRIES // max(columns, 1) // multiple) * multiple
    yield from (slice(top, min(top + height, rows)) for top in range(0, rows, height))


def enlarged(half_steps: Tensor) -> Tensor:
    """Return half steps in bfloat16, none of them smaller: a 64th more outweighs its rounding.

    >>> enlarged(torch.tensor([0.1])) >= 0.1
    tensor([True])
    """
    return (half_steps * (1 + 1 / 64)).bfloat16()


class Code(ABC):
    """A way to store a tensor of numbers as other tensors; a value that can be pickled."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the code is called; empty where numbers are stored as they are, in another order."""

    @abstractmethod
    def decode(self, *stored: Tensor) -> Float[Tensor, "*shape"]:
        """Return the numbers that the stored tensors stand for."""

    @abstractmethod
    def half_steps(self, *stored: Tensor) -> Float[Tensor, "*shape"]:
        """Return how far rounding to the nearest code may have moved each number."""


@dataclass(frozen=True, slots=True)
class CodedLocation:
    """A tensor as a file holds it in codes: the stored tensors, and what decodes them.

    Its numbers take the bytes of their dtype once they are decoded, however few the codes take.
    """

    stored: tuple[TensorLocation | CodedLocation, ...]
    code: Code
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32  # of the decoded numbers

    @property
    def storage(self) -> StorageLocation:
        """The storage of the codes, which tells tied tensors from others."""
        return self.stored[0].storage

    @property
    def bytes(self) -> int:
        """Bytes of its decoded numbers, without gaps."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the decoded tensor."""
        return self._checked(self.code.decode(*(part.read() for part in self.stored)))

    def half_steps(self) -> Tensor:
        """Return half the distance between codes at each number."""
        return self._checked(self.code.half_steps(*(part.read() for part in self.stored)))

    def is_one_code(self) -> bool:
        """Tell whether all codes are one and the same, which no quantizer makes of a weight."""
        codes = self.stored[0].read().contiguous().flatten().view(torch.uint8)
        return codes.numel() > 1 and bool((codes == codes[0]).all())

    def meta(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor of this shape without content."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _checked(self, decoded: Tensor) -> Tensor:
        if decoded.numel() != prod(self.shape):
            wrong = f"{self.code.name} codes of shape {list(decoded.shape)}, not {list(self.shape)}"
            raise Malformed(wrong, "quantize it again")
        return decoded.reshape(self.shape)
