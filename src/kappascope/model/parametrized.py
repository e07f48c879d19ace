"""Weights that are made of other tensors: by a parametrization, a norm, pruning, or factors.

A module makes them itself (:func:`made_weights`). Of what is stored, :func:`composed` makes those
of weight normalization, pruning and LoRA, and :func:`factored` those of an attached correction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from kappascope.model.layouts import Layout, Shape
from kappascope.model.skipped import Reason, no_weight, unreadable


def tensors(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor, Reason | None]]:
    """Parameters and buffers with their names, and why the latter are no weights.

    >>> [(name, reason) for name, _, reason in tensors(nn.Linear(2, 2))]
    [('weight', None), ('bias', None)]
    """
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, None
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, no_weight("a buffer, not a parameter")


def parametrizations(module: nn.Module) -> dict[str, ParametrizationList]:
    """The parametrized weights of a module, each with the modules that make it.

    >>> list(parametrizations(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
    ['weight']
    """
    # not getattr: a compiled module passes off its content's parametrizations as its own
    children = module._modules.get("parametrizations")
    pairs = {} if children is None else children._modules
    return {name: steps for name, steps in pairs.items() if isinstance(steps, ParametrizationList)}


@contextmanager
def evaluating(steps: nn.Module | None) -> Iterator[None]:
    """Read a weight without a trace: in training mode spectral_norm moves its vectors each time.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    >>> with evaluating(layer.parametrizations):
    ...     layer.parametrizations.training
    False
    """
    modules = [] if steps is None else [m for m in steps.modules() if m.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def made_weights(owner: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor], list[str]]]:
    """Each weight that ``owner`` makes: its name, how to read it without a trace, and of what.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> [(name, keys) for name, _, keys in made_weights(layer)]
    [('weight', ['parametrizations.weight.original0', 'parametrizations.weight.original1'])]
    """
    for name, steps in parametrizations(owner).items():
        keys = [f"parametrizations.{name}.{key}" for key, *_ in tensors(steps, recurse=False)]
        yield name, partial(_evaluated, steps), keys
    for hook in owner._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            make = partial(hook.compute_weight, owner, do_power_iteration=False)
            yield hook.name, make, [f"{hook.name}_{end}" for end in ("orig", "u", "v")]


def _evaluated(steps: ParametrizationList) -> Tensor:
    # A copy, for in training mode spectral_norm moves its vectors and a dropout draws numbers.
    devices = {tensor.device for _, tensor, _ in tensors(steps) if tensor.is_cuda}
    with torch.random.fork_rng(list(devices)):
        weight: Tensor = copy.deepcopy(steps).eval()()
    return weight


@torch.no_grad()
def attempt(make: Callable[[], Tensor]) -> tuple[Tensor | None, Reason | None]:
    """What ``make`` makes, or why it cannot.

    >>> attempt(lambda: torch.ones(2, 3) @ torch.ones(2))[1]
    'could not be made: size mismatch, ...'
    """
    try:
        return make(), None
    except Exception as error:  # a stranger's code may raise anything; the rest is still read
        return None, unreadable(f"could not be made: {error}")


# --- made of what is stored -----------------------------------------------------------------------


@torch.no_grad()
def composed(weight: Tensor, other: Tensor, how: str) -> Tensor | None:
    """The weight that is made of two tensors; None if their shapes do not fit.

    ``how`` is what the name of the second ends with: ``_g`` are lengths of the first, ``_mask`` its
    pruning, and ``lora_A`` the factor to its right.

    >>> composed(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]), "_g")
    tensor([[6., 8.]])
    """
    if how == "lora_A":
        dtype = torch.promote_types(weight.dtype, torch.float32)
        is_product = weight.ndim == other.ndim == 2 and weight.shape[1] == other.shape[0]
        return weight.to(dtype) @ other.to(dtype) if is_product else None
    if how == "_mask":
        return weight * other if other.shape == weight.shape else None
    ones = [1] * weight.ndim
    lengths = {(*ones[:d], size, *ones[d + 1 :]): d for d, size in enumerate(weight.shape)}
    dim = ({(): -1} | lengths).get(tuple(other.shape))  # one length, or one for each index of dim
    return None if dim is None else weight * (other / torch.norm_except_dim(weight, 2, dim))


def factor_layout(weight: Shape, factors: Mapping[str, Shape]) -> Layout | None:
    """How a weight is a matrix (..., out, in) that factors of these shapes fit; None if in no way.

    >>> factor_layout((6, 4, 3), {"rows": (6,)}).shape
    (6, 12)
    """
    layouts = [Layout.plain(weight), Layout.kernel(weight)]
    if len(weight) == 2:
        layouts.append(Layout.transposed(weight))
    for layout in layouts:
        *stack, rows, columns = layout.shape
        shorter = min(rows, columns)
        allowed: dict[str, set[Shape]] = {
            "rows": {(*stack, rows), (*stack, 1)},  # or one factor for all
            "columns": {(*stack, columns)},
            "values": {(*stack, shorter)},
            "basis": {(*stack, shorter, shorter)},
            "age": {()},
        }
        if all(shape in allowed[what] for what, shape in factors.items()):
            return layout
    return None


@torch.no_grad()
def factored(weight: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
    """The weight times factors of its rows, columns or singular values, computed in float64.

    >>> factored(torch.ones(2, 2), {"rows": torch.tensor([1.0, 2.0])})
    tensor([[1., 1.],
            [2., 2.]])
    """
    shapes = {what: tuple(values.shape) for what, values in factors.items()}
    layout = factor_layout(tuple(weight.shape), shapes) or Layout.plain(tuple(weight.shape))
    matrix, precise = layout.matrix(weight.double()), {k: v.double() for k, v in factors.items()}
    if "basis" in precise:  # of the shorter side, in which singular values are stretched
        basis, tall = precise["basis"], matrix.shape[-2] > matrix.shape[-1]
        wide = matrix.mT if tall else matrix
        wide = wide + basis @ ((precise["values"] - 1)[..., None] * (basis.mT @ wide))
        matrix = wide.mT if tall else wide
    if "rows" in precise:
        matrix = precise["rows"][..., None] * matrix
    if "columns" in precise:
        matrix = matrix * precise["columns"][..., None, :]
    return layout.tensor(matrix).to(weight.dtype)
