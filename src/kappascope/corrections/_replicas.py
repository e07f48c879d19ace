"""Processes that train one model, in copies (DDP) or shards (FSDP2): one computes, all use it.

A factorization, a product of matrices or a long sum has other last bits with another number of
threads or another processor, and copies that decompose for themselves drift apart. Every matrix
has a process that computes what depends on it, and broadcasts the result. What it remembers of the
matrix goes to all of them too: a checkpoint is saved by the first process, and all go on from it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kappascope.corrections._treatments import State, Treatment
from kappascope.model.sharded import is_sharded


@dataclass(frozen=True, eq=False)
class Replicas:
    """The processes that hold copies of one model, and which of them owns which parameter.

    >>> Replicas.of([nn.Parameter(torch.ones(2, 2))]) is None
    True
    """

    group: dist.ProcessGroup
    owners: dict[int, int]  # ranks by the ids of parameters

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> Replicas | None:
        """The processes over which the parameters are spread, or of the DDP that wraps them."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        for p in filter(is_sharded, parameters):
            group = cast(Any, p).device_mesh.get_group()
            return cls(group, _divided(parameters, dist.get_world_size(group)))
        wanted = {id(p) for p in parameters}
        for ddp in gc.get_objects():  # a module does not know who wraps it; asked for once
            if issubclass(type(ddp), DistributedDataParallel) and any(
                id(p) in wanted for p in ddp.parameters()
            ):
                size = dist.get_world_size(ddp.process_group)
                return cls(ddp.process_group, _divided(parameters, size)) if size > 1 else None
        return None

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this process computes what depends on a parameter."""
        return self.owners[id(parameter)] == dist.get_rank(self.group)

    def send(self, tensors: Iterable[Tensor], owner: int = 0) -> None:
        """Overwrite tensors by those of their owner; other shapes or types would be a mistake."""
        source = dist.get_global_rank(self.group, owner)
        for tensor in tensors:
            whole = tensor.detach().flatten().clone(memory_format=torch.contiguous_format)
            # as bytes: not every type is known to every way of communication
            dist.broadcast(whole.view(torch.uint8), source, group=self.group)
            tensor.copy_(whole.view(tensor.shape))

    def send_owned(self, parameter: nn.Parameter, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the process that owns a parameter."""
        self.send(tensors, self.owners[id(parameter)])

    def all_agree(self, flags: Tensor) -> Tensor:
        """Which flags all processes have; they see the same copies, or shards of their own."""
        agreed = flags.to(torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self.group)
        return agreed.bool()

    def owners_answers(self, answers: Sequence[int], device: torch.device) -> list[int]:
        """What the owner of each question says, where all others say 0."""
        flags = torch.tensor(answers, dtype=torch.int64, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return flags.tolist()


def _divided(parameters: Sequence[nn.Parameter], size: int) -> dict[int, int]:
    """Owners of parameters: the largest first, each to whom has least to do."""
    load, owners = [0] * size, {}
    for p in sorted({id(p): p for p in parameters}.values(), key=lambda p: -p.numel()):
        owners[id(p)] = least = load.index(min(load))
        load[least] += p.numel()
    return owners


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
    own: list[int] = []
    for t, form in zip(treatments, forms, strict=True):
        is_mine = replicas.owns(t.leaf)
        own += _numbers(t, form) if is_mine else [0] * (1 + len(form))
    answers = iter(replicas.owners_answers(own, treatments[0].leaf.device))
    for t, form in zip(treatments, forms, strict=True):
        looked_at, *numbers = (next(answers) for _ in range(1 + len(form)))
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
    flat: dict[Path, Any] = {}
    for key, value in state.items():
        path = (*at, key)
        flat |= _flat(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def _numbers(t: Treatment, form: Mapping[Path, Any]) -> list[int]:
    """Whether the weight was looked at; then each number, or whether a tensor is new."""
    memory = _flat(t.memory)
    numbers = [int(t.was_looked_at)]
    for path in form:
        value = memory.get(path, 0)
        if isinstance(value, Tensor):
            last, version = t.shared.get(path, (None, 0))
            value = last is not value or version != value._version
        numbers.append(int(value))
    return numbers


def _taken(
    form: Mapping[str, Any], old: Mapping[str, Any], numbers: Mapping[Path, int], at: Path = ()
) -> State:
    """A memory of this form from what the owner told, with room for tensors that will be sent."""
    memory: State = {}
    for key, value in form.items():
        path = (*at, key)
        if isinstance(value, Mapping):
            memory[key] = _taken(value, old.get(key, {}), numbers, path)
        elif not isinstance(value, Tensor):
            memory[key] = type(value)(numbers[path])
        else:
            memory[key] = torch.empty(value.shape, dtype=value.dtype) if numbers[path] else old[key]
    return memory
