"""The weights of a model, wherever they are used, however they are made or stored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from kappascope.weights.roles import kind

Where: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
"""Names or patterns of weights, a test of a name, or ``None``: all that make sense."""


@dataclass(frozen=True)
class View:
    """A weight as a matrix or a stack of them, and back.

    >>> layer = nn.Conv2d(4, 6, 3, groups=2)
    >>> View.of(layer, layer.weight).matrix(layer.weight).shape
    torch.Size([2, 3, 18])
    """

    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    @classmethod
    def of(cls, module: nn.Module, weight: Tensor) -> View:
        """How ``module`` uses ``weight``."""
        shape = tuple(weight.shape)
        if isinstance(module, _ConvNd):
            # one row a group is a stack of vectors: taken together they are a matrix
            groups = 1 if shape[0] == module.groups else module.groups
            return cls(shape, groups, module.transposed)
        is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
        # a kernel of a layer that is not torch's own is (out, in, ...), too; GPT-2 stores (in, out)
        return cls(shape, 0, is_conv1d and weight.ndim == 2)

    def matrix(self, weight: Tensor) -> Float[Tensor, "*stack out in"]:
        """The weight as ``(..., out, in)``."""
        if not self.groups:
            return weight.mT if self.transposed else weight
        grouped = weight.reshape(self.groups, -1, *self.shape[1:])
        stack = (grouped.transpose(1, 2) if self.transposed else grouped).flatten(2)
        return stack[0] if self.groups == 1 else stack

    def weight(self, matrix: Float[Tensor, "*stack out in"]) -> Tensor:
        """The matrix as the weight is stored."""
        if not self.groups:
            return matrix.mT if self.transposed else matrix
        if not self.transposed:
            return matrix.reshape(self.shape)
        inputs, outputs, *kernel = self.shape
        stack = matrix.reshape(self.groups, outputs, inputs // self.groups, *kernel)
        return stack.transpose(1, 2).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Slot:
    """One weight of a model; a tied one has several places."""

    places: tuple[tuple[str, nn.Module, str], ...]  # the name, whose it is, and as what

    @property
    def name(self) -> str:
        """Its name, or the first of them."""
        return self.places[0][0]

    @property
    def homes(self) -> tuple[tuple[nn.Module, str], ...]:
        """Whose it is and as what, once for a module that has several names."""
        return tuple(dict.fromkeys((module, attribute) for _, module, attribute in self.places))

    @property
    def makings(self) -> ParametrizationList | None:
        """What makes the weight out of other tensors, if something does."""
        _, module, attribute = self.places[0]
        if not parametrize.is_parametrized(module, attribute):
            return None
        found = cast(nn.ModuleDict, module.parametrizations)[attribute]
        return cast(ParametrizationList, found)

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The parameters behind the weight, which an optimizer steps."""
        if (makings := self.makings) is not None:
            return tuple(p for p in makings._parameters.values() if p is not None)
        _, module, attribute = self.places[0]
        return (cast(nn.Parameter, getattr(module, attribute)),)

    @property
    @torch.no_grad()
    def view(self) -> View:
        """The weight as a matrix."""
        return self._view(self.read())

    def _view(self, weight: Tensor) -> View:
        """That of a weight that was read already."""
        return View.of(self.places[0][1], weight)

    def read(self) -> Tensor:
        """The weight that the model uses; it moves no buffer of a parametrization."""
        _, module, attribute = self.places[0]
        with _evaluating(self.makings):
            return cast(Tensor, getattr(module, attribute))

    @torch.no_grad()
    def matrix(self) -> Float[Tensor, "*stack out in"]:
        """The weight's matrix."""
        weight = self.read().detach()
        return self._view(weight).matrix(weight)

    @torch.no_grad()
    def write(self, matrix: Float[Tensor, "*stack out in"]) -> None:
        """Make the model use this matrix, by the inverse of a parametrization if there is one."""
        _, module, attribute = self.places[0]
        old = self.read()
        weight = self._view(old).weight(matrix)
        if self.makings is None:
            self.leaves[0].copy_(weight)
            return
        with _evaluating(self.makings):
            setattr(module, attribute, weight.to(old.dtype))

    @torch.no_grad()
    def writable(self) -> bool:
        """Whether any matrix can be written: the weight is plain, or its making has an inverse."""
        if self.makings is None:
            return True
        view, before = self.view, self.matrix()
        # unlike what is there, of full rank and without zeros; neither orthogonal nor of norm one
        drawn = torch.randn(before.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        wanted = drawn.to(before) * (before.abs().amax() + 1)
        devices = {leaf.device for leaf in self.leaves if leaf.is_cuda}
        try:
            # of a copy: an inverse may keep a base in a buffer, and draw random numbers for it
            with torch.random.fork_rng(list(devices)):
                makings = copy.deepcopy(self.makings).eval()
                makings.right_inverse(view.weight(wanted))
                made = view.matrix(makings())
            return torch.allclose(made, wanted, rtol=1e-3, atol=1e-6)
        except Exception:  # a stranger's code may raise anything; it has no inverse for us
            return False

    def add_gradient(self, gradient: Float[Tensor, "*stack out in"]) -> None:
        """Add to the gradient of the weight, through whatever makes it."""
        with torch.enable_grad():
            weight = self.read()
        flow = self._view(weight).weight(gradient).to(weight.dtype)
        parts: Iterable[Tensor | None] = (flow,)
        if self.makings is not None:
            # grad and not backward: DDP watches what backward accumulates
            parts = torch.autograd.grad(weight, self.leaves, flow, allow_unused=True)
        for leaf, part in zip(self.leaves, parts, strict=True):
            if part is not None:
                leaf.grad = part.clone() if leaf.grad is None else leaf.grad.add_(part)


@contextmanager
def _evaluating(makings: nn.Module | None) -> Iterator[None]:
    """In training mode spectral_norm moves its vectors whenever its weight is read."""
    modules = [] if makings is None else [m for m in makings.modules() if m.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


# --- which weights --------------------------------------------------------------------------------


@torch.no_grad()
def slots(model: nn.Module) -> list[Slot]:
    """Every weight of two or more dimensions, tied ones once.

    >>> [slot.name for slot in slots(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))]
    ['0.weight', '2.weight']
    """
    found: dict[tuple[int, ...], Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParametrizationList):
            continue
        made = module.parametrizations if parametrize.is_parametrized(module) else {}
        for attribute in (*module._parameters, *cast(Mapping[str, Any], made)):
            slot = Slot(((f"{path}.{attribute}" if path else attribute, module, attribute),))
            absent = module._parameters.get(attribute, 0) is None
            if absent or not slot.leaves or slot.read().ndim < 2:  # a made buffer has no leaf
                continue
            key = tuple(id(leaf) for leaf in slot.leaves)
            first = found.setdefault(key, slot)
            if first is not slot:
                found[key] = Slot((*first.places, *slot.places))
    return list(found.values())


@dataclass(frozen=True)
class Choice:
    """The weights that a correction takes, and why it leaves the others."""

    taken: tuple[Slot, ...]
    left_out: Mapping[str, str]


def choose(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    where: Where,
    objections: Callable[[Slot], Iterator[tuple[bool, str]]],
) -> Choice:
    """The slots that ``where`` selects. What it names must be possible; by default the rest is."""
    every = slots(unwrapped(model))
    wanted = _wanted(where, every)
    taken, left_out = [], {}
    for slot in every:
        reason = "not selected"
        if slot in wanted:
            unwise = _unwise(slot) if where is None else ()
            reasons = chain(_impossible(slot, optimizers), unwise, objections(slot))
            reason = next((text for applies, text in reasons if applies), "")
            if reason and where is not None:
                told = f"{slot.name} cannot be corrected: {reason}"
                raise ValueError(f"{told}; leave it out of where=")
        if reason:
            left_out[slot.name] = reason
        else:
            taken.append(slot)
    if not taken:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"{type(model).__name__} has no weight to correct ({why or 'no matrix'})")
    return Choice(tuple(taken), left_out)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile`` and DDP.

    >>> unwrapped(nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = cast(nn.Module, inner)


def _wanted(where: Where, every: Sequence[Slot]) -> list[Slot]:
    """The slots of which a name is selected."""
    test = _test(where, [name for slot in every for name, *_ in slot.places])
    return [slot for slot in every if any(test(name) for name, *_ in slot.places)]


def _test(where: Where, names: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is selected; a pattern has to fit one of those there are."""
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


def _impossible(slot: Slot, optimizers: Sequence[Optimizer]) -> Iterator[tuple[bool, str]]:
    _, module, attribute = slot.places[0]
    leaves = slot.leaves
    behind = attribute.endswith(("_orig", "_v", "_g")) and hasattr(module, attribute[:-2])
    behind = behind or (attribute.endswith("_orig") and hasattr(module, attribute[:-5]))
    yield behind, "a hook makes the layer's weight out of it"
    yield not leaves[-1].is_floating_point(), f"its type is {leaves[-1].dtype}"
    yield not all(leaf.requires_grad for leaf in leaves), "it is frozen"
    yield leaves[-1].numel() == 0, "it is empty"
    owned = any(group(optimizer, leaves[-1]) is not None for optimizer in optimizers)
    yield not owned, "no optimizer has it"


_LAYERS = (nn.Linear, _ConvNd, nn.RNNBase, nn.MultiheadAttention)  # maps, whatever their names
# Parameters that stand alone in a model and are no embedding by their name.
_TABLES = re.compile(r"(^|_)(pos|positions?|positional)(_|$)|(^|_)tokens?$|^A_log$")


def _unwise(slot: Slot) -> Iterator[tuple[bool, str]]:
    """Why what has the shape of a matrix is no map, and taken only if it is named."""
    for _, module, attribute in slot.places:
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        yield embeds, "an embedding is looked up, not multiplied"
        yield re.search(r"(^|_)bias(_|$)", attribute) is not None, "a bias is added, not multiplied"
    if any(isinstance(module, _LAYERS) for _, module, _ in slot.places):
        return
    for name, module, attribute in slot.places:
        norm = re.search(r"Norm(\dd)?$", type(module).__name__) is not None
        yield norm, "a norm layer scales entry by entry"
        table = kind(name) == "embedding" or _TABLES.search(attribute) is not None
        yield table, "a table is looked up or added, not multiplied"
    yield min(slot.matrix().shape[-2:]) == 1, "one row or column is a vector, not a map"


def group(optimizer: Optimizer, leaf: Tensor) -> int | None:
    """Index of the parameter group that holds ``leaf``.

    >>> layer = nn.Linear(2, 2)
    >>> group(torch.optim.SGD([{"params": layer.bias}, {"params": layer.weight}]), layer.weight)
    1
    """
    groups = enumerate(optimizer.param_groups)
    return next((i for i, group in groups if id(leaf) in map(id, group["params"])), None)


def precise(matrix: Tensor) -> Tensor:
    """The matrix in float32 at least.

    >>> precise(torch.ones(1, 1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))
