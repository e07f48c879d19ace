"""Every promise is the step that torch's own optimizer takes, in float64."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kappascope.matrix.orthogonal import MUON
from kappascope.monitor.promises import (
    Settings,
    State,
    Unpromised,
    heard_directions,
    iteration_schedule,
    promise_of,
    promises,
)
from optimizer_zoo import TORCH

FORMULAS = [(kind, settings) for name, (kind, _, settings) in TORCH.items() if "tensor" not in name]


@pytest.mark.parametrize("shape", [(5, 3), (4,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(("kind", "settings"), FORMULAS, ids=str)
def test_a_promise_is_torchs_step(kind: str, settings: dict[str, Any], shape: tuple) -> None:
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64))
    optimizer = getattr(torch.optim, kind)([weight], **settings)
    (group,) = optimizer.param_groups
    said = {key: float(x) if torch.is_tensor(x) else x for key, x in group.items()}
    promise, state = promises()[kind], State()
    for _ in range(7):
        weight.grad = torch.randn(shape, generator=random, dtype=torch.float64)
        steps, _ = promise.steps(said, state, weight.detach().clone(), weight.grad.clone())
        before = weight.detach().clone()
        optimizer.step()
        # torch keeps some factors of the rate in float32
        torch.testing.assert_close(steps[""].update, weight - before, rtol=2e-6, atol=1e-12)


def test_a_promise_goes_on_from_the_state_of_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], betas=(0.5, 0.9))
    for _ in range(3):
        weight.grad = torch.randn(3, dtype=torch.float64)
        optimizer.step()
    kept = {key: value.clone() for key, value in optimizer.state[weight].items()}
    weight.grad, before = torch.randn(3, dtype=torch.float64), weight.detach().clone()
    steps, _ = promises()["Adam"].steps(optimizer.param_groups[0], State(kept), before, weight.grad)
    optimizer.step()
    torch.testing.assert_close(steps[""].update, weight - before)


def test_state_of_other_names_is_not_guessed() -> None:
    state = State({"moments": torch.ones(2), "step": 3})
    with pytest.raises(Unpromised, match="no exp_avg; audit it before its first step"):
        promises()["Adam"].steps({"lr": 0.1}, state, torch.ones(2), torch.ones(2))


def test_a_stated_iteration_is_followed_and_muons_is_the_usual_one() -> None:
    assert iteration_schedule({}) == [MUON] * 5
    one, other = (2.0, -1.5, 0.5), (3.0, -3.0, 1.0)
    schedule = iteration_schedule({"ns_coeffs": [one, other], "ns_steps": 3})
    assert schedule == [one, other, other]


def test_what_is_lost_in_rounding_is_not_heard() -> None:
    u, vt = heard_directions(torch.zeros(3, 2))
    assert u.shape == (3, 0) and vt.shape == (0, 2)


def named(name: str, kind: type = Optimizer) -> Optimizer:
    return type(name, (kind,), {})([nn.Parameter(torch.ones(1))], defaults={"lr": 0.1})


def settings_of(optimizer: Optimizer) -> Settings:
    return optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("AdamW", "AdamW"), ("SGD", "SGD"), ("MuonWithAuxAdam", "Muon"), ("MuonAdamW", "Muon"),
        ("SingleDeviceMuon", "Muon"), ("MuonOptimizer", "Muon"), ("AdamOptimizer", "Adam"),
    ],
)  # fmt: skip
def test_a_name_is_known(name: str, promised: str) -> None:
    optimizer = named(name)
    assert promise_of(optimizer, settings_of(optimizer)).name == promised


@pytest.mark.parametrize("name", ["AdaMuon", "MuonClip", "StableAdamW", "SGDP", "AdaMax", "adam"])
def test_a_variant_of_another_name_promises_nothing(name: str) -> None:
    optimizer = named(name)
    with pytest.raises(Unpromised, match=f"{name} is no optimizer that is known here"):
        promise_of(optimizer, settings_of(optimizer))


def test_settings_that_change_the_formula_are_not_guessed() -> None:
    with pytest.raises(Unpromised, match="what cautious makes of AdamW is not known"):
        promise_of(named("AdamW"), {"lr": 0.1, "cautious": True})
