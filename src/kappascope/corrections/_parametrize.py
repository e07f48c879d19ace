"""Parametrizations that are registered and removed without a trace.

torch itself calls ``set_`` on the parameter, after which DDP never hears of its gradients again. It
lets a module share its class, in which the property is, with its copies. And it changes the order
of the module's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize


def register(module: nn.Module, attribute: str, parametrization: nn.Module) -> Callable[[], None]:
    """Parametrize a parameter, which is not touched; return how to undo it.

    A stand-in is registered and the parameter put in its place. Every module has a class of its
    own, and may be restored alone.

    >>> layer = nn.Linear(2, 2)
    >>> undo = register(layer, "weight", nn.Identity())
    >>> [name for name, _ in layer.named_parameters()]
    ['bias', 'parametrizations.weight.original']
    >>> undo()
    >>> [name for name, _ in layer.named_parameters()]
    ['weight', 'bias']
    """
    order = list(module._parameters)
    weight = module._parameters[attribute]
    assert weight is not None
    if parametrize.is_parametrized(module):
        module.__class__ = _second_class(type(module))
    module._parameters[attribute] = nn.Parameter(torch.empty_like(weight))
    parametrize.register_parametrization(module, attribute, parametrization, unsafe=True)
    cast(nn.ModuleDict, module.parametrizations)[attribute].original = weight
    kind = cast(Any, type(module))
    kind.__deepcopy__ = _with_class_of_its_own(kind.__deepcopy__)
    return lambda: _remove(module, attribute, order)


@torch.no_grad()
def _remove(module: nn.Module, attribute: str, order: list[str]) -> None:
    """Remove the parametrization; put the parameter back where it was in the module's order."""
    if not parametrize.is_parametrized(module, attribute):
        return  # somebody else has removed it
    parametrizations = cast(nn.ModuleDict, module.parametrizations)
    original = cast(nn.Parameter, parametrizations.pop(attribute).original)
    kind = type(module)
    if parametrizations:
        module.__class__ = _second_class(kind)
        delattr(type(module), attribute)
    else:
        module.__class__ = kind.__bases__[0]
        del module.parametrizations
    module.register_parameter(attribute, original)
    for name in order:
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)


def _with_class_of_its_own(deepcopy: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make a ``__deepcopy__`` give the copy a class of its own."""

    @wraps(deepcopy)
    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        replica = deepcopy(module, memo)
        if type(replica) is type(module):
            replica.__class__ = _second_class(type(module))
        return replica

    return copied


def _second_class(kind: type) -> type:
    """Make the same class a second time; Python adds two entries to every class by itself."""
    body = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, body)
