"""Projections hold norms, bounds and spectra, and move nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from correction_examples import (
    idle,
    ill_conditioned,
    kappa_of,
    matrices,
    steps_on,
)
from kappascope.corrections import (
    SingularValueBound,
    SpectralDecay,
    SVDCorrection,
    banded,
    toward_spectrum,
)
from kappascope.matrix import spectra


def test_moving_all_the_way_gives_the_other_spectrum_and_keeps_the_vectors() -> None:
    weight, goal = matrices(2, 4, 6), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    moved = toward_spectrum(weight, goal, step=1.0)
    torch.testing.assert_close(torch.linalg.svdvals(moved), goal.expand(2, 4))
    # the same left and right vectors: both products are symmetric
    for product in (moved @ weight.mT, weight.mT @ moved):
        torch.testing.assert_close(product, product.mT)


def test_a_singular_value_is_never_moved_below_the_floor() -> None:
    moved = toward_spectrum(torch.eye(2, dtype=torch.float64), torch.tensor([1.0, -50.0]))
    assert torch.linalg.svdvals(moved)[1].item() == pytest.approx(1e-10, rel=1e-3)


@given(st.integers(0, 1000), st.floats(1.0, 50.0))
def test_the_nearest_spectrum_within_a_bound_is_nearer_than_any_other_band(seed, kappa) -> None:
    values = matrices(6, seed=seed).abs().sort(descending=True).values
    found = banded(values, kappa)
    assert found[0] <= kappa * found[-1] * (1 + 1e-9)
    lows = torch.linspace(0, 1, 500, dtype=torch.float64)[:, None] * values[0]
    others = torch.minimum(torch.maximum(values, lows), kappa * lows)
    best = (others - values).square().sum(-1).min()
    assert (found - values).square().sum() <= best + 1e-12


def test_the_svd_correction_moves_by_its_rate_when_it_is_time() -> None:
    known = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    layer = ill_conditioned(3, 3)
    before = torch.linalg.svdvals(layer.weight.detach())
    idle(layer, SVDCorrection(every=4, step=0.25, target=lambda _: known), 11)  # at 4 and at 8
    expected = known + 0.75**2 * (before - known)
    torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), expected)


def test_the_svd_correction_returns_to_the_initial_spectrum() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4, bias=False).double(), matrices(9, 4)
    initial, optimizer = torch.linalg.svdvals(layer.weight.detach()), SGD(layer.parameters(), 0.1)
    with SVDCorrection(every=1, step=1.0).attach(layer, optimizer):
        steps_on(layer, optimizer, x, 5)
    torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), initial)


PARTS = [slice(1), slice(1, None), slice(-2, None), slice(2, 4), slice(0, None, 2)]


@pytest.mark.parametrize("part", PARTS)
def test_the_decay_shrinks_its_part_and_nothing_else(part: slice) -> None:
    layer = ill_conditioned()
    u, s, vt = torch.linalg.svd(layer.weight.detach())
    idle(layer, SpectralDecay(strength=0.5, part=part, every=2), 4)
    expected = s.clone()
    expected[part] *= math.exp(-0.1 * 0.5 * 4)
    torch.testing.assert_close(u.T @ layer.weight.detach() @ vt.T, torch.diag(expected))


@pytest.mark.parametrize("part", PARTS)
@given(strength=st.floats(0.01, 1e3), rate=st.floats(1e-4, 10.0))
def test_the_decay_composes_whichever_steps_it_waits_for(part, strength, rate) -> None:
    once, often = (
        idle(ill_conditioned(), SpectralDecay(strength, part, every), 6, rate).weight.detach()
        for every in (6, 1)
    )
    torch.testing.assert_close(once, often, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
@given(strength=st.floats(0.01, 50.0), rate=st.floats(1e-4, 10.0))
def test_the_decay_keeps_the_order_and_deletes_nothing(part, strength, rate) -> None:
    layer = ill_conditioned()
    u, s, vt = torch.linalg.svd(layer.weight.detach())
    idle(layer, SpectralDecay(strength, part, every=1), 1, rate)
    after = (u.T @ layer.weight.detach() @ vt.T).diagonal()
    assert after[0] >= s[1] * (1 - 1e-9) or not {1} - set(range(6)[part])
    untouched = [i for i in range(6) if i not in range(6)[part]]
    torch.testing.assert_close(after[untouched], s[untouched])
    for i in range(6)[part]:
        below = [s[j] for j in untouched if j > i]
        floor = below[0] if below else s[i] * math.exp(-strength * rate)
        assert after[i] >= floor * (1 - 1e-9) - 1e-15 * s[0]


def test_the_decay_follows_a_schedule_between_its_turns() -> None:
    layer = ill_conditioned()
    first = torch.linalg.svdvals(layer.weight.detach())[0]
    optimizer = SGD(layer.parameters(), lr=0.1)
    with SpectralDecay(0.5, every=3).attach(layer, optimizer):
        for rate in (0.1, 0.2, 0.3):
            optimizer.param_groups[0]["lr"] = rate
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
    after = torch.linalg.svdvals(layer.weight.detach())[0]
    torch.testing.assert_close(after, first * math.exp(-0.5 * 0.6))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (150, 150), (120, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_holds_after_one_step(shape, dtype) -> None:
    layer = ill_conditioned(*shape).to(dtype)
    idle(layer, SingularValueBound(7.0), 1)
    assert kappa_of(layer.weight) <= 7.0


def test_the_bound_holds_at_every_step_of_training_a_large_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(150, 150, bias=False), torch.randn(64, 150)
    optimizer = AdamW(layer.parameters(), lr=1e-3)
    with SingularValueBound(20.0).attach(layer, optimizer):
        for _ in range(20):
            steps_on(layer, optimizer, x)
            assert kappa_of(layer.weight) <= 20.0


@pytest.mark.parametrize(
    ("dtype", "size", "kappa", "decades"),
    [
        (torch.bfloat16, 256, 100.0, 0),
        (torch.bfloat16, 512, 300.0, 0),
        (torch.float16, 512, 1000.0, 0),
        (torch.bfloat16, 24, 1.02, 0),
        (torch.float32, 130, 1e6, 5),
    ],
)
def test_the_bound_holds_of_what_is_stored(dtype, size, kappa, decades) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    layer.weight.data *= torch.logspace(0, -decades, size)
    idle(layer.to(dtype), SingularValueBound(kappa), 1)
    values = torch.linalg.svdvals(layer.weight.detach().double())
    assert values[0] <= kappa * values[-1]


def test_a_bound_of_one_is_held_to_rounding() -> None:
    for dtype, nearest in (
        (torch.bfloat16, 1.01),
        (torch.float16, 1.001),
        (torch.float32, 1.000001),
    ):
        layer = idle(ill_conditioned(100, 100).to(dtype), SingularValueBound(1.0), 1)
        assert torch.linalg.cond(layer.weight.detach().double()) < nearest


def test_the_bound_is_the_nearest_matrix_that_has_it() -> None:
    weight = matrices(5, 4)
    found = SingularValueBound(2.0).corrected(weight)
    for seed in range(20):
        other = SingularValueBound(2.0).corrected(weight + 0.1 * matrices(5, 4, seed=seed))
        assert (found - weight).norm() <= (other - weight).norm() + 1e-12


def test_a_bound_on_kappa_takes_one_decomposition(monkeypatch) -> None:
    taken, original = [], spectra.decomposition
    monkeypatch.setattr(spectra, "decomposition", lambda a: taken.append(1) or original(a))
    found = SVDCorrection(step=1.0, target=2.0).corrected(torch.diag(torch.tensor([4.0, 1.0])))
    assert len(taken) == 1
    assert torch.linalg.cond(found) == pytest.approx(2.0)


def test_rate_is_an_older_name_of_the_step_of_the_svd_correction() -> None:
    assert SVDCorrection(rate=0.5) == SVDCorrection(step=0.5)
    assert SVDCorrection(20, 0.5) == SVDCorrection(step=0.5)
    with pytest.raises(ValueError, match="expected step to be"):
        SVDCorrection(rate=-1.0)


def test_a_matrix_that_begins_at_zero_is_not_pulled_back_to_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    optimizer = SGD(model.parameters(), lr=0.1)
    with SVDCorrection(every=1).attach(model, optimizer) as handle:
        assert handle.weights == ("0.weight",)
        assert "zero at first" in handle.left_out["1.weight"]
    with SVDCorrection(every=1, target=10.0).attach(model, optimizer) as handle:
        assert handle.weights == ("0.weight", "1.weight")
