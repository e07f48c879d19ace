"""Whether a saved state is one of what is attached here, told before any of it is taken up.

A form says what is expected: a dictionary has these keys, a tensor this shape and type (and, if it
has integers, none beyond those of the form), ``0`` and ``False`` stand for a count and a flag, and
``0.0`` for a count that an optimizer keeps in a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from kappascope.model.sharded import own_shard

ADVICE = "load the state of a correction that was attached alike, to a model of the same shapes"


def refuse(name: str, expected: str, came: str) -> NoReturn:
    """Refuse a state because of one thing in it.

    >>> refuse("the number of steps", "a whole number", "a str")
    Traceback (most recent call last):
    ValueError: expected the number of steps to be a whole number, got a str; load the state ...
    """
    raise ValueError(f"expected {name} to be {expected}, got {came}; {ADVICE}")


def check_form(name: str, value: Any, form: Any, optional: Iterable[str] = ()) -> None:
    """Refuse a value that is not of this form; ``optional`` keys are all there, or none is.

    >>> check_form("the memory", {"norm": torch.ones(2)}, {"norm": torch.ones(3)})
    Traceback (most recent call last):
    ValueError: expected the memory['norm'] to be a tensor of shape (3,) and type torch.float32, ...
    """
    if isinstance(form, Mapping):
        _check_keys(name, value, form, frozenset(optional))
        for key, inner in value.items():
            check_form(f"{name}[{key!r}]", inner, form[key])
    elif isinstance(form, Tensor):
        _check_tensor(name, value, form)
    elif isinstance(form, float):
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            refuse(name, "a count in a tensor", described(value))
        _check_tensor(name, value, torch.empty((), dtype=value.dtype, device="meta"))
        if float(value) < 0:
            refuse(name, "at least 0", str(float(value)))
    elif type(value) is not type(form) or value < 0:
        kind = "True or False" if isinstance(form, bool) else "a whole number, at least 0"
        refuse(name, kind, described(value))


def _check_keys(name: str, value: Any, form: Mapping[Any, Any], optional: frozenset[str]) -> None:
    if not isinstance(value, dict):
        refuse(name, f"a dictionary with {_listed(form)}", described(value))
    if value.keys() not in (form.keys(), form.keys() - optional):
        missing, unexpected = form.keys() - optional - value.keys(), value.keys() - form.keys()
        if not missing and not unexpected:
            missing = form.keys() - value.keys()
        differences = (("without", missing), ("with", unexpected))
        came = " and ".join(f"one {word} {_listed(keys)}" for word, keys in differences if keys)
        refuse(name, f"a dictionary with {_listed(form)}", came)


def _check_tensor(name: str, value: Any, form: Tensor) -> None:
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    expected = f"a tensor of shape {tuple(form.shape)} and type {form.dtype}"
    if not is_dense or (value.shape, value.dtype) != (form.shape, form.dtype):
        refuse(name, expected, described(value))
    if not torch.isfinite(own_shard(value)).all():
        refuse(name, "finite", "a tensor with entries that are not")
    if not (form.is_floating_point() or form.is_meta) and form.numel():
        low, high = int(form.min()), int(form.max())
        if int(value.min()) < low or int(value.max()) > high:
            refuse(name, f"from {low} to {high}", f"{int(value.min())} to {int(value.max())}")


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, keys))[:6]) or "nothing in it"


def described(value: Any) -> str:
    """What came, in a few words on one line.

    >>> described([1, 2]), described(torch.ones(2))
    ('a list of 2', 'a tensor of shape (2,) and type torch.float32')
    """
    if isinstance(value, Tensor):
        device = " on the meta device" if value.is_meta else ""
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}{device}"
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if type(value) in (bool, int, float) else f"a {type(value).__name__}"


def placeholder(form: Any) -> Any:
    """A value of this form, which holds a place: zeros, or what the form itself has.

    >>> placeholder({"top": torch.empty(2, device="meta"), "calls": 0})
    {'top': tensor([0., 0.]), 'calls': 0}
    """
    if isinstance(form, Mapping):
        return {key: placeholder(inner) for key, inner in form.items()}
    if isinstance(form, Tensor):
        return torch.zeros(form.shape, dtype=form.dtype) if form.is_meta else form.clone()
    return form


def copied(value: Any) -> Any:
    """Copy a state, nested or not, into tensors of its own, which training does not change.

    >>> copied({"rows": torch.ones(1).expand(3)})["rows"].stride()
    (1,)
    """
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value
