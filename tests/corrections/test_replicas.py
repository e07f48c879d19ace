"""Copies of a model that several processes train stay equal to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from correction_examples import EXAMPLES, perceptron
from kappascope.corrections import Multipliers, NormPin, SingularValueMultipliers

BROAD = [*EXAMPLES, Multipliers(rate=1.0), SingularValueMultipliers(every=3)]


def broad() -> nn.Module:
    """Large enough for one thread and two to give other bits."""
    return nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 160), nn.Linear(160, 120))


def rank(number: int, place: str) -> None:
    """One of two processes; the corrections are attached before and after DDP wraps the model."""
    import torch.distributed as dist

    torch.set_num_threads(1 + number)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    for make, early, unused in ((perceptron, True, False), (broad, False, True)):
        for correction in EXAMPLES if make is perceptron else BROAD:
            torch.manual_seed(number)  # DDP broadcasts the first process's weights
            model = make()
            optimizer = AdamW(model.parameters(), lr=0.01)
            handle = correction.attach(model, optimizer) if early else None
            parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
            norm = model[0].weight.detach().norm()
            handle = handle or correction.attach(parallel, optimizer)
            generator = torch.Generator().manual_seed(number)
            for _ in range(7):
                optimizer.zero_grad()
                parallel(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
            if isinstance(correction, NormPin):
                torch.testing.assert_close(model[0].weight.detach().norm(), norm)
            state = torch.cat([v.double().flatten() for v in model.state_dict().values()])
            both = [torch.zeros_like(state) for _ in range(2)]
            dist.all_gather(both, state)
            if not torch.equal(*both):
                raise AssertionError(f"{correction} differs by {(both[0] - both[1]).abs().max()}")
            if handle.state_dict()["steps"] != [7] or handle.refused:
                raise AssertionError(f"{correction} did not take its steps")
    dist.barrier()
    os._exit(0)  # one in thirty is aborted by gloo's threads if it ends as usual


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_stay_equal_with_one_thread_and_two(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, args=(str(tmp_path / "meeting"),), nprocs=2)
