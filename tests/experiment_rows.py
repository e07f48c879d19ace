"""Single experiments run in tests: their rows, and the numbers in them."""

import itertools

import pytest
import torch

from kappascope.lab import training
from kappascope.lab.experiment import discover
from kappascope.lab.tasks import Streams

EXPERIMENTS = discover()
Found = list[dict[str, object]]


def run(number: int, streams: Streams, **setting: object) -> Found:
    return [{**setting, **row} for row in EXPERIMENTS[number].trials(streams, **setting)]


def numbers(found: Found, column: str = "error", **equal: object) -> torch.Tensor:
    chosen = [row[column] for row in found if all(row.get(k) == v for k, v in equal.items())]
    assert len(chosen) == 1, f"{len(chosen)} batches of rows have {equal}"
    return torch.as_tensor(chosen[0]).detach()


def mean(found: Found, column: str = "error", **equal: object) -> float:
    return numbers(found, column, **equal).mean().item()


def prints(value: float, printed: str) -> bool:
    """Whether a number reads as printed, when rounded to as many digits."""
    return f"{value:.{len(printed.partition('.')[2])}f}" == printed


def hurry(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let every training end after so many steps; it is not asked what was learned."""
    shorter = lambda batches, steps: itertools.islice(batches, min(steps, most))  # noqa: E731
    monkeypatch.setattr(training, "islice", shorter)
