"""What one process remembers of a weight is told to all of them, and sent only when it is new."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from kappascope.corrections import SpectralPenalty
from kappascope.corrections.memories import share_memories
from kappascope.corrections.treatments import OptimizerStep, Treatment


@dataclass
class TwoProcesses:
    """Both processes in one: what the owner says and sends is kept for the other."""

    said: list[int] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    is_owner: bool = True

    def owns(self, leaf: nn.Parameter) -> bool:
        return self.is_owner

    def told(self, answers: list[int], device: torch.device) -> list[int]:
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
