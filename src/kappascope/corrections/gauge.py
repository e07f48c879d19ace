"""Where factors of rows and columns are free, and where another parameter undoes them.

Scaling a row of one layer and the matching column of the next by inverse amounts changes nothing:
such pairs of factors drift together without end (a *gauge freedom*). One of each pair is enough:

- queries and keys meet in products, row by row: the keys' rows are left alone;
- what values (or an up-projection) write, the output (or down-projection) reads: its columns are
  left alone, and so are those of a layer behind another with nothing but rectifiers between;
- a norm layer with weights scales the columns of what reads it, and a batch norm undoes the rows
  of what it normalises: these are left alone;
- rows of a language model's head scale logits, which hurts: it is left alone altogether.

Roles are read off the names that are in use (:mod:`kappascope.model.names`), and neighbours off
``nn.Sequential``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from kappascope.model.names import kind, role

READERS = {"query", "key", "value", "joined", "up", "gate"}
WRITERS = {"down", "out", "writer"}
PARTNERS = {"value", "joined", "up"}  # whose rows a writer's columns would repeat
# scaling passes through these unchanged
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Flatten, nn.MaxPool2d)
TRANSPARENT = (nn.Dropout, nn.Identity, nn.Flatten)
MATRIX = (nn.Linear, _ConvNd)

Modules: TypeAlias = Mapping[str, nn.Module]
Weights: TypeAlias = Sequence[tuple[str, str]]  # path of the module, and attribute


@dataclass(frozen=True)
class FreeSides:
    """Which sides of a weight may have factors; ``keys`` marks the keys of joined q, k and v."""

    rows: bool = True
    columns: bool = True
    keys: bool = False

    def mask(self, length: int) -> Tensor | None:
        """Which of ``length`` rows are free, if not all.

        >>> FreeSides(keys=True).mask(6)
        tensor([ True,  True, False, False,  True,  True])
        """
        if not self.keys or length % 3:
            return None
        third = torch.arange(length) // (length // 3)
        return third != 1


def free_sides(model: nn.Module) -> dict[str, FreeSides]:
    """The sides left free, for every weight that is not free altogether.

    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> free_sides(model)
    {'1.weight': FreeSides(rows=True, columns=False, keys=False),
     '3.weight': FreeSides(rows=True, columns=False, keys=False)}
    """
    modules = dict(model.named_modules())
    weights = [
        (path, attribute)
        for path, module in modules.items()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim > 1
    ]
    bound: dict[str, set[str]] = {}
    for sides in (_heads(modules, weights), _neighbours(modules), _by_role(modules, weights)):
        for name, side in sides:
            bound.setdefault(name, set()).add(side)
    return {
        name: FreeSides("rows" not in sides, "columns" not in sides, "keys" in sides)
        for name, sides in bound.items()
    }


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _heads(modules: Modules, weights: Weights) -> Iterator[tuple[str, str]]:
    """The layers called heads, else the last one, of those with as many outputs as tokens.

    A position's embedding has as many rows as some other layer has outputs more often than not.
    """
    tokens = {m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
    fitting = []
    for path, attribute in weights:
        layer = modules[path]
        if isinstance(layer, nn.Linear) and layer.out_features in tokens and role(path) is None:
            fitting.append(_name(path, attribute))
    called = [name for name in fitting if kind(name) == "head"]
    for name in called or fitting[-1:]:
        yield from ((name, side) for side in ("rows", "columns"))


def _neighbours(modules: Modules) -> Iterator[tuple[str, str]]:
    """Sides that a neighbour in an ``nn.Sequential`` undoes."""
    for path, module in modules.items():
        if not isinstance(module, nn.Sequential):
            continue
        # dropout and the like are no neighbours; a rectifier is one for norms only
        layers = [(n, m) for n, m in module.named_children() if not isinstance(m, TRANSPARENT)]
        for (_, before), (name, after) in pairwise(layers):
            if isinstance(after, MATRIX) and _is_scaling_norm(before):
                yield _name(path, f"{name}.weight"), "columns"
        for (name, before), (_, after) in pairwise(layers):
            if isinstance(before, MATRIX) and isinstance(after, _BatchNorm):
                yield _name(path, f"{name}.weight"), "rows"
        linear = [(n, m) for n, m in layers if not isinstance(m, HOMOGENEOUS)]
        for (_, before), (name, after) in pairwise(linear):
            if isinstance(after, MATRIX) and isinstance(before, MATRIX):
                yield _name(path, f"{name}.weight"), "columns"


def _is_scaling_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer with weights of its own."""
    return "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None


def _by_role(modules: Modules, weights: Weights) -> Iterator[tuple[str, str]]:
    """Sides that another weight of the same attention or perceptron undoes."""
    roles: dict[str, tuple[str, str]] = {}  # of each weight: the block it is in, and its role
    blocks = defaultdict(set)
    for path, attribute in weights:
        # a weight that has a role by its own name is in the module that holds it
        is_layer = attribute == "weight"
        block = path.rpartition(".")[0] if is_layer else path
        if (its_role := role(path if is_layer else attribute)) is not None:
            roles[_name(path, attribute)] = (block, its_role)
            blocks[block].add(its_role)
    for name, (block, its_role) in roles.items():
        if its_role == "key" and "query" in blocks[block]:
            yield name, "rows"
        if its_role == "joined":
            yield name, "keys"
        if its_role in WRITERS and blocks[block] & PARTNERS:
            yield name, "columns"
        if its_role in READERS and _reads_norm(modules, block):
            yield name, "columns"


def _reads_norm(modules: Modules, path: str) -> bool:
    """Whether the nearest module around that has norm layers scales with them."""
    while True:
        norms = [m for m in modules[path].children() if "Norm" in type(m).__name__]
        if norms or not path:
            return any(_is_scaling_norm(norm) for norm in norms)
        path = path.rpartition(".")[0]
