"""Weights that are made of other tensors: by a parametrization, a norm, or pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from kappascope.weights.reasons import Harmless


def tensors(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor, str | None]]:
    """Parameters and buffers with their names, and why the latter are no weights.

    >>> [(name, reason) for name, _, reason in tensors(nn.Linear(2, 2))]
    [('weight', None), ('bias', None)]
    """
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, None
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, Harmless("a buffer, not a parameter")


def makings(owner: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor], list[str]]]:
    """Each weight that ``owner`` makes: its name, how to read it without a trace, and of what.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> [(name, keys) for name, _, keys in makings(layer)]
    [('weight', ['parametrizations.weight.original0', 'parametrizations.weight.original1'])]
    """
    # Not getattr: a compiled module passes off its content's parametrizations as its own.
    parametrized = dict(owner.named_children()).get("parametrizations", nn.Module())
    for name, steps in parametrized.named_children():
        if isinstance(steps, ParametrizationList):
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
def attempt(make: Callable[[], Tensor]) -> tuple[Tensor | None, str | None]:
    """What ``make`` makes, or why it cannot.

    >>> attempt(lambda: torch.ones(2, 3) @ torch.ones(2))[1][:34]
    'could not be made: size mismatch, '
    """
    try:
        return make(), None
    except Exception as error:  # a stranger's code may raise anything; the rest is still read
        return None, f"could not be made: {error}"


@torch.no_grad()
def composed(weight: Tensor, scale: Tensor, factor: str) -> Tensor | None:
    """The weight made of two halves, by shape alone None if they do not fit.

    >>> composed(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]]), "_g")
    tensor([[6., 8.]])
    """
    if factor == "_mask":
        return weight * scale if scale.shape == weight.shape else None
    ones = [1] * weight.ndim
    lengths = {(*ones[:d], size, *ones[d + 1 :]): d for d, size in enumerate(weight.shape)}
    dim = ({(): -1} | lengths).get(tuple(scale.shape))  # one length, or one for each index of dim
    return None if dim is None else weight * (scale / torch.norm_except_dim(weight, 2, dim))
