"""Weights that are made of other tensors: by a parametrization, a norm, or pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

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


@torch.no_grad()
def composed(weight: Tensor, scale: Tensor, factor: str) -> Tensor | None:
    """The weight made of two halves, by shape alone None if they do not fit.

    >>> composed(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]), "_g")
    tensor([[6., 8.]])
    """
    if factor == "lora_A":
        precise = torch.promote_types(weight.dtype, torch.float32)
        is_product = weight.ndim == scale.ndim == 2 and weight.shape[1] == scale.shape[0]
        return weight.to(precise) @ scale.to(precise) if is_product else None
    if factor == "_mask":
        return weight * scale if scale.shape == weight.shape else None
    ones = [1] * weight.ndim
    lengths = {(*ones[:d], size, *ones[d + 1 :]): d for d, size in enumerate(weight.shape)}
    dim = ({(): -1} | lengths).get(tuple(scale.shape))  # one length, or one for each index of dim
    return None if dim is None else weight * (scale / torch.norm_except_dim(weight, 2, dim))
