"""What is spread over processes is put together, and what is whole is spread, without a change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from kappascope.model.sharded import (
    agreed,
    copied_to_all,
    is_sharded,
    own_shard,
    spread_like,
    whole,
)
from kappascope.model.weights import live_weights


def shard(number: int, place: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    torch.manual_seed(0)
    layer = nn.Linear(3, 5)
    before = layer.weight.detach().clone()
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    weight = layer.weight.detach()
    assert is_sharded(weight) and len(own_shard(weight)) == 3 - number
    assert torch.equal(whole(weight), before)
    assert torch.equal(whole(spread_like(2 * before, weight)), 2 * before)
    columns = torch.arange(3.0)
    assert torch.equal(whole(copied_to_all(columns, weight) * weight), columns * before)
    assert agreed(True, weight) and not agreed(number == 0, weight)
    (live,) = live_weights(layer)
    assert torch.equal(live.matrix(), before)
    live.write(before + 1)
    assert torch.equal(whole(layer.weight.detach()), before + 1)
    live.add_gradient(before)
    assert torch.equal(whole(layer.weight.grad), before)
    dist.barrier()
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_shards_and_wholes_are_the_same_numbers(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shard, args=(str(tmp_path / "meeting"),), nprocs=2)
