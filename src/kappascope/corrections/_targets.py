"""Which spectrum is wanted of a weight: the ``target`` of a correction, understood and checked.

A number bounds kappa, a state dict gives the spectra of its weights, a tensor has the singular
values, and a function is asked for them once, with the weight as it is when attached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from textwrap import shorten
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from kappascope.matrix import spectra
from kappascope.model.weights import LiveWeight, precise

Target: TypeAlias = float | Tensor | Mapping[str, Tensor] | Callable[[Tensor], Tensor] | None


def understood_target(target: object) -> Target:
    """Check a target, and turn whatever stands for a number into a number.

    >>> understood_target(torch.tensor(2)), understood_target(None)
    (2.0, None)
    """
    if isinstance(target, Real):
        return float(target)
    if isinstance(target, Tensor) and target.ndim == 0:
        return float(target.item())
    if isinstance(target, Tensor):
        return _descending(target)
    function = callable(target) and not isinstance(target, nn.Module)  # which has a state dict
    if target is None or isinstance(target, Mapping) or function:
        return cast(Target, target)
    expected = "a number, a tensor of singular values, a state dict or a function of a weight"
    raise TypeError(f"expected the target to be {expected}; got {target!r}")


def _descending(values: Any) -> Tensor:
    """Check singular values that somebody gave, in a tensor or in what makes one."""
    try:
        spectrum = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "a tensor of singular values from the target's function"
        raise TypeError(f"expected {expected}; got {type(values).__name__}") from error
    several = spectrum.ndim > 0 and spectrum.shape[-1] > 0 and not spectrum.is_complex()
    if not (several and spectrum.isfinite().all() and (spectrum.diff(dim=-1) <= 0).all()):
        expected = "the target's singular values to be finite numbers, the largest first"
        raise ValueError(f"expected {expected}; got {shorten(repr(values), 80)}")
    return spectrum


def target_values(target: Target, weight: LiveWeight) -> Tensor | None:
    """Singular values wanted of a model's weight, or ``None`` if the target is not about them.

    >>> from kappascope.model.weights import live_weights
    >>> (weight,) = live_weights(nn.Linear(2, 2))
    >>> target_values({"weight": torch.eye(2)}, weight).tolist(), target_values(2.0, weight)
    ([1.0, 1.0], None)
    """
    if isinstance(target, Mapping):
        names = [name for name, *_ in weight.uses if name in target]
        if not names:
            raise ValueError(f"the target has no {weight.name}; it has {', '.join(target)}")
        return _descending(spectra.singular_values(weight.layout.matrix(target[names[0]])))
    if target is None or isinstance(target, float):
        return None
    matrix = precise(weight.matrix())
    values = target_values_of_matrix(target, matrix)
    if values is not None and values.shape[:-1] not in ((), matrix.shape[:-2]):
        came = f"{weight.name} of shape {tuple(matrix.shape)}; got {tuple(values.shape)}"
        raise ValueError(f"expected the target to fit {came}; choose by where=")
    return values


def target_values_of_matrix(target: Target, matrix: Tensor) -> Tensor | None:
    """Singular values wanted of a matrix that has no name, as in the pure forms.

    >>> target_values_of_matrix(torch.tensor([2.0, 1.0]), torch.eye(2))
    tensor([2., 1.])
    """
    if isinstance(target, Mapping):
        raise ValueError("a state dict needs names of weights; attach, or pass a function")
    if callable(target):
        return _descending(target(matrix.detach())).to(matrix.device)
    return target if isinstance(target, Tensor) else None
