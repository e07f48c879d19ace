"""Products of layers: modes and flow, against gradient descent."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import DeepLinear, descend, last
from kappascope.matrix.components import Components
from kappascope.theory import (
    flow,
    learning_time,
    mode_kappa,
    mode_path,
    mode_speed,
    product,
)

Array = NDArray[np.float64]
STRENGTHS = np.array([2.0, 1.0, 0.3])
DEPTHS = (1, 2, 3, 4)


def aligned(depth: int, strength: float) -> tuple[list[Array], Array]:
    """Balanced layers that share the target's singular vectors, and the target."""
    turns = [
        np.linalg.qr(np.random.default_rng(i).normal(size=(3, 3)))[0] for i in range(depth + 1)
    ]
    root = strength ** (1 / depth) * np.eye(3)
    layers = [after @ root @ before.T for before, after in pairwise(turns)]
    return layers, turns[-1] @ np.diag(STRENGTHS) @ turns[0].T


def descended(layers: list[Array], target: Array, rate: float, steps: int) -> Array:
    """The product after plain steps along the full gradient, by autograd."""
    weights = [torch.tensor(layer, requires_grad=True) for layer in layers]
    for _ in range(steps):
        whole = weights[0]
        for weight in weights[1:]:
            whole = weight @ whole
        loss = (whole - torch.tensor(target)).square().sum() / 2
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=rate)
    return product([weight.detach().numpy() for weight in weights])


@pytest.mark.parametrize("depth", DEPTHS)
def test_modes_of_an_aligned_start_follow_their_equation(depth: int) -> None:
    layers, target = aligned(depth, strength=0.02)
    steps, rate = (200, 900), 0.003
    for count in steps:
        learned = np.linalg.svd(descended(layers, target, rate, count), compute_uv=False)
        modes = mode_path(STRENGTHS, [0.02] * 3, depth, [rate * count])[0]
        np.testing.assert_allclose(np.sort(learned), np.sort(modes), rtol=0.03)
        kappa = mode_kappa(STRENGTHS, [0.02] * 3, depth, [rate * count])
        assert learned[0] / learned[-1] == pytest.approx(float(kappa[0]), rel=0.03)


@pytest.mark.parametrize("depth", DEPTHS)
def test_flow_of_an_aligned_start_is_the_modes(depth: int) -> None:
    layers, target = aligned(depth, strength=0.05)
    times = [0.5, 2.0, 6.0]
    for later, modes in zip(
        flow(layers, target, times), mode_path(STRENGTHS, [0.05] * 3, depth, times), strict=True
    ):
        s = np.linalg.svd(product(later), compute_uv=False)
        np.testing.assert_allclose(np.sort(s), np.sort(modes), rtol=1e-5)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("target", [0.4, 2.0])
def test_a_mode_is_learned_at_its_time(depth: int, target: float) -> None:
    time = learning_time(target, start=1e-3, depth=depth, share=0.05)
    assert mode_path([target], [1e-3], depth, [time]).item() == pytest.approx(
        0.95 * target, rel=1e-4
    )


def test_weak_modes_wait_only_in_deep_networks() -> None:
    strong, weak = ([learning_time(s, 1e-6, n) for n in (1, 2, 3)] for s in (1.0, 0.1))
    ratios = np.array(weak) / strong
    assert ratios[0] == pytest.approx(1, rel=1e-3)
    assert 6 < ratios[1] < 10  # 1 / s up to a logarithm
    assert ratios[2] > 10
    times = np.linspace(0, 200, 400)
    kappa = mode_kappa([1.0, 0.1], [1e-3, 1e-3], depth=3, times=times)
    assert kappa.max() > 5 * 10  # above the target's 10 while the weak one waits
    assert kappa[-1] == pytest.approx(10, rel=0.01)


def test_time_of_a_mode_that_is_there_already_is_refused() -> None:
    with pytest.raises(ValueError, match="start"):
        learning_time(1.0, start=0.995, depth=2)


@settings(max_examples=30)
@given(st.floats(0.05, 3), st.floats(0.01, 0.9), st.sampled_from(DEPTHS))
def test_speed_is_the_slope_of_the_path(target: float, share: float, depth: int) -> None:
    s, h = share * target, 1e-5
    ahead = mode_path([target], [s], depth, [h]).item()
    assert (ahead - s) / h == pytest.approx(float(mode_speed(s, target, depth)), rel=1e-2)


def paper(depth: int, size: int, count: int) -> tuple[Own, torch.Tensor, list[torch.Tensor]]:
    streams = Own(range(count), f"deep {depth}")
    random = streams.random(7)
    layers = [start(random, size, scale=0.1 ** (1 / depth)) for _ in range(depth)]
    return streams, heterogeneous(streams.random(), size), layers


def test_flow_conserves_the_imbalance_of_the_layers() -> None:
    _, target, starts = paper(3, size=6, count=1)
    before = [layer[0].numpy() for layer in starts]
    (after,) = flow(before, target[0].numpy(), [5.0])
    for layers in zip(pairwise(before), pairwise(after), strict=True):
        old, new = (b.T @ b - a @ a.T for a, b in layers)
        np.testing.assert_allclose(new, old, atol=1e-7)


@pytest.mark.parametrize("depth", DEPTHS)
def test_sgd_from_the_papers_start_follows_the_flow(depth: int) -> None:
    """Up to 20,000 steps in benchmarks/depth.py; here a small matrix and 1000."""
    streams, target, layers = paper(depth, size=8, count=6)
    rate, steps = (0.01 if depth == 1 else 0.005), 1000
    model, batches = DeepLinear(layers), Regression(target).batches(streams.random(8))
    found = last(descend(model, batches, rate, steps=steps))
    measured = Components(found.weight).log_condition_number.numpy()
    predicted = []
    for trial in range(len(target)):
        begin = [layer[trial].numpy() for layer in layers]
        (later,) = flow(begin, target[trial].numpy(), [rate * steps])
        s = np.linalg.svd(product(later), compute_uv=False)
        predicted.append(math.log(s[0] / s[-1]))
    assert np.median(np.abs(measured - predicted)) < (0.05 if depth == 1 else 0.4)


def test_flow_takes_rectangular_layers() -> None:
    random = np.random.default_rng(0)
    layers, target = [random.normal(size=(4, 3)), random.normal(size=(2, 4))], np.ones((2, 3))
    (later,) = flow(layers, target, [40.0])
    np.testing.assert_allclose(product(later), target, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_at_time_zero_nothing_has_moved(depth) -> None:
    assert mode_path([2.0, 0.0], [0.01, 0.0], depth, [0.0, 1.0])[:, 1].tolist() == [0.0, 0.0]
    assert mode_path([2.0, 0.5], [0.1, 0.2], depth, [0.0]) == pytest.approx(np.array([[0.1, 0.2]]))
    layers = [0.5 * np.eye(2)] * depth
    (still,) = flow(layers, np.eye(2), times=[0.0])
    np.testing.assert_allclose(still, layers)


def test_at_depth_two_a_mode_with_nothing_to_learn_decays_like_one_over_time() -> None:
    start, times = 0.01, np.array([0.0, 1.0, 10.0])
    path = mode_path([2.0, 0.0], [start, start], 2, times)
    assert path[:, 1] == pytest.approx(start / (1 + 2 * start * times))
