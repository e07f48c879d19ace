"""Everything that steps change, kept and put back to the bit: tensors, attributes, random states.

Tensors are restored in place, in their own memory, so that whoever else holds them sees them again
as they were.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_NOT_ENTERED = (
    type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, str, bytes, int, float,
    complex, torch.dtype, torch.device,
)  # fmt: skip
_SERVICES = ("threading", "logging", "weakref", "concurrent.futures.thread", "queue")


@contextmanager
def restored(*things: Any, closure: Callable[..., Any] | None = None) -> Iterator[None]:
    """Put back what the block changes in models, optimizers and random states, also if it raises.

    Random generators that ``closure`` refers to by name are put back, too. What else it changes is
    its own, such as the batches that it draws.
    """
    undo: list[Callable[[], object]] = [*_random_states(), *_generators(closure)]
    _keep(things, undo)
    try:
        yield
    finally:
        with torch.no_grad():
            for each in reversed(undo):
                each()


def _random_states() -> Iterator[Callable[[], object]]:
    """The global random states of torch, numpy and Python, on every device in use."""
    python, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield lambda: random.setstate(python)
    yield lambda: np.random.set_state(numbers)  # noqa: NPY002
    yield lambda: torch.set_rng_state(cpu)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(devices)
    if torch.backends.mps.is_available():
        metal = torch.mps.get_rng_state()
        yield lambda: torch.mps.set_rng_state(metal)


def _generators(closure: Callable[..., Any] | None) -> Iterator[Callable[[], object]]:
    function = getattr(closure, "func", closure)  # of a partial
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    names = inspect.getclosurevars(function)
    for value in (*names.nonlocals.values(), *names.globals.values()):
        if (undo := _generator(value)) is not None:
            yield undo


def _generator(value: Any) -> Callable[[], object] | None:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        kept = value.getstate()
        return lambda: value.setstate(kept)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    return None


def _keep(things: Iterable[Any], undo: list[Callable[[], object]]) -> None:
    """Note how to put back everything that can be reached from some things.

    A module is entered through containers alone: an attribute may be a whole trainer. What hangs on
    an optimizer is entered as deep as it goes, for an optimizer may keep its state in any object.
    """
    seen: set[int] = set()
    alive: list[Any] = []
    undo.append(alive.clear)
    waiting = deque((thing, True) for thing in things)
    while waiting:
        thing, deep = waiting.popleft()
        if thing is None or isinstance(thing, _NOT_ENTERED) or id(thing) in seen:
            continue
        seen.add(id(thing))
        alive.append(thing)  # so that no other takes its id
        inside: Iterable[Any] = ()
        if isinstance(thing, Tensor):
            undo.append(_tensor(thing))
            inside = (vars(thing),)
        elif (generator := _generator(thing)) is not None:
            undo.append(generator)
        elif isinstance(thing, dict):
            undo.append(_content(thing, dict(thing), thing.update))
            inside = (*thing.keys(), *thing.values())
        elif isinstance(thing, list | deque):
            undo.append(_content(thing, list(thing), thing.extend))
            inside = thing
        elif isinstance(thing, set):
            undo.append(_content(thing, set(thing), thing.update))
            inside = thing
        elif isinstance(thing, tuple | frozenset):
            inside = thing
        elif isinstance(thing, np.ndarray):
            undo.append(partial(np.copyto, thing, thing.copy()))
        elif isinstance(thing, nn.Module):
            inside, deep = (vars(thing),), False
        elif deep and hasattr(thing, "__dict__") and type(thing).__module__ not in _SERVICES:
            inside = (vars(thing),)
        waiting.extend((each, deep) for each in inside)


def _content(container: Any, copy: Any, refill: Callable[[Any], object]) -> Callable[[], object]:
    def put_back() -> None:
        container.clear()
        refill(copy)

    return put_back


def _tensor(tensor: Tensor) -> Callable[[], object]:
    """Note the values, the memory and the gradient of a tensor."""
    if tensor.is_meta:
        return lambda: None
    gradient = tensor.grad if tensor.is_leaf else None
    needs_gradient = tensor.requires_grad
    own = tensor.data  # the same memory, without history
    values = _distinct(own).clone()
    # a reducer may write into the memory of old gradients
    slopes = values if gradient is None else _distinct(gradient.data).clone()

    def put_back() -> None:
        if tensor.layout is not own.layout or tensor.data_ptr() != own.data_ptr():
            tensor.data = own
        _distinct(own).copy_(values)
        if tensor.is_leaf:
            tensor.requires_grad_(needs_gradient)
            tensor.grad = gradient
        if gradient is not None:
            _distinct(gradient.data).copy_(slopes)

    return put_back


def _distinct(tensor: Tensor) -> Tensor:
    """The entries that have memory of their own: an expanded tensor repeats some."""
    if tensor.layout is torch.strided:
        for dimension, stride in enumerate(tensor.stride()):
            tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and tensor.numel() else tensor
    return tensor
