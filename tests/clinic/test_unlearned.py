"""From two checkpoints and an optimizer to what is learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import kappascope
from kappascope.theory.beyond import BEYOND


@pytest.fixture(scope="module")
def pair() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two weights around 200 steps of AdamW: on noise, and on gradients with a direction."""
    random = torch.Generator().manual_seed(0)
    before = {n: 0.1 * torch.randn(10, 14, generator=random) for n in ("a.weight", "b.weight")}
    noisy, led = (nn.Parameter(w.clone()) for w in before.values())
    optimizer = torch.optim.AdamW([noisy, led], lr=0.01, weight_decay=0.5)
    direction = torch.randn(10, 1, generator=random) @ torch.randn(1, 14, generator=random)
    for _ in range(200):
        noisy.grad = torch.randn(10, 14, generator=random)
        led.grad = torch.randn(10, 14, generator=random) + direction
        optimizer.step()
    return before, {"a.weight": noisy.detach(), "b.weight": led.detach()}


TOLD = "AdamW lr=0.01 weight_decay=0.5"


def test_signal_is_told_from_noise(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    found = kappascope.unlearned(*pair, TOLD, steps=200)
    assert found["b.weight"]["log_sigma_1"].answer == BEYOND
    assert all(part.answer != BEYOND for part in found["a.weight"].values())
    assert found["a.weight"]["log_norm"].null == "AdamW on white noise"
    assert "log sigma 1: 1 beyond noise" in str(found)


def test_files_and_memory_agree(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    for name, weights in zip(("before.pt", "after.pt"), pair, strict=True):
        torch.save(weights, tmp_path / name)
    here = kappascope.unlearned(*pair, TOLD, steps=200)
    paths = tmp_path / "before.pt", tmp_path / "after.pt"
    there = kappascope.unlearned(*paths, TOLD, steps=200, jobs=1)
    assert dict(here) == dict(there)


def test_a_matrix_without_a_start_says_why(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    before, after = pair
    found = kappascope.unlearned({"a.weight": before["a.weight"]}, after, TOLD, steps=200)
    assert list(found) == ["a.weight"]
    assert found.missing["b.weight"] == "the reference has no such matrix"


def test_sgd_without_the_size_of_gradients_is_open(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    found = kappascope.unlearned(*pair, "SGD lr=0.1", steps=10)
    assert not found
    assert "pass gradient=" in found.missing["a.weight"]
