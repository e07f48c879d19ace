"""Which matrices of a model are watched, and how to read them without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from kappascope.model.attention import Attention, attention
from kappascope.model.matrices import Logical, Plan, Unit, plan
from kappascope.model.sharded import is_sharded
from kappascope.model.tensors import Path, reader, stripped
from kappascope.model.weights import Where, live_weights, name_test, unwrapped, why_no_map
from kappascope.text import first_few

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Item:
    """A piece of work: a stored weight with the matrices wanted of it, or a layer's products."""

    wanted: tuple[Logical, ...]
    unit: Unit | None = None
    layer: Attention | None = None

    @property
    def name(self) -> str:
        """The stored weight, or the layer whose products these are."""
        if self.unit is not None:
            return self.unit.parts[0].name
        assert self.layer is not None
        return f"{self.layer.name}[products]"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the tensors lie that it needs."""
        if self.unit is not None:
            return self.unit.paths
        assert self.layer is not None
        return tuple(path for unit in self.layer.units for path in unit.paths)


@dataclass(frozen=True, eq=False)
class Survey:
    """The watched matrices of a model as it is now, and its parameters by plain names."""

    model: nn.Module
    items: tuple[Item, ...]
    skipped: Mapping[str, str]
    parameters: Mapping[str, nn.Parameter]  # each once, whatever its dimension
    signature: tuple[Any, ...]

    @cached_property
    def by_key(self) -> dict[str, nn.Parameter]:
        """The parameters by the names that the model has for them, tied ones by all."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def parameter(self, item: Item) -> nn.Parameter | None:
        """The parameter that is the weight of an item itself, if one is."""
        if item.unit is None or len(item.unit.paths) != 1:
            return None
        return self.by_key.get(str(item.unit.paths[0][-1]))

    def leaves(self, item: Item) -> list[nn.Parameter]:
        """The parameters on which an item depends, as far as their names tell."""
        keys = [str(path[-1]) for path in item.paths]
        direct = [self.by_key[key] for key in keys if key in self.by_key]
        if direct:
            return direct
        owners = [key.rpartition(".")[0] for key in keys]  # made of other tensors: its module's
        return [p for key, p in self.by_key.items() if any(key.startswith(o) for o in owners)]

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the record tells of each matrix."""
        facts: dict[str, dict[str, Any]] = {}
        for item in self.items:
            for logical in item.wanted:
                facts[logical.name] = {
                    "kind": logical.kind,
                    "depth": logical.depth,
                    "shape": list(logical.shape),
                    "dtype": str(logical.dtype).removeprefix("torch."),
                }
        return facts


def signature(model: nn.Module) -> tuple[Any, ...]:
    """What changes when a layer is added, removed, resized, replaced, frozen or thawed."""
    return tuple(
        (name, id(p), p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()
    )


@torch.no_grad()
def watched(model: nn.Module, where: Where = None, exclude: Where = None) -> Survey:
    """Choose the matrices of a model to watch, with the reasons why others are not.

    ``where`` and ``exclude`` are names, patterns or tests of names, as for corrections. By default
    every matrix is watched that is a map: no embedding, table or norm.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    >>> found = watched(model)
    >>> [logical.name for item in found.items for logical in item.wanted], dict(found.skipped)
    (['1.weight'], {'1.bias': 'one-dimensional', '0.weight': 'an embedding is looked up, ...'})
    """
    model = unwrapped(model)
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        advice = "pass a batch through the model before the monitor is attached"
        raise ValueError(f"{first_few(lazy)}: a lazy layer has no weights yet; {advice}")
    whole_plan = _plan(model)
    names = [part.name for unit in whole_plan.units for part in unit.parts]
    layers, headless = attention(whole_plan)
    products = [f"{layer.name}[{kind}]" for layer in layers for kind in ("qk", "ov")]
    is_wanted = name_test(where, [*names, *products])
    is_excluded = name_test(exclude, [*names, *products]) if exclude is not None else None
    no_maps = {} if where is not None else _no_maps(model)
    skipped = {each.name: str(each.reason) for each in (*whole_plan.skipped, *headless)}
    items: list[Item] = []
    chosen: set[str] = set()
    for unit in whole_plan.units:
        whole = unit.parts[0].name
        if reason := no_maps.get(whole) or no_maps.get(whole.removesuffix(".weight")):
            skipped[whole] = reason
            continue
        parts = [
            part
            for part in unit.parts[1:] or unit.parts  # the matrices in it, not them all at once
            if is_wanted(part.name) or is_wanted(whole)
        ]
        if is_excluded is not None:
            parts = [p for p in parts if not (is_excluded(p.name) or is_excluded(whole))]
        if not parts:
            skipped[whole] = "not selected"
            continue
        chosen |= {part.name for part in parts}
        items.append(Item(tuple(parts), unit=unit))
    for layer in layers:
        wanted = [
            product
            for product in _products(layer, chosen)
            if is_excluded is None or not is_excluded(product.name)
        ]
        if wanted:
            items.append(Item(tuple(wanted), layer=layer))
    parameters = {stripped(name): p for name, p in model.named_parameters()}
    return Survey(model, tuple(items), skipped, parameters, signature(model))


def _plan(model: nn.Module) -> Plan:
    """Plan the matrices of a model; sharded tensors are known by name and whole shape alone."""
    if not any(is_sharded(p) for p in model.parameters()):
        return plan(model)
    blanks = {
        name: torch.empty(p.shape, dtype=p.dtype, device="meta")
        for name, p in model.named_parameters()
    }
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    return plan(blanks, to_dict())


def _no_maps(model: nn.Module) -> dict[str, str]:
    """The weights that are no maps, by every plain name they have, and why."""
    reasons: dict[str, str] = {}
    for weight in live_weights(model):
        if (reason := why_no_map(weight)) is not None:
            reasons |= {stripped(name): reason for name, *_ in weight.uses}
    return reasons


def _products(layer: Attention, chosen: set[str]) -> Iterator[Logical]:
    """The products of a layer's heads whose factors are watched, as far as is known beforehand."""
    pairs = (("qk", layer.key, layer.query), ("ov", layer.output, layer.value))
    for label, left, right in pairs:
        if left is None or right is None or not {left.name, right.name} <= chosen:
            continue
        width = (layer.query.shape[1], layer.key.shape[1])
        if label == "ov":
            width = (left.shape[0], right.shape[1])
        for head in range(layer.heads.queries):
            name = f"{layer.name}[{label}.{head}]"
            yield Logical(name, width, left.dtype, label.upper(), layer.depth, layer.name)


# --- optimizers -----------------------------------------------------------------------------------


def stepped_parameters(optimizers: Sequence[Optimizer]) -> dict[int, tuple[int, int]]:
    """The numbers of optimizer and group that step each parameter, by its id; the first count."""
    owners: dict[int, tuple[int, int]] = {}
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                owners.setdefault(id(parameter), (k, g))
    return owners


def stepped_twice(survey: Survey, optimizers: Sequence[Optimizer]) -> list[str]:
    """The names of parameters that more than one optimizer or group steps."""
    names = {id(p): name for name, p in survey.parameters.items()}
    seen: set[int] = set()
    twice: list[str] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in seen and id(parameter) in names:
                    twice.append(names[id(parameter)])
                seen.add(id(parameter))
    return twice


@torch.no_grad()
def masters(survey: Survey, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The copies of parameters that an optimizer steps in their place, in more digits.

    Such a copy has the shape of a parameter that nobody steps, and its values when rounded.
    """
    owners = stepped_parameters(optimizers)
    ours = {id(p) for p in survey.parameters.values()}
    copies = [
        p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in ours
    ]
    result: dict[str, Tensor] = {}
    for name, p in survey.parameters.items() if copies else ():
        if id(p) in owners or p.dtype.itemsize > 2:
            continue
        for copy in copies:
            if copy.shape == p.shape and torch.equal(copy.detach().to(p), p.detach()):
                result[name] = copy
                break
    return result


# --- reading --------------------------------------------------------------------------------------


def on_host(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Copy tensors to the memory of the host, and wait for each device once.

    Those that are there already are not copied.
    """
    devices = {t.device for t in tensors.values() if t.device.type != "cpu"}
    copies = {path: t.detach().to("cpu", non_blocking=True) for path, t in tensors.items()}
    for device in devices:
        torch.accelerator.synchronize(device)
    return copies


def weights_of(survey: Survey, items: Sequence[Item]) -> dict[Path, Tensor]:
    """The tensors that some items need, as the model uses them, where they are."""
    read = reader(survey.model)
    tensors: dict[Path, Tensor] = {}
    for item in items:
        for path in item.paths:
            if path not in tensors:
                key = str(path[-1])
                direct = survey.by_key.get(key)
                tensors[path] = direct.detach() if direct is not None else read(path)
    return tensors
