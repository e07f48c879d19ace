"""A model that FSDP shards over two processes, and what each of them finds in it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kappascope.clinic.diagnose import diagnose
from kappascope.model.matrices import matrices, plan, reader
from kappascope.refusal import Refusal


@contextmanager
def one_of_two(rank: int, store: str) -> Iterator[None]:
    """A group of two processes that meet at a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    yield
    dist.barrier()
    os._exit(0)  # gloo's threads abort some processes that end as usual


def layers(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.Conv2d(3, 5, 3))
    model.append(nn.MultiheadAttention(9, 3)).append(nn.Linear(9, 7))
    return model.to(device)


def sharded(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def read_sharded(rank: int, store: str) -> None:
    with one_of_two(rank, store), pytest.MonkeyPatch.context() as patch:
        with pytest.raises(Refusal, match="meta device, without values"):
            matrices(sharded(layers("meta")))
        model = layers()
        expected = {name: matrix.clone() for name, matrix in matrices(model)}
        skipped = matrices(model).skipped
        sharded(model)
        gather, alive, most = DTensor.full_tensor, weakref.WeakSet[Tensor](), 0

        def counted(tensor: DTensor) -> Tensor:
            nonlocal most
            gc.collect()
            whole = gather(tensor)
            alive.add(whole)
            most = max(most, len(alive))
            return whole

        patch.setattr(DTensor, "full_tensor", counted)
        assert matrices(model).skipped == skipped
        assert most == 0  # nothing is gathered to say what is skipped
        for name, matrix in matrices(model):
            assert torch.equal(matrix, expected.pop(name))
        assert not expected
        assert most <= 2  # the one at hand, and the next one while it is gathered
        units = plan(model).units
        assert all(type(m) is Tensor for unit in units for _, m in unit.matrices(reader(model)))
        found, whole = diagnose(model), diagnose(layers())
        kappas = [
            {row.name: row.condition_number for row in each.matrices} for each in (found, whole)
        ]
        assert kappas[0] == kappas[1] and not found.failed


def save_sharded(rank: int, store: str, folder: str) -> None:
    """What two processes write of a model and its optimizer, and the whole model beside it."""
    with one_of_two(rank, store):
        model = layers().to(torch.bfloat16)
        if rank == 0:
            torch.save(model.state_dict(), f"{folder}.pt")
        mesh = init_device_mesh("cpu", (2,))
        columns = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(1)])
        sharded(model)
        dcp.save({"model": model.state_dict(), "by_columns": columns}, checkpoint_id=folder)
