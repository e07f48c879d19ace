"""Where factors of rows and columns are free, and where another parameter undoes them.

Scaling a row of one layer and the matching column of the next by inverse amounts changes nothing:
such pairs of factors drift together without end (a *gauge freedom*). One of each pair is enough:

- queries and keys meet in products, row by row: the keys' rows are left alone;
- what values (or an up-projection) write, the output (or down-projection) reads: its columns are
  left alone, and so are those of a layer behind another with nothing but rectifiers between;
- a norm layer with weights scales the columns of what reads it, and a batch norm undoes the rows
  of what it normalises: these are left alone;
- rows of a language model's head scale logits, which hurts: it is left alone altogether.

Roles are read off the names that are in use (:mod:`kappascope.weights.roles`), and neighbours off
``nn.Sequential``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from kappascope.weights.roles import kind, role

READERS = {"query", "key", "value", "joined", "up", "gate"}
WRITERS = {"down", "out", "writer"}
PARTNERS = {"value", "joined", "up"}  # whose rows a writer's columns would repeat
# scaling passes through these unchanged
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Flatten, nn.MaxPool2d)
MATRIX = (nn.Linear, _ConvNd)


@dataclass(frozen=True)
class Free:
    """Which sides of a weight may have factors; ``keys`` marks the keys of joined q, k and v."""

    rows: bool = True
    columns: bool = True
    keys: bool = False

    def mask(self, length: int) -> Tensor | None:
        """Which of ``length`` rows are free, if not all.

        >>> Free(keys=True).mask(6)
        tensor([ True,  True, False, False,  True,  True])
        """
        if not self.keys or length % 3:
            return None
        third = torch.arange(length) // (length // 3)
        return third != 1


def free(model: nn.Module) -> dict[str, Free]:
    """The sides left free, for every weight that is not free altogether.

    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> free(model)
    {'1.weight': Free(rows=True, columns=False, keys=False),
     '3.weight': Free(rows=True, columns=False, keys=False)}
    """
    bound: dict[str, set[str]] = {}
    for name, side in [*_heads(model), *_neighbours(model), *_by_role(model)]:
        bound.setdefault(name, set()).add(side)
    return {
        name: Free("rows" not in sides, "columns" not in sides, "keys" in sides)
        for name, sides in bound.items()
    }


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Layer paths with their weights' names."""
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim > 1:
                yield path, module, attribute


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _heads(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The layers called heads, else the last one, of those with as many outputs as tokens.

    A position's embedding has as many rows as some other layer has outputs more often than not.
    """
    tokens = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    fitting = [
        _name(path, attribute)
        for path, module, attribute in _weights(model)
        if isinstance(module, nn.Linear) and module.out_features in tokens and role(path) is None
    ]
    called = [name for name in fitting if kind(name) == "head"]
    for name in called or fitting[-1:]:
        yield from ((name, side) for side in ("rows", "columns"))


def _neighbours(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        # dropout and the like are no neighbours; a rectifier is one for norms only
        layers = [(n, m) for n, m in module.named_children() if not _is_transparent(m)]
        for (_, before), (name, after) in pairwise(layers):
            if isinstance(after, MATRIX) and _scales(before):
                yield _name(path, f"{name}.weight"), "columns"
        for (name, before), (_, after) in pairwise(layers):
            if isinstance(before, MATRIX) and isinstance(after, _BatchNorm):
                yield _name(path, f"{name}.weight"), "rows"
        linear = [(n, m) for n, m in layers if not isinstance(m, HOMOGENEOUS)]
        for (_, before), (name, after) in pairwise(linear):
            if isinstance(after, MATRIX) and isinstance(before, MATRIX):
                yield _name(path, f"{name}.weight"), "columns"


def _is_transparent(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout | nn.Identity | nn.Flatten)


def _scales(module: nn.Module) -> bool:
    """Whether a module is a norm layer with weights of its own."""
    return "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None


def _by_role(model: nn.Module) -> Iterator[tuple[str, str]]:
    modules = dict(model.named_modules())
    roles = {}
    for path, _, attribute in _weights(model):
        found = role(path if attribute == "weight" else attribute)
        if found is not None:
            roles[_name(path, attribute)] = (path, attribute, found)
    families = defaultdict(set)
    for path, attribute, what in roles.values():
        families[_family(path, attribute)].add(what)
    for name, (path, attribute, what) in roles.items():
        family = _family(path, attribute)
        around = families[family]
        if what == "key" and "query" in around:
            yield name, "rows"
        if what == "joined":
            yield name, "keys"
        if what in WRITERS and around & PARTNERS:
            yield name, "columns"
        if what in READERS and _reads_norm(modules, family):
            yield name, "columns"


def _family(path: str, attribute: str) -> str:
    """The module in which a layer stands: itself if the weight is its own and has a role."""
    return path if attribute != "weight" else path.rpartition(".")[0]


def _reads_norm(modules: dict[str, nn.Module], path: str) -> bool:
    """Whether the nearest module around that has norm layers scales with them."""
    while True:
        norms = [m for m in modules[path].children() if "Norm" in type(m).__name__]
        if norms or not path:
            return any(_scales(norm) for norm in norms)
        path = path.rpartition(".")[0]
