"""What noise makes of a weight: the laws against optimizers that are really driven by noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from torch import Tensor, nn

from kappascope.lab.optimizers import Muon
from kappascope.matrix.parts import StartFrame, matrix_parts
from kappascope.theory import noise
from kappascope.theory.beyond import drawn_parts, place
from kappascope.theory.noise import NoiseLaw, factor_correlation, noise_law

CLASSES = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Muon": Muon}
RISING = list(np.linspace(0.001, 0.02, 60))
CASES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "sgd": ("SGD", {"weight_decay": 0.1}, [0.05] * 100),
    "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.2}, [0.01] * 120),
    "nesterov": ("SGD", {"momentum": 0.9, "weight_decay": 0.2, "nesterov": True}, RISING),
    "dampening": ("SGD", {"momentum": 0.8, "dampening": 0.5}, RISING),
    "adamw": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 1.0}, [0.01] * 120),
    "adamw rising": ("AdamW", {"betas": (0.9, 0.999), "weight_decay": 0.0}, RISING),
    "muon": ("Muon", {"weight_decay": 1.0}, [0.01] * 120),
    "muon rising": ("Muon", {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}, RISING),
}


def trained_on_noise(
    kind: str, settings: dict[str, Any], rates: Sequence[float], start: Tensor, count: int
) -> Tensor:
    """Train copies of a start with the optimizer itself, each on white gradients of its own."""
    random = torch.Generator().manual_seed(1)
    weights = nn.Parameter(start.expand(count, *start.shape).clone())
    optimizer = CLASSES[kind]([weights], lr=0.1, **settings)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = torch.randn(weights.shape, generator=random)
        optimizer.step()
    return weights.detach()


def start_of(rows: int, columns: int) -> Tensor:
    """Draw a start of the size that noise is about to reach."""
    return 0.1 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
def test_kept_and_spread_are_those_of_the_optimizer_itself(case: str) -> None:
    kind, settings, rates = CASES[case]
    start = start_of(8, 12)
    law = noise_law(kind, settings, rates, (8, 12), gradient=1.0)
    moved = trained_on_noise(kind, settings, rates, start, count=400) - law.kept * start
    n = moved.numel()
    # five deviations of a mean square of n entries; steps of Muon fix some of its freedom
    assert abs(float(moved.square().mean()) / law.spread**2 - 1) < 5 * math.sqrt(2 / n)
    residue = float((moved.mean(0) / (law.spread / math.sqrt(400))).square().mean())
    assert 0.6 < residue < 1.5  # 96 squares of standard normal numbers on average


@pytest.mark.parametrize("case", ["momentum", "adamw", "muon"])
def test_p_values_are_uniform_where_noise_alone_has_trained(case: str) -> None:
    kind, settings, rates = CASES[case]
    start = start_of(8, 12)
    frame = StartFrame(start)
    law = noise_law(kind, settings, rates, (8, 12), gradient=1.0)
    drawn = drawn_parts(law, start, count=1999, frame=frame)
    parts = matrix_parts(trained_on_noise(kind, settings, rates, start, count=400), frame)
    random = np.random.default_rng(2)
    ps = [
        scipy.stats.kstest([place(float(v), drawn[name], random) for v in values], "uniform").pvalue
        for name, values in parts.items()
    ]
    assert min(ps) * len(ps) > 0.001  # over all parts: one false alarm in a thousand


def test_a_planted_direction_is_found_the_more_surely_the_stronger_it_is() -> None:
    start = torch.zeros(16, 16)
    law = noise_law("AdamW", {"weight_decay": 0.1}, [0.01] * 300, (16, 16))
    drawn = drawn_parts(law, start)["log_sigma_1"]
    noise = torch.cat(list(law.draws(start, 200, seed=3)))
    edge = 2 * law.spread * math.sqrt(16)  # of the spectrum of noise
    direction = torch.zeros(16, 16)
    direction[0, 0] = 1.0
    power = []
    for strength in (0.0, 1.0, 1.5, 2.5):
        tops = torch.linalg.matrix_norm(noise + strength * edge * direction, 2).log()
        power.append(float((tops > np.quantile(drawn, 0.95)).double().mean()))
    assert power[0] < 0.11  # 5 %, with three deviations of 200 trials
    assert power == sorted(power)
    assert power[-1] > 0.99


def test_muons_noise_has_the_scale_that_its_law_says() -> None:
    law = noise_law("Muon", {"weight_decay": 2.0}, [0.01] * 200, (6, 10))
    assert law.factors is not None
    draws = torch.cat(list(law.draws(torch.zeros(6, 10), 600)))
    assert float(draws.square().mean().sqrt()) == pytest.approx(law.spread, rel=0.02)


def test_muons_noise_is_normal_after_very_many_momentum_times() -> None:
    law = noise_law("Muon", {"weight_decay": 0.0}, [0.001] * 40_000, (6, 10))
    assert law.factors is None


def test_what_stands_for_a_long_sum_has_its_fourth_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    # that of factors falls short of normal noise's by an amount that goes as one over their number
    monkeypatch.setattr(noise, "MAX_PIECES", 4)
    monkeypatch.setattr(noise, "STAND_IN", 4)
    settings, shape, count = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}, (6, 8), 9000
    normal = 6 * 8 * (6 + 8 + 1)
    error = 0.3 * normal / math.sqrt(count)  # of a mean whose deviation is a third of itself

    def excess(steps: int) -> float:
        law = noise_law("Muon", settings, [1.0] * steps, shape)
        assert law.factors is not None and (law.factors.share < 1) == (steps > 4)
        drawn = torch.cat(list(law.draws(torch.zeros(shape), count))) / law.spread
        return float((drawn @ drawn.mT).square().sum((-2, -1)).mean()) - normal

    short, long = excess(4), excess(16)
    assert short < -20 * error
    assert abs(long - short / 4) < 3 * error


def test_shaped_noise_has_the_covariances_it_was_given() -> None:
    rows, columns = torch.diag(torch.tensor([9.0, 1.0])), torch.diag(torch.tensor([1.0, 1.0, 4.0]))
    law = NoiseLaw(0.0, 2.0).shaped(rows, columns)
    square = torch.cat(list(law.draws(torch.zeros(2, 3), 20_000))).square().mean(0)
    # of mean diagonal one: the size is the law's own
    expected = 4.0 * torch.outer(rows.diag() / 5.0, columns.diag() / 2.0)
    torch.testing.assert_close(square, expected, rtol=0.05, atol=0.0)


def test_factors_of_the_same_noise_are_alike_and_of_another_are_not() -> None:
    before, after = factor_correlation(16, 16)
    assert (before[0], after[0]) == (0.0, 0.0)
    assert (before[-1], after[-1]) == (1.0, 1.0)
    assert (np.diff(after) > 0).all()


@pytest.mark.parametrize(
    ("kind", "settings", "rates", "told"),
    [
        ("Lion", {}, [0.1], "expected one of SGD, AdamW, Adam, Muon"),
        ("SGD", {}, [0.1], "pass gradient="),
        ("Adam", {"weight_decay": 0.1}, [0.1], "coupled weight decay"),
        ("AdamW", {"amsgrad": True}, [0.1], "without amsgrad"),
        ("AdamW", {}, [], "one step or more"),
        ("AdamW", {}, [-0.1], "none of them negative"),
    ],
)
def test_what_has_no_law_is_told(
    kind: str, settings: dict[str, Any], rates: list[float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        noise_law(kind, settings, rates, (4, 4))
