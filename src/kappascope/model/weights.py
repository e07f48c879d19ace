"""The weights of a model, wherever they are used, however they are made or stored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from kappascope.model.layouts import Layout, Surroundings, layout_of
from kappascope.model.matrices import Unit, plan
from kappascope.model.names import is_table
from kappascope.model.names import kind as kind_by_name
from kappascope.model.parametrized import evaluating, parametrizations
from kappascope.model.sharded import spread_like, whole
from kappascope.model.tensors import tie_key

Where: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
"""Names or patterns of weights, a test of a name, or ``None``: all that make sense."""


@dataclass(frozen=True, eq=False)
class LiveWeight:
    """One weight of a model in memory; a tied one is used in several modules."""

    uses: tuple[tuple[str, nn.Module, str], ...]  # each with its name, its module and attribute
    unit: Unit | None = None  # the matrices in it, where the model's plan has it

    @property
    def name(self) -> str:
        """The name of the weight, or the first of them."""
        return self.uses[0][0]

    @property
    def owners(self) -> tuple[tuple[nn.Module, str], ...]:
        """The modules that use it, with its attribute; once for a module of several names."""
        return tuple(dict.fromkeys((module, attribute) for _, module, attribute in self.uses))

    @property
    def parametrization(self) -> ParametrizationList | None:
        """The modules that make the weight out of other tensors, if some do now."""
        _, module, attribute = self.uses[0]
        return None if attribute in module._parameters else parametrizations(module).get(attribute)

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The parameters behind the weight, which an optimizer steps."""
        if (steps := self.parametrization) is not None:
            return tuple(p for p in steps._parameters.values() if p is not None)
        _, module, attribute = self.uses[0]
        return (cast(nn.Parameter, getattr(module, attribute)),)

    @cached_property
    @torch.no_grad()
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight as its module has it."""
        return tuple(self.read().shape)

    @cached_property
    def layout(self) -> Layout:
        """How the weight is a matrix."""
        if self.unit is not None:
            return self.unit.layout
        return layout_of(Surroundings(self.name, self.shape, owner=self.uses[0][1]))

    @property
    def kind(self) -> str:
        """One word for what the weight does."""
        return kind_by_name(self.name) if self.unit is None else self.unit.parts[0].kind

    def read(self) -> Tensor:
        """The weight that the model uses; it moves no buffer of a parametrization."""
        if (steps := self.parametrization) is None:
            return self.leaves[0]
        _, module, attribute = self.uses[0]
        with evaluating(steps):
            return cast(Tensor, getattr(module, attribute))

    @torch.no_grad()
    def matrix(self) -> Float[Tensor, "*stack out in"]:
        """The weight as a matrix, or as a stack of them; a sharded one is gathered."""
        return self.layout.matrix(whole(self.read().detach()))

    @torch.no_grad()
    def write(self, matrix: Float[Tensor, "*stack out in"]) -> None:
        """Make the model use this matrix, by the inverse of a parametrization if there is one."""
        _, module, attribute = self.uses[0]
        weight = self.layout.tensor(matrix)
        if (steps := self.parametrization) is None:
            self.leaves[0].copy_(spread_like(weight, self.leaves[0]))
            return
        dtype = self.read().dtype
        with evaluating(steps):
            setattr(module, attribute, weight.to(dtype))

    @torch.no_grad()
    def writable(self) -> bool:
        """Whether any matrix can be written: the weight is plain, or its making has an inverse."""
        if self.parametrization is None:
            return True
        layout, before = self.layout, self.matrix()
        # unlike what is there, of full rank and without zeros; neither orthogonal nor of norm one
        drawn = torch.randn(before.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        wanted = drawn.to(before) * (before.abs().amax() + 1)
        devices = {leaf.device for leaf in self.leaves if leaf.is_cuda}
        try:
            # of a copy: an inverse may keep a base in a buffer, and draw random numbers for it
            with torch.random.fork_rng(list(devices)):
                steps = copy.deepcopy(self.parametrization).eval()
                steps.right_inverse(layout.tensor(wanted))
                made = layout.matrix(steps())
            return torch.allclose(made, wanted, rtol=1e-3, atol=1e-6)
        except Exception:  # a stranger's code may raise anything; it has no inverse for us
            return False

    def add_gradient(self, gradient: Float[Tensor, "*stack out in"]) -> None:
        """Add to the gradient of the weight, through whatever makes it; what was there is kept.

        >>> layer = nn.Linear(1, 1)
        >>> layer.weight.grad = gradient = torch.ones(1, 1)
        >>> live_weights(layer)[0].add_gradient(torch.ones(1, 1))
        >>> layer.weight.grad, gradient
        (tensor([[2.]]), tensor([[1.]]))
        """
        with torch.enable_grad():
            weight = self.read()
        flow = spread_like(self.layout.tensor(gradient).to(weight.dtype), weight)
        parts: Iterable[Tensor | None] = (flow,)
        if self.parametrization is not None:
            # grad and not backward: DDP watches what backward accumulates
            parts = torch.autograd.grad(weight, self.leaves, flow, allow_unused=True)
        for leaf, part in zip(self.leaves, parts, strict=True):
            if part is not None:
                leaf.grad = part.clone() if leaf.grad is None else leaf.grad + part


# --- which weights --------------------------------------------------------------------------------


@torch.no_grad()
def live_weights(model: nn.Module) -> list[LiveWeight]:
    """Every weight of two or more dimensions, tied ones once.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [weight.name for weight in live_weights(model)]
    ['0.weight', '2.weight']
    """
    stored = [unit for unit in plan(model).units if len(unit.paths) == 1]
    units = {str(unit.paths[0][-1]): unit for unit in stored}
    weights: dict[tuple[Hashable, ...], LiveWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParametrizationList):
            continue
        for attribute in (*module._parameters, *parametrizations(module)):
            name = f"{path}.{attribute}" if path else attribute
            weight = LiveWeight(((name, module, attribute),), units.get(name))
            absent = module._parameters.get(attribute, 0) is None
            if absent or not weight.leaves or weight.read().ndim < 2:  # a made buffer has no leaf
                continue
            key = tuple(map(tie_key, weight.leaves))
            first = weights.setdefault(key, weight)
            if first is not weight:
                uses = (*first.uses, *weight.uses)
                weights[key] = LiveWeight(uses, first.unit or weight.unit)
    return list(weights.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DDP and what Lightning's Fabric has set up.

    >>> unwrapped(nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = model._modules.get("_original_module")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = cast(nn.Module, inner)


def name_test(where: Where, names: Sequence[str]) -> Callable[[str], bool]:
    """Make the test whether a name is selected; a pattern has to fit one of those there are.

    >>> [name for name in ("0.weight", "2.weight") if name_test("0.*", ["0.weight"])(name)]
    ['0.weight']
    """
    if where is None:
        return lambda name: True
    if callable(where) and not isinstance(where, nn.Module):
        return where
    several = isinstance(where, Iterable) and not isinstance(where, str)
    patterns = list(cast(Iterable[str], where)) if several else [cast(str, where)]
    if not all(isinstance(pattern, str) for pattern in patterns):
        expected = "a name or pattern, several of them, or a test of a name"
        raise TypeError(f"expected where= to be {expected}; got {type(where).__name__}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no weight is called {pattern!r}; there are {', '.join(names)}")
    return lambda name: any(fnmatchcase(name, p) for p in patterns)


_LEFT_ALONE = {
    "router": "a router chooses experts, and its scale says how sharply",
    "adapter": "an adapter is a part of a change, small by design and merged in the end",
}
_LAYERS = (nn.Linear, _ConvNd, nn.RNNBase, nn.MultiheadAttention)  # maps, whatever their names


def why_no_map(weight: LiveWeight) -> str | None:
    """Why what has the shape of a matrix is to be taken only if it is named; or None.

    >>> why_no_map(live_weights(nn.Embedding(5, 4))[0])
    'an embedding is looked up, not multiplied'
    """
    return why_not_multiplied(weight) or _LEFT_ALONE.get(weight.kind)


def why_not_multiplied(weight: LiveWeight) -> str | None:
    """Why what has the shape of a matrix is no linear map at all; or None.

    >>> why_not_multiplied(live_weights(nn.LayerNorm((2, 3)))[0])
    'a norm layer scales entry by entry'
    """
    for _, module, attribute in weight.uses:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return "an embedding is looked up, not multiplied"
        if re.search(r"(^|_)bias(_|$)", attribute):
            return "a bias is added, not multiplied"
    is_layer = any(isinstance(module, _LAYERS) for _, module, _ in weight.uses)
    if is_layer or weight.kind in _LEFT_ALONE:
        return None
    for name, module, attribute in weight.uses:
        if re.search(r"Norm(\dd)?$", type(module).__name__):
            return "a norm layer scales entry by entry"
        if kind_by_name(name) == "embedding" or is_table(attribute):
            return "a table is looked up or added, not multiplied"
    is_vector = min(weight.layout.shape[-2:]) == 1
    return "one row or column is a vector, not a map" if is_vector else None


def precise(matrix: Tensor) -> Tensor:
    """The matrix in float32 at least.

    >>> precise(torch.ones(1, 1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))
