"""What a step did: known answers."""

import math

import pytest
import torch

from kappascope.matrix.tracking import ends
from kappascope.monitor.updates import (
    alignment,
    along_ends,
    decoupled_decay,
    turn,
    update_quantities,
)


def test_pure_decay_has_no_step() -> None:
    weight = torch.randn(6, 5)
    found, step = update_quantities(weight, weight * 0.99, None, None, decay=0.01)
    assert found["update_size"] == pytest.approx(0.01, rel=1e-4)
    assert found["update_radial"] == pytest.approx(-0.01, rel=1e-4)
    assert found["update_step"] < 1e-6 and step.abs().max() < 1e-6


def test_a_step_against_the_gradient_is_aligned_with_it_and_with_its_like() -> None:
    weight, gradient = torch.randn(6, 5), torch.randn(6, 5)
    after = weight - 0.1 * gradient
    found, _ = update_quantities(weight, after, gradient, -3 * gradient, decay=0.0)
    assert found["update_alignment_gradient"] == pytest.approx(1.0, abs=1e-5)
    assert found["update_alignment_last"] == pytest.approx(1.0, abs=1e-5)


def test_a_zero_weight_and_a_zero_step_have_no_ratios() -> None:
    zero = torch.zeros(3, 3)
    assert update_quantities(zero, zero, torch.ones(3, 3), zero, 0.1)[0] == {"gradient_norm": 3.0}
    assert along_ends(zero, ends(torch.eye(3), {})) == {}
    assert alignment(zero, torch.ones(3, 3)) is None


def test_a_change_along_the_first_triplet_lies_in_the_top() -> None:
    u, _, vt = torch.linalg.svd(torch.randn(20, 20))
    weight = u @ torch.diag(torch.linspace(20, 1, 20)) @ vt
    top = along_ends(torch.outer(u[:, 0], vt[0]), ends(weight, {}))
    bottom = along_ends(torch.outer(u[:, -1], vt[-1]), ends(weight, {}))
    assert top["update_share_top"] == pytest.approx(1.0, abs=1e-4)
    assert bottom["update_share_bottom"] == pytest.approx(1.0, abs=1e-4)


def test_a_turn_is_an_angle() -> None:
    first = torch.eye(4)[:, :2]
    assert turn(first, first) == 0.0
    assert turn(first, torch.eye(4)[:, 2:]) == pytest.approx(math.pi / 2)


def test_decay_is_decoupled_by_class_or_by_flag() -> None:
    group = {"lr": 0.1, "weight_decay": 0.01}
    assert decoupled_decay("AdamW", group) == pytest.approx(1e-3)
    assert decoupled_decay("Adam", group | {"decoupled_weight_decay": True}) == pytest.approx(1e-3)
    assert decoupled_decay("Adam", group) is None
    assert decoupled_decay("Adam", {"lr": 0.1, "weight_decay": 0.0}) == 0.0
    for name in ("AdamW8bit", "PagedAdamW", "Lion"):
        assert decoupled_decay(name, group) == pytest.approx(1e-3)
    assert decoupled_decay("Lion", group | {"weight_decouple": False}) is None
