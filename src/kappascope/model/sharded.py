"""Tensors that are spread over processes (``DTensor``, as FSDP2 makes them), whole or in shards."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes.

    >>> is_sharded(torch.ones(2))
    False
    """
    return hasattr(tensor, "full_tensor")  # not by its type, whose import takes half a second


def is_flattened(model: nn.Module) -> bool:
    """Whether processes keep flat pieces of its parameters (FSDP1), of which no matrix can be read.

    >>> is_flattened(nn.Linear(2, 2))
    False
    """
    return any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all processes, which all have to ask for it.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def own_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has.

    >>> own_shard(torch.ones(2))
    tensor([1., 1.])
    """
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def shard_count(tensor: Tensor) -> int:
    """The number of parts into which a tensor is cut; copies of a part are not counted.

    >>> shard_count(torch.ones(2))
    1
    """
    if not is_sharded(tensor):
        return 1
    spread = cast(Any, tensor)
    sizes = zip(spread.placements, spread.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have, or in other shards, spread as another of its shape is.

    >>> spread_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not is_sharded(like):
        return tensor
    spread = cast(Any, like)
    if is_sharded(tensor):  # torch copies what has a single row to all, where it is multiplied
        return cast(Any, tensor).redistribute(spread.device_mesh, spread.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, spread.device_mesh, spread.placements, src_data_rank=None)


def copied_to_all(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have, fit to be combined with one that is spread.

    >>> copied_to_all(torch.ones(2), torch.zeros(3))
    tensor([1., 1.])
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = cast(Any, like).device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def agreed(answer: bool, tensor: Tensor) -> bool:
    """Whether all processes over which a tensor is spread say yes.

    >>> agreed(True, torch.ones(2))
    True
    """
    if not is_sharded(tensor):
        return answer
    flag = torch.tensor(int(answer), device=tensor.device)
    group = cast(Any, tensor).device_mesh.get_group()
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group)
    return bool(flag)
