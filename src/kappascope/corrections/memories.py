"""What copies of a model remember: every process has it, so that whichever saves it saves all.

Under DDP only the process that owns a weight looks at it, and a checkpoint is saved by the first
process, from which all of them will go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kappascope.corrections.replicas import Replicas
from kappascope.corrections.treatments import State, Treatment

Path: TypeAlias = tuple[str, ...]


def share_memories(replicas: Replicas, treatments: Sequence[Treatment]) -> None:
    """Give all processes what the owner of each weight remembers of it.

    Numbers are told together. Of a tensor it is told whether it is new, and only then is it sent: a
    factorization that is used for many steps is sent once.

    >>> share_memories(Replicas(None, {}), [])  # a model with nothing to remember asks nobody
    """
    if not treatments:
        return
    forms = [_flat(t.begun | t.grown_form) for t in treatments]
    said: list[int] = []
    for t, form in zip(treatments, forms, strict=True):
        is_mine = replicas.owns(t.leaf)
        said += _numbers(t, form) if is_mine else [0] * (1 + len(form))
    told = iter(replicas.told(said, treatments[0].leaf.device))
    for t, form in zip(treatments, forms, strict=True):
        looked_at, *numbers = (next(told) for _ in range(1 + len(form)))
        by_path = dict(zip(form, numbers, strict=True))
        if not replicas.owns(t.leaf):
            known = t.begun | (t.grown_form if looked_at else {})
            t.memory = _taken(known, t.memory, by_path)
        tensors = {path: v for path, v in _flat(t.memory).items() if isinstance(v, Tensor)}
        replicas.send_owned(t.leaf, [v for path, v in tensors.items() if by_path[path]])
        t.shared = {path: (v, v._version) for path, v in tensors.items()}


def _flat(state: Mapping[str, Any], at: Path = ()) -> dict[Path, Any]:
    """A nested state by the paths of its values.

    >>> _flat({"low": 1, "warm": {"top": 2}})
    {('low',): 1, ('warm', 'top'): 2}
    """
    found: dict[Path, Any] = {}
    for key, value in state.items():
        path = (*at, key)
        found |= _flat(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def _numbers(t: Treatment, form: Mapping[Path, Any]) -> list[int]:
    """Whether the weight was looked at; then each number, or whether a tensor is new."""
    memory = _flat(t.memory)
    found = [int(t.was_looked_at)]
    for path in form:
        value = memory.get(path, 0)
        if isinstance(value, Tensor):
            last, version = t.shared.get(path, (None, 0))
            value = last is not value or version != value._version
        found.append(int(value))
    return found


def _taken(
    form: Mapping[str, Any], old: Mapping[str, Any], numbers: Mapping[Path, int], at: Path = ()
) -> State:
    """A memory of this form from what the owner told, with room for tensors that will be sent."""
    found: State = {}
    for key, value in form.items():
        path = (*at, key)
        if isinstance(value, Mapping):
            found[key] = _taken(value, old.get(key, {}), numbers, path)
        elif not isinstance(value, Tensor):
            found[key] = type(value)(numbers[path])
        else:
            found[key] = torch.empty(value.shape, dtype=value.dtype) if numbers[path] else old[key]
    return found
