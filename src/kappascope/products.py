"""Matrices that act only together: query and key of a head, output and value, layer after layer.

A head of attention never uses its query matrix alone. What it compares is ``x' Wq' Wk y``, and what
it writes is ``Wo Wv y``: two products, as wide as the model and of the rank of a head. Their
spectra come from the thin factors, without forming them.

- With rotary embeddings ``QK`` is what compares two tokens at equal positions; at others a rotation
  stands between the factors. With ALiBi or no positions in attention it is exact. Biases and the
  factor ``1 / sqrt(size)`` are left out.
- With grouped queries the heads of a group share key and value.

Layers that follow one another are multiplied as if nothing stood between them (:class:`Chain`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kappascope import roles, spectra
from kappascope.heads import Heads, heads
from kappascope.inventory import Read
from kappascope.matrices import Logical, Plan, Skipped, Unit

LARGEST = 2048  # a product of this size in every dimension takes seconds, of twice it a minute


@dataclass(frozen=True)
class Product:
    """The singular values of one head's product, largest first.

    ``condition_number`` is over these: infinite where float64 cannot tell the last from zero, and
    None where there are none.
    """

    name: str
    kind: str
    depth: int | None
    shape: tuple[int, int]
    values: tuple[float, ...]
    condition_number: float | None
    status: str


@dataclass(frozen=True)
class Attention:
    """The matrices of one attention layer and how they are cut into heads. It can be pickled."""

    name: str
    depth: int | None
    heads: Heads
    query: Logical
    key: Logical
    value: Logical | None
    output: Logical | None
    units: tuple[Unit, ...]

    def products(self, read: Read) -> Iterator[Product]:
        """``QK`` and then ``OV`` of every head; no more than two of the matrices are held at once.

        >>> from torch import nn
        >>> from kappascope.matrices import plan, reader
        >>> layer = nn.MultiheadAttention(4, num_heads=2)
        >>> (attention,), _ = attentions(plan(layer))
        >>> [product.name for product in attention.products(reader(layer))]
        ['attention[qk.0]', 'attention[qk.1]', 'attention[ov.0]', 'attention[ov.1]']
        """
        pair = _values(self.units, (self.query, self.key), read)
        q, k = (matrix.unflatten(0, (-1, self.heads.size)) for matrix in pair)
        yield from self._of("QK", q.mT, k)
        del pair, q, k
        if self.value is None or self.output is None:
            return
        v, o = _values(self.units, (self.value, self.output), read)
        v = v.unflatten(0, (self.heads.keys, -1))
        yield from self._of("OV", o.unflatten(1, (self.heads.queries, -1)).movedim(1, 0), v)

    def _of(self, kind: str, left: Tensor, right: Tensor) -> Iterator[Product]:
        """The product of each head, by groups that share the right factor."""
        shape = (left.shape[-2], right.shape[-1])
        for group, shared in zip(left.split(self.heads.shared), right.split(1), strict=True):
            first = len(group) * 0  # numbers within the layer are counted below
            values, floors = spectra.product_singular_values(group, shared)
            for i, (sigma, floor) in enumerate(zip(values, floors, strict=True), first):
                yield _product(self, kind, i, shape, sigma, float(floor))
