"""The ends of a spectrum, followed while the matrix moves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hard_matrices import with_values
from kappascope.matrix import tracking
from kappascope.matrix.tracking import (
    SVD_UP_TO,
    ExtremeTriplets,
    bound_form,
    extreme_triplets,
    largest_form,
    largest_triplet,
    lies_between,
    lifted,
    lowered,
    within,
)

SHAPES = [(150, 150), (300, 120), (120, 300)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def exact(weight: Tensor) -> ExtremeTriplets:
    """By the SVD in float64."""
    u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    return ExtremeTriplets(u[:, [0, -1]], s[[0, -1]], vt.mT[:, [0, -1]])


def direction(found: ExtremeTriplets) -> Tensor:
    """Of the gradient of log kappa, which is what the ends are for."""
    left, values, right = (x.double() for x in (found.left, found.values, found.right))
    return ExtremeTriplets(left, values, right).combined(
        torch.stack([1 / values[0], -1 / values[1]])
    )


def misalignment(found: ExtremeTriplets, weight: Tensor) -> float:
    """1 - cos of the angle between the gradient as found and as it is."""
    a, b = direction(found), direction(exact(weight))
    return 1 - float((a * b).sum() / (a.norm() * b.norm()))


def walk(shape: tuple[int, int], speed: float, count: int) -> list[Tensor]:
    """A matrix that changes by ``speed`` of itself at every step."""
    weights = [gaussian(*shape)]
    for seed in range(1, count):
        noise = gaussian(*shape, seed=seed)
        weights.append(weights[-1] + speed * noise * weights[-1].norm() / noise.norm())
    return weights


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (2, 4, 6), (1, 5), (1, 1), (120, 130)])
def test_without_a_memory_they_are_those_of_the_svd(shape: tuple[int, ...]) -> None:
    weight = gaussian(*shape).double()
    found = extreme_triplets(weight)
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(found.values, torch.stack([s[..., 0], s[..., -1]], -1))
    outer = u[..., :, :1] @ vt[..., :1, :], u[..., :, -1:] @ vt[..., -1:, :]
    one, zero = torch.ones_like(found.values[..., 0]), torch.zeros_like(found.values[..., 0])
    torch.testing.assert_close(found.combined(torch.stack([one, zero], -1)), outer[0])
    torch.testing.assert_close(found.combined(torch.stack([zero, one], -1)), outer[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("speed", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_moving_matrix_is_followed(shape, speed, dtype) -> None:
    memory: dict = {}
    weights = [weight.to(dtype) for weight in walk(shape, speed, 20)]
    off = [misalignment(extreme_triplets(weight, memory), weight) for weight in weights]
    assert torch.tensor(off).median() <= 1e-3
    assert max(off) <= 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_and_vectors_belong_together(shape) -> None:
    weight = gaussian(*shape)
    found = extreme_triplets(weight, {})
    torch.testing.assert_close(weight @ found.right, found.left * found.values, atol=0.05, rtol=0)
    torch.testing.assert_close(found.values.double(), exact(weight).values, rtol=0.02, atol=0)


def test_a_calm_matrix_keeps_its_factorization_and_another_one_is_noticed() -> None:
    memory: dict = {}
    for weight in walk((150, 150), 1e-5, 5):
        extreme_triplets(weight, memory)
    factor = memory["factor"]
    extreme_triplets(walk((150, 150), 1e-5, 6)[-1], memory)
    assert memory["factor"] is factor
    other = gaussian(150, 150, seed=99)
    assert misalignment(extreme_triplets(other, memory), other) <= 1e-3
    assert memory["factor"] is not factor


def test_going_on_from_a_copy_of_the_memory_gives_the_same_bits() -> None:
    weights, memory = walk((150, 150), 1e-3, 8), {}
    for weight in weights[:4]:
        extreme_triplets(weight, memory)
    kept = copy.deepcopy(memory)
    for weight in weights[4:]:
        a, b = extreme_triplets(weight, memory), extreme_triplets(weight, kept)
        assert torch.equal(a.left, b.left) and torch.equal(a.values, b.values)


def test_the_callers_random_numbers_are_not_touched() -> None:
    state = torch.get_rng_state()
    extreme_triplets(gaussian(120, 120), {})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["zero", "identity", "rank 1", "tiny", "huge", "ill"])
def test_degenerate_matrices_give_finite_ends(shape, kind) -> None:
    rank = min(shape)
    ramp = with_values(torch.logspace(0, -9, rank).double().numpy(), *shape).float()
    weight = {
        "zero": torch.zeros(shape),
        "identity": torch.eye(*shape),
        "rank 1": torch.ones(shape),
        "tiny": 1e-18 * gaussian(*shape),
        "huge": 1e17 * gaussian(*shape),
        "ill": ramp,
    }[kind]
    memory: dict = {}
    for _ in range(3):
        found = extreme_triplets(weight, memory)
        assert all(x.isfinite().all() for x in (found.left, found.values, found.right))
    top = torch.linalg.svdvals(weight.double())[0]
    assert float(found.values[0]) == pytest.approx(float(top), rel=0.05, abs=1e-30)
    assert float(found.values[1]) <= float(top) * 1.001


def test_the_bound_is_proven_where_it_holds_with_some_room() -> None:
    for shape in SHAPES:
        weight = with_values(torch.linspace(8, 1, min(shape)).double().numpy(), *shape)
        for dtype in (torch.float32, torch.float64):
            assert within(weight.to(dtype), 9.0, {})
            assert not within(weight.to(dtype), 7.9, {})


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(1.5, 1e4), st.floats(0.8, 1.2))
def test_a_bound_that_does_not_hold_is_never_proven(seed, kappa, factor) -> None:
    size = SVD_UP_TO + 4
    values = torch.logspace(0, -math.log10(kappa), size).double().numpy()
    weight = with_values(values, size, size, seed=seed).float()
    true = torch.linalg.svdvals(weight.double())
    if within(weight, kappa * factor, {}):
        assert true[0] / true[-1] <= kappa * factor * (1 + 1e-6)


class TestStacks:
    """The ends of many square matrices at once."""

    @pytest.mark.parametrize("kappa", [1.5, 1e3, 1e6, 1e9])
    def test_they_are_those_of_each_matrix_alone(self, kappa) -> None:
        values = [torch.logspace(0, -math.log10(kappa), 12, dtype=torch.float64) for _ in "ab"]
        stack = torch.stack([with_values(v.numpy(), 12, 12, seed) for seed, v in enumerate(values)])
        found = extreme_triplets(stack)
        for i, weight in enumerate(stack):
            alone = exact(weight)
            torch.testing.assert_close(found.values[i], alone.values, rtol=1e-6, atol=0)
            for side in ("left", "right"):
                ours, theirs = getattr(found, side)[i], getattr(alone, side)
                cosines = (ours * theirs).sum(0).abs()
                torch.testing.assert_close(cosines, torch.ones(2).double(), rtol=0, atol=1e-6)

    def test_left_and_right_vectors_belong_together(self) -> None:
        stack = torch.stack([gaussian(20, 20, seed=seed).double() for seed in range(5)])
        found = extreme_triplets(stack)
        images = stack @ found.right
        torch.testing.assert_close(images, found.left * found.values[:, None, :])

    @pytest.mark.parametrize("singular", [torch.zeros(4, 4), torch.ones(4, 4)])
    def test_singular_matrices_are_left_to_the_svd(self, singular) -> None:
        stack = torch.stack([torch.eye(4), singular]).double()
        found = extreme_triplets(stack)
        assert found.values[1, 1].abs() < 1e-12
        assert all(x.isfinite().all() for x in (found.left, found.values, found.right))


@pytest.mark.parametrize("size", [8, 32, 64])
def test_a_matrix_has_the_same_ends_to_the_last_bit_in_any_company(size: int) -> None:
    stack = gaussian(9, size, size, seed=1).double()
    stack[3, :, 0] = stack[3, :, 1]  # singular: squaring leaves nothing of its last vector
    together, alone = extreme_triplets(stack), extreme_triplets(stack[5:6])
    for part in ("left", "values", "right"):
        assert torch.equal(getattr(together, part)[5], getattr(alone, part)[0])
    assert together.values[3, 1] < 1e-12


@pytest.mark.parametrize("shape", [(150, 150), (300, 120), (120, 300), (60, 40), (1, 5), (3, 3)])
def test_ends_are_the_outermost_triplets_and_know_how_far_they_are_off(
    shape: tuple[int, int],
) -> None:
    random = torch.Generator().manual_seed(0)
    weight, drift = (torch.randn(shape, generator=random) for _ in range(2))
    memory: tracking.State = {}
    for turn in range(4):
        moved = weight + 0.01 * turn * drift
        found = tracking.ends(moved, memory)
        u, s, vt = torch.linalg.svd(moved.double(), full_matrices=False)
        for i in (0, -1):
            assert float(found.values[i]) == pytest.approx(float(s[i]), rel=1e-4)
            off = 1 - float((vt[i] @ found.right[:, i].double()) ** 2)
            assert max(off, 0.0) ** 0.5 <= float(found.errors[i]) + 1e-3
            assert abs(float(u[:, i] @ found.left[:, i].double())) == pytest.approx(1, abs=0.02)


def test_ends_of_a_matrix_that_is_not_finite_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        tracking.ends(torch.full((120, 120), torch.nan), {})


@pytest.mark.parametrize("shape", [*SHAPES, (5, 7), (3, 4, 6)])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_the_largest_triplet_is_that_of_an_svd_while_the_matrix_moves(shape, scale) -> None:
    memory: dict = {}
    weight = scale * gaussian(*shape)
    for step in range(6):
        u, s, v = largest_triplet(weight, memory)
        exact_s = torch.linalg.svdvals(weight.double())[..., 0]
        torch.testing.assert_close(s.double(), exact_s, rtol=1e-4, atol=0)
        image = (weight @ v[..., None])[..., 0]
        torch.testing.assert_close(image, s[..., None] * u, rtol=0, atol=2e-3 * scale * 3)
        weight = weight + 1e-2 * scale * gaussian(*shape, seed=step + 1)
    form = largest_form(weight)
    assert {k: (v.shape, v.dtype) for k, v in memory.items()} == {
        k: (v.shape, v.dtype) for k, v in form.items()
    }


@pytest.mark.parametrize("shape", [(150, 150), (300, 120), (120, 300)])
@given(low=st.floats(0.05, 0.9), high=st.floats(1.1, 10.0))
@settings(max_examples=15)
def test_what_is_proven_to_be_inside_is_inside(shape, low, high) -> None:
    values = torch.linspace(1.0, 0.1, min(shape), dtype=torch.float64)
    weight = with_values(values.numpy(), *shape).float()
    s = torch.linalg.svdvals(weight.double())
    truth = bool(s[0] <= high and s[-1] >= low)
    near = min(abs(float(s[-1]) / low - 1), abs(float(s[0]) / high - 1)) < 1e-3
    assert lies_between(weight, low, high) == truth or near


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("few", [1, 3, 8])
def test_a_few_small_values_are_raised_and_the_rest_is_kept(shape, few) -> None:
    values = torch.linspace(1.0, 0.2, min(shape), dtype=torch.float64)
    values[-few:] = torch.logspace(-2, -4, few, dtype=torch.float64)
    weight = with_values(values.numpy(), *shape).float()
    memory: dict = {}
    assert not within(weight, 50.0, memory)
    found = lifted(weight, 50.0, 0.05, memory)
    assert found is not None
    s = torch.linalg.svdvals(found.double())
    assert s[0] <= 50.0 * s[-1]
    torch.testing.assert_close(s[: -few - 1], values[: -few - 1], rtol=1e-3, atol=0)
    best = (values.clamp(min=1.05 / 50) - values).norm()  # with the slack
    assert (found.double() - weight.double()).norm() <= 1.2 * best
    form = bound_form(weight)
    assert (memory["top"].shape, memory["top"].dtype) == (form["top"].shape, form["top"].dtype)


def test_many_small_values_are_left_to_the_svd() -> None:
    values = torch.linspace(1.0, 1e-4, 150, dtype=torch.float64)
    assert lifted(with_values(values.numpy(), 150, 150).float(), 11.0, 0.05, {}) is None
    assert lifted(torch.eye(150), 5.0, 0.05, {}) is None  # a small kappa


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7), (3, 6, 4), (150, 120)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_values_above_a_limit_are_lowered_to_it_and_no_other_moves(shape, scale) -> None:
    weight = scale * gaussian(*shape)
    u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    limit = s[..., 1]
    found = lowered(weight, limit).double()
    expected = (u * torch.minimum(s, limit[..., None])[..., None, :]) @ vt
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale)
    assert torch.equal(lowered(weight, 2 * s[..., 0]), weight)
