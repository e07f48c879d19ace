"""Both ends of a spectrum from float32: against float64 SVDs, or refused."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

import hard_matrices
from kappascope.matrix import ends
from kappascope.matrix._gram import Unresolved
from kappascope.matrix.ends import both_ends
from kappascope.matrix.spectra import scaled_to_one

THRESHOLD = 0.01


def tall(matrix: torch.Tensor) -> torch.Tensor:
    return scaled_to_one(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT)[0]


def check(a: torch.Tensor) -> None:
    """Each value to eight digits or so, the count exactly, vectors as well as they say."""
    extremes, found = both_ends(a, THRESHOLD)
    u, s, vt = scipy.linalg.svd(a.numpy(), full_matrices=False)
    for value, exact in zip(
        (extremes.largest, extremes.second, extremes.smallest), s[[0, 1, -1]], strict=True
    ):
        assert math.isclose(value, exact, rel_tol=2e-8)
    assert extremes.below == (s <= THRESHOLD * s[0]).sum()
    for i in (0, -1):
        right, left = (
            abs(vt[i] @ found.right[:, i].numpy()),
            abs(u[:, i] @ found.left[:, i].numpy()),
        )
        off = math.sqrt(max(0.0, 1 - min(right, left) ** 2))
        assert off <= float(found.errors[i]) + 1e-7 or _is_double(s, i)
        assert math.isclose(float(found.values[i]), s[i], rel_tol=2e-8)


def _is_double(s: np.ndarray, i: int) -> bool:
    """Whether the next value is so near that the vectors are nobody's."""
    return bool(abs(s[i] - s[1 if i == 0 else -2]) < 1e-6 * s[0])


@pytest.mark.parametrize("shape", [(128, 128), (400, 128), (301, 300), (2000, 64)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_matrices_are_not_refused(shape: tuple[int, int], seed: int) -> None:
    check(tall(hard_matrices.gaussian(*shape, seed=seed)))


@pytest.mark.parametrize("name", hard_matrices.zoo(160))
def test_what_is_not_refused_is_right(name: str) -> None:
    a = tall(hard_matrices.zoo(160)[name]())
    try:
        check(a)
    except Unresolved:
        s = scipy.linalg.svdvals(a.numpy())
        squares, blur = (s / s[0]) ** 2, 2 * ends.BLUR
        is_crowded = min(squares[0] - squares[4], squares[-5] - squares[-1]) < 2 * blur
        is_small = s[-1] < 1e-3 * s[0]
        assert is_crowded or is_small, name


@pytest.mark.parametrize("width", [0, 1e-9, 1e-7, 1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("count", [2, 4, 5, 6, 20])
@pytest.mark.parametrize("at", [3.0, 0.3, 0.0099, 1e-5])
def test_clusters_are_told_or_refused(at: float, count: int, width: float) -> None:
    try:
        check(tall(hard_matrices.cluster_at(160, count, at, width)))
    except Unresolved:
        assert count >= ends.BLOCK_VECTORS or at < 1e-3 or width < 1e-2


@pytest.mark.parametrize("offset", [-1e-2, -1e-3, -1e-5, 1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("shape", [(150, 150), (400, 150)], ids=str)
def test_a_value_near_the_threshold_is_counted_exactly(shape, offset: float) -> None:
    values = np.r_[np.linspace(1, 0.1, 145), THRESHOLD * (1 + offset), [4e-3, 3e-3, 2e-3, 1e-3]]
    check(tall(hard_matrices.with_values(values, *shape)))


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_no_size_is_too_small_or_too_large(scale: float) -> None:
    check(tall(hard_matrices.gaussian(150, 140) * scale))


def test_a_value_hidden_by_float32_is_found_or_refused() -> None:
    """A bottom that float32 cannot see, beneath more values than a block has vectors."""
    for kappa in (1e4, 1e6, 1e8, 1e10):
        for crowd in (3, 4, 5, 6, 12):
            values = np.r_[np.linspace(1, 0.1, 140 - crowd), np.full(crowd, 3e-4), 1 / kappa]
            try:
                check(tall(hard_matrices.with_values(values, 160, 141)))
            except Unresolved:
                continue


def test_ends_of_the_transpose_change_sides() -> None:
    _, found = both_ends(tall(hard_matrices.gaussian(150, 140)), THRESHOLD)
    assert torch.equal(found.transposed().left, found.right)
    assert torch.equal(found.transposed().transposed().left, found.left)


@pytest.mark.parametrize("kappa", [1e5, 1e7, 1e9, 1e11])
def test_the_largest_values_take_no_digit_of_the_smallest(kappa: float) -> None:
    """Both ends are taken in one pass, whose rounding is relative to the largest value."""
    values = np.r_[np.linspace(2, 1, 150), 10 / kappa, 4 / kappa, 2 / kappa, 1 / kappa]
    for a in (np.diag(values), hard_matrices.with_values(values, 300, len(values)).numpy()):
        try:
            check(tall(torch.from_numpy(a)))
        except Unresolved:
            assert a.shape[0] == 300
