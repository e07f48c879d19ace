"""Copies of a model that several processes train stay equal to the bit, and remember the same."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from correction_examples import EXAMPLES, Attentive, perceptron
from kappascope.corrections import (
    Correction,
    Hybrid,
    Multipliers,
    NormPin,
    PaperPenalty,
    QKClip,
    SigmaMaxPenalty,
    SingularValueBound,
    SingularValueMultipliers,
    SpectralDecay,
    SpectralNormalization,
    SpectralPenalty,
)
from kappascope.corrections._replicas import share_memories
from kappascope.corrections._treatments import OptimizerStep, Treatment

BROAD = [*EXAMPLES, Multipliers(rate=1.0), SingularValueMultipliers(every=3)]
REMEMBERING = [  # what a look at the weight has left, of which one process has the first
    SpectralPenalty(0.1, target=1.5, every=2),
    PaperPenalty(0.1, target=1.5, every=3),
    SigmaMaxPenalty(0.5, every=3),
    SpectralDecay(5.0, every=4),
    SpectralNormalization(),
    SingularValueBound(2.0),
    Hybrid(penalties=SpectralPenalty(0.1, target=1.5, every=2)),
]


def broad() -> nn.Module:
    """Large enough for one thread and two to give other bits."""
    return nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 160), nn.Linear(160, 120))


def rank(number: int, place: str) -> None:
    """One of two processes; the corrections are attached before and after DDP wraps the model."""
    import torch.distributed as dist

    torch.set_num_threads(1 + number)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    kinds = (
        (perceptron, EXAMPLES, True, False),
        (broad, BROAD, False, True),
        (Attentive, [QKClip(tau=0.05, heads=2)], True, False),  # which scales biases too
    )
    for make, corrections, early, unused in kinds:
        for correction in corrections:
            torch.manual_seed(number)  # DDP broadcasts the first process's weights
            model = make()
            if make is Attentive:
                model.attention.in_proj_bias.data.normal_()
            optimizer = AdamW(model.parameters(), lr=0.01)
            handle = correction.attach(model, optimizer) if early else None
            parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
            pinned = next(model.parameters())
            norm = pinned.detach().norm()
            handle = handle or correction.attach(parallel, optimizer)
            generator = torch.Generator().manual_seed(number)
            for _ in range(7):
                optimizer.zero_grad()
                parallel(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
            if isinstance(correction, NormPin):
                torch.testing.assert_close(pinned.detach().norm(), norm)
            state = torch.cat([v.double().flatten() for v in model.state_dict().values()])
            both = [torch.zeros_like(state) for _ in range(2)]
            dist.all_gather(both, state)
            if not torch.equal(*both):
                raise AssertionError(f"{correction} differs by {(both[0] - both[1]).abs().max()}")
            if handle.state_dict()["steps"] != [7] or handle.refused:
                raise AssertionError(f"{correction} did not take its steps")
            rewrites = [v for k, v in handle.metrics().items() if k.startswith("rewrites/")]
            counted = [torch.zeros(len(rewrites)) for _ in range(2)]
            dist.all_gather(counted, torch.tensor(rewrites))
            if not torch.equal(*counted):
                raise AssertionError(f"{correction} is counted where it was done")
    dist.barrier()
    os._exit(0)  # one in thirty is aborted by gloo's threads if it ends as usual


def resumed_rank(number: int, place: str) -> None:
    """One of two processes that go on from what the first has saved, as every trainer saves it."""
    import torch.distributed as dist

    torch.set_num_threads(1 + number)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)

    def started(correction: Correction) -> tuple[nn.Module, nn.Module, AdamW]:
        torch.manual_seed(0)
        model = broad()
        optimizer = AdamW(model.parameters(), lr=0.01)
        parallel = nn.parallel.DistributedDataParallel(model)
        correction.attach(parallel, optimizer)
        return model, parallel, optimizer

    def trained(parallel: nn.Module, optimizer: AdamW, moments: range) -> None:
        for moment in moments:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * moment + number)
            parallel(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()

    for i, correction in enumerate(REMEMBERING):
        whole, parallel, optimizer = started(correction)
        trained(parallel, optimizer, range(5))
        file = f"{place}-{i}.pt"
        if number == 0:
            torch.save((whole.state_dict(), optimizer.state_dict()), file)
        dist.barrier()
        trained(parallel, optimizer, range(5, 9))
        again, parallel, optimizer = started(correction)
        for part, state in zip((again, optimizer), torch.load(file), strict=True):
            part.load_state_dict(state)
        trained(parallel, optimizer, range(5, 9))
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            if not torch.equal(a, b):
                raise AssertionError(f"{correction} resumed is off by {(a - b).abs().max()}")
    dist.barrier()
    os._exit(0)


def spoiled_rank(number: int, place: str) -> None:
    """One of two processes, in which gradients differ: one of each is broken in one of them."""
    import torch.distributed as dist

    wait = timedelta(seconds=60)  # for who withholds alone would wait for ever
    meeting = f"file://{place}"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=2, timeout=wait)
    for correction in REMEMBERING:
        torch.manual_seed(0)
        model = perceptron()
        optimizer = AdamW(model.parameters(), lr=0.01)
        parallel = nn.parallel.DistributedDataParallel(model)
        handle = correction.attach(parallel, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            parallel(torch.ones(8, 4)).square().mean().backward()
            if step == 2:
                model[2 * number].weight.grad[0, 0] = torch.nan
            optimizer.step()
        weights = torch.cat([model[i].weight.detach().flatten() for i in (0, 2)])
        both = [torch.zeros_like(weights) for _ in range(2)]
        dist.all_gather(both, weights)
        if not torch.equal(*both) or handle.refused != {"0.weight": 1, "2.weight": 1}:
            raise AssertionError(f"{correction} followed what is not finite: {handle.refused}")
    dist.barrier()
    os._exit(0)


class Whole(nn.Module):
    """A model that is called as one, as FSDP expects it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # one row, of which the second process has none, among others
        narrow = nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 6)
        layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), *narrow, nn.Conv1d(1, 4, 3)
        self.parts = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *linear, last = self.parts
        for layer in linear:
            x = layer(x)
        return last(x[:, None])


def shard(number: int, place: str) -> None:
    """One of two processes that share the weights of a model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for correction in EXAMPLES:
        alone, model = Whole(), Whole()
        prepared = correction.prepare(model)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.parts[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        first, second = (AdamW(m.parameters(), lr=0.02) for m in (alone, model))
        if isinstance(correction, SingularValueMultipliers):
            try:
                prepared.attach(second)
            except ValueError as error:
                assert "is sharded, and its factors need the whole of it" in str(error)
                continue
            raise AssertionError("factors of singular values of shards were not refused")
        handle, other = correction.attach(alone, first), prepared.attach(second)
        saved = []
        for step in range(6):
            for m, optimizer in ((alone, first), (model, second)):
                optimizer.zero_grad()
                m(x).square().mean().backward()  # the same on both, so its average is the same
                optimizer.step()
            if step == 3:
                saved.append((other.state_dict(), second.state_dict()))
        for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
            found = q.full_tensor()
            assert torch.allclose(found, p, rtol=1e-4, atol=1e-5), (correction, name, found - p)
        assert handle.weights == other.weights and not other.refused
        other.load_state_dict(saved[0][0])
        other.close()
    dist.barrier()
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_shards_are_trained_as_the_whole_is_or_refused(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shard, args=(str(tmp_path / "meeting"),), nprocs=2)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_stay_equal_with_one_thread_and_two(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, args=(str(tmp_path / "meeting"),), nprocs=2)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_go_on_from_what_the_first_has_saved(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(resumed_rank, args=(str(tmp_path / "meeting"),), nprocs=2)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.filterwarnings("ignore:a step of")
def test_a_gradient_that_one_process_has_broken_is_followed_by_none(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(spoiled_rank, args=(str(tmp_path / "meeting"),), nprocs=2)


@dataclass
class TwoProcesses:
    """Both processes in one: what the owner says and sends is kept for the other."""

    said: list[int] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    is_owner: bool = True

    def owns(self, leaf: nn.Parameter) -> bool:
        return self.is_owner

    def owners_answers(self, answers: list[int], device: torch.device) -> list[int]:
        self.said = list(answers) if self.is_owner else self.said
        return self.said

    def send_owned(self, leaf: nn.Parameter, tensors: list[Tensor]) -> None:
        if self.is_owner:
            self.sent = [tensor.clone() for tensor in tensors]
        for tensor, came in zip(tensors, self.sent, strict=True):
            tensor.copy_(came)


def treatment() -> Treatment:
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = AdamW(model.parameters(), lr=1e-5)
    return SpectralPenalty(0.1, target=1.5, every=2).attach(model, optimizer).treatments[0]


def shared(own: Treatment, other: Treatment) -> list[Tensor]:
    """Share by both, one after the other; what was sent."""
    both = TwoProcesses()
    for both.is_owner, t in ((True, own), (False, other)):
        share_memories(both, [t])
    return both.sent


def assert_same(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_other_process_has_what_the_owner_found_and_its_counts() -> None:
    own, other = treatment(), treatment()
    shared(own, other)
    assert not other.was_looked_at
    for index in range(1, 6):
        own.after(OptimizerStep(index, {"lr": 1e-5}))
        shared(own, other)
        assert other.was_looked_at
        assert_same(other.memory, own.memory)


def test_what_has_not_changed_is_not_sent_again() -> None:
    own, other = treatment(), treatment()
    own.after(OptimizerStep(1, {"lr": 1e-5}))
    first = shared(own, other)
    assert any(tensor.shape == (100, 100) for tensor in first)  # a factorization
    own.after(OptimizerStep(2, {"lr": 1e-5}))  # every second step it waits
    assert shared(own, other) == []
    assert other.memory["wait"] == own.memory["wait"] == 0
