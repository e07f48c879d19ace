"""Krylov spaces on their own: clusters around the block size, counts near the threshold."""

import math
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hard_matrices
from kappascope.matrix import _krylov, spectra
from kappascope.matrix._gram import (
    BLOCK_SIZE,
    Gram,
    Panels,
    Unresolved,
    count_below,
    count_below_in_float32,
    gram,
)
from kappascope.matrix._krylov import Ritz, Space, Triplets
from kappascope.matrix.spectra import Method
from method_limits import limits

N = 160


def reference(matrix: Tensor) -> np.ndarray:
    return scipy.linalg.svdvals(matrix.double().numpy())


@pytest.fixture(params=[1800, 64], ids=["float32 only", "float64 too"])
def fast(request) -> Iterator[None]:
    """Krylov spaces from 65 columns on; with and without the attempt in float64."""
    with limits({Method.SVD: 32, Method.BISECTION: 64, Method.KRYLOV_FLOAT32: request.param}):
        yield


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("width", [0, 1e-9, 1e-7, 1e-5, 1e-2])
@pytest.mark.parametrize("count", [8, 15, 16, 17, 33, 65])
@pytest.mark.parametrize("at", [3.0, 0.3, 0.0099, 1e-5])
def test_clusters_of_every_size_at_either_end(at, count, width) -> None:
    """At the top, at the bottom, just below the threshold and far below it."""
    matrix = hard_matrices.cluster_at(N, count, at, width)
    found, s = spectra.vitals(matrix), reference(matrix)
    for name, value in (("sigma_max", s[0]), ("sigma_2", s[1]), ("sigma_min", s[-1])):
        assert math.isclose(getattr(found, name), value, rel_tol=5e-8), name
    assert found.effective_rank == (s > 0.01 * s[0]).sum()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("certify", [False, True], ids=["verified", "certified"])
@pytest.mark.parametrize("spread", [1e-2, 1e-5, 1e-7, 1e-8, 1e-10])
@pytest.mark.parametrize("count", [1, 20, 70])
def test_values_on_both_sides_of_the_threshold_are_counted_right(count, spread, certify) -> None:
    sides = 0.01 * (1 + spread * np.linspace(-1, 1, 2 * count))
    matrix = hard_matrices.with_values(np.r_[np.linspace(1, 0.5, N - 2 * count), sides[::-1]], N, N)
    assert spectra.vitals(matrix, certify).effective_rank == N - count


def test_a_count_that_the_error_of_the_threshold_could_change_is_refused() -> None:
    a = hard_matrices.with_values(np.linspace(1, 0.1, N), N, N)
    assert count_below(Gram(a, torch.float64), 0.5001) == (np.linspace(1, 0.1, N) < 0.5001).sum()
    for distance in (1e-8, 1e-10, 0):
        with pytest.raises(Unresolved, match=r"at the threshold|within rounding"):
            count_below(Gram(a, torch.float64), float(np.linspace(1, 0.1, N)[60]) * (1 + distance))


def at_the_threshold(kind: str, x: float) -> np.ndarray:
    """Values of which none, one, eight or forty lie within x of 0.01."""
    if kind in ("dense", "power law"):
        return np.linspace(1, 1e-3, N) if kind == "dense" else np.arange(1, N + 1) ** -0.9
    near = {
        "one": [0.01 * (1 + x)],
        "both sides": [0.01 * (1 + x), 0.01 / (1 + x)] * 4,
        "cluster": [0.01 * (1 + x)] * 40,
    }[kind]
    return np.r_[np.linspace(1, 0.1, N - len(near)), near]


@pytest.mark.parametrize("shape", [(N, N), (3 * N, N)])
@pytest.mark.parametrize("distance", [0.3, 1e-2, -1e-2, 1e-4, -1e-4, 1e-6, -1e-6, 1e-9])
@pytest.mark.parametrize("kind", ["dense", "power law", "one", "both sides", "cluster"])
def test_a_count_in_float32_is_right_or_is_not_given(kind, distance, shape) -> None:
    a = hard_matrices.with_values(at_the_threshold(kind, distance), *shape)
    found, s = count_below_in_float32(Gram(a, torch.float32), 0.01), reference(a)
    assert found in (None, (s <= 0.01).sum())
    if kind in ("dense", "power law") or abs(distance) > 1e-3:
        assert found is not None
    elif abs(distance) < 1e-5:
        assert found is None, "float32 cannot know"


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gram_is_the_lower_triangle_of_the_square(order, dtype) -> None:
    a = hard_matrices.gaussian(50, 30).to(dtype)
    a = a if order == "rows" else a.mT.contiguous().mT
    torch.testing.assert_close(gram(a), (a.mT @ a).tril(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(150, 150), (300, 150)])
@pytest.mark.parametrize("wanted", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_the_smallest_values_are_found_from_the_matrix_itself(shape, wanted, size) -> None:
    """Of a tall one from its triangle: its Gram matrix would not have them."""
    small = size * np.linspace(2, 1, wanted)
    a = hard_matrices.with_values(np.r_[np.linspace(1, 0.1, 150 - wanted), small], *shape)
    np.testing.assert_allclose(_krylov.smallest(a, wanted), reference(a)[-wanted:], rtol=1e-9)


@pytest.mark.parametrize(("least", "hopeless"), [(1e-2, False), (1e-5, False), (1e-9, True)])
def test_pivots_tell_what_no_polish_will_find(least, hopeless) -> None:
    a = hard_matrices.with_values(np.r_[np.linspace(1, 0.1, 99), least], 100, 100)
    assert _krylov.hopeless(gram(a)) == hopeless


def test_pivots_tell_of_more_blurred_values_than_can_be_polished() -> None:
    assert _krylov.hopeless(gram(hard_matrices.with_values(np.geomspace(1, 1e-6, 200), 200, 200)))


def test_more_small_values_than_fit_a_block_are_left_to_the_svd() -> None:
    with pytest.raises(Unresolved, match="more small values"):
        _krylov.smallest(torch.eye(100, dtype=torch.float64), _krylov.MAX_COUNTED + 1)


@pytest.mark.parametrize("shape", [(150, 150), (300, 150)])
def test_a_singular_matrix_is_left_to_the_svd(shape) -> None:
    a = hard_matrices.with_values(np.linspace(1, 0.1, 149), *shape)
    with pytest.raises(Unresolved):
        _krylov.smallest(a, 1)


def extremes(matrix: Tensor) -> _krylov.Extremes:
    """Both ends in float32, as of matrices of this size."""
    return _krylov.extremes(matrix, 0.01, certify=False, precisions=[torch.float32])


def test_a_lower_end_is_left_to_other_methods_where_it_is_too_dense() -> None:
    assert "Davidson float32" in extremes(hard_matrices.power_law(800)).method
    dense = hard_matrices.with_values(0.2 + 0.8 * np.linspace(1, 0, 800) ** 4, 800, 800)
    with pytest.raises(Unresolved, match="many close values") as outcome:
        extremes(dense)
    assert outcome.value.crowded and not outcome.value.blurred


def test_what_a_check_refuses_at_full_precision_is_not_tried_again_and_again() -> None:
    """The inverse knows a value of 1e-11 to a few digits only, and holds them all for right."""
    a = hard_matrices.with_values(np.r_[np.linspace(2, 1, N - 1), 1e-11], N, N)
    square = Gram(a, torch.float64)
    inverse = mock.Mock(side_effect=square.inverse)
    with mock.patch.object(Gram, "inverse", inverse), pytest.raises(Unresolved):
        _krylov._polish(square, hard_matrices.gaussian(N, 8), 1)
    assert inverse.call_count < 6


def test_a_crowded_tall_matrix_is_not_taken_for_converged() -> None:
    """Errors of a Cholesky factor, squared by it, once passed for digits here."""
    matrix = hard_matrices.crowded(325, 244, 2e-4, 3e5)
    with limits({Method.SVD: 32, Method.BISECTION: 64, Method.KRYLOV_FLOAT32: 64}):
        found, s = spectra.vitals(matrix), reference(matrix)
    assert math.isclose(found.condition_number, s[0] / s[-1], rel_tol=1e-8)


@given(seed=st.integers(0, 10**6), spacing=st.floats(-6, -1), wanted=st.sampled_from([1, 2, 5]))
def test_the_error_bound_of_values_in_a_group_holds(seed, spacing, wanted) -> None:
    """Of ten large eigenvalues, close or not, in a Krylov space on its way to them."""
    random, size, group = np.random.default_rng(seed), 200, 10
    large = 2 - 10.0**spacing * np.sort(random.random(group))
    values = np.r_[large, np.sort(random.uniform(-1, 1, size - group))[::-1]]
    a = torch.diag(torch.from_numpy(values))
    space = Space(lambda x: a @ x, a, 8)
    for steps in range(2, 9):
        space.grow(steps)
        ritz = space.ritz(16)
        error = np.abs(values[:wanted] - ritz.values[:wanted]).max() / values[wanted - 1]
        residual = np.linalg.norm(ritz.residuals[:wanted]) / ritz.values[wanted - 1]
        assert error < ritz.uncertainty(wanted) + 1e-13
        assert ritz.uncertainty(wanted) < residual * (1 + 1e-12)


def crowds() -> dict[str, np.ndarray]:
    """Spectra whose smallest values lie close together."""
    size = 2 * N
    places = np.arange(1, size + 1)
    return {
        **{f"power law {power}": places**-power for power in (0.3, 0.8, 1.5)},
        **{f"geometric {kappa:.0e}": np.geomspace(1, 1 / kappa, size) for kappa in (10, 1e3, 1e5)},
        "pairs": np.repeat(places[: size // 2] ** -0.5, 2),
        "even": np.r_[4.0, 3.0, np.linspace(2, 1, size - 2)],
        "one value": np.r_[4.0, 3.0, 2.0, np.ones(size - 3)],
        "a cluster": np.r_[places[: size - 40] ** -0.1, [0.02] * 40],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2 * N, 2 * N), (5 * N, 2 * N)], ids=["square", "tall"])
@pytest.mark.parametrize("name", crowds())
def test_the_smallest_of_a_crowd_is_right_or_is_not_given(name, shape, dtype) -> None:
    values = crowds()[name]
    a = hard_matrices.with_values(values, *shape)
    square = Gram(a, dtype)
    begun = _krylov._first_steps(Gram(a, torch.float64))
    assert begun is not None
    try:
        found = _krylov._crowd(square, begun, float(values[0]))
    except Unresolved:
        assert dtype == torch.float32 and values[0] / values[-1] > 1e3, "float64 has the digits"
    else:
        assert math.isclose(found.values[0], reference(a)[-1], rel_tol=1e-8)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("certify", [False, True], ids=["verified", "certified"])
@pytest.mark.parametrize("name", crowds())
def test_vitals_of_a_crowd(name, certify) -> None:
    a = hard_matrices.with_values(crowds()[name], 2 * N, 2 * N)
    found, s = spectra.vitals(a, certify), reference(a)
    assert math.isclose(found.condition_number, s[0] / s[-1], rel_tol=1e-8)
    assert found.effective_rank == (s > 0.01 * s[0]).sum()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("across", [False, True], ids=["rows", "columns"])
def test_a_crowd_in_panels(across: bool) -> None:
    """As large matrices come, of which no copy is made."""
    a = hard_matrices.power_law(2 * N).float()
    a = a.mT.contiguous().mT if across else a
    with mock.patch.object(spectra, "MAX_COPY_BYTES", 0):
        found = spectra.vitals(a)
    s = reference(a)
    assert "Davidson" in found.method
    assert math.isclose(found.condition_number, s[0] / s[-1], rel_tol=1e-8)
    assert found.effective_rank == (s > 0.01 * s[0]).sum()


def test_the_gram_matrix_of_what_is_not_copied_needs_no_copy() -> None:
    a = hard_matrices.gaussian(N)
    square = Gram(Panels(a, exponent=0), torch.float64)
    torch.testing.assert_close(square.lower, (a.mT @ a).tril())
    assert "operand" not in vars(square)


def test_corrections_without_a_useful_inverse_end_soon() -> None:
    a, start = sighted(np.linspace(2, 1, 400), BLOCK_SIZE)
    with pytest.raises(Unresolved, match="many close values"):
        _krylov._davidson(a, 0.9, lambda x: torch.flip(x, [0]), start)


def test_corrections_from_above_the_smallest_value_end() -> None:
    a, start = sighted(np.linspace(2, 1, 400), BLOCK_SIZE)
    with pytest.raises(Unresolved, match="many close values"):
        _krylov._davidson(a, 1.001, lambda x: x, start)


def test_a_crowd_that_is_found_at_once_leaves_no_residual_to_divide_by() -> None:
    """Of a diagonal matrix unit vectors are exact, and what they leave is zero."""
    a = torch.diag(torch.cat([torch.tensor([4.0, 3.0]), torch.ones(98)])).double()
    found = _krylov._davidson(a, 0.5, lambda x: x, torch.eye(100)[:, -BLOCK_SIZE:])
    assert found == 1


def test_what_lies_below_an_unconverged_value_is_no_gap() -> None:
    """Six of a cluster of many, the others still on their way up: nothing separates them yet."""
    early = Ritz([1.0] * 6 + [0.99, 0.98], [1e-6] * 6 + [0.1, 0.1])
    late = Ritz([1.0] * 6 + [0.99, 0.98], [1e-6] * 6 + [1e-6, 0.1])
    assert early.uncertainty(1) == pytest.approx(1e-6)
    assert late.uncertainty(1) < 1e-8


def sighted(values: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and about its last right vectors, in float32."""
    size = len(values)
    a = hard_matrices.with_values(values, size, size)
    last = torch.linalg.svd(a)[2][-count:].mT
    return a, (last + 1e-3 * hard_matrices.gaussian(size, count, 5) / size**0.5).float()


@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e6])
def test_corrections_reach_float64_with_float32_factors(kappa: float) -> None:
    values = np.geomspace(1, 1 / kappa, 60)
    a, start = sighted(values, 24)
    square = Gram(a, torch.float32)
    cut = math.sqrt(values[-16] * values[-17])
    triplets, below = _krylov.last_triplets(square, Triplets.within(a, start), cut)
    assert math.isclose(float(triplets.values[-1]), reference(a)[-1], rel_tol=1e-8)
    assert below == 16


def test_corrections_give_up_when_factors_have_no_digits() -> None:
    a, start = sighted(np.geomspace(1, 1e-4, 60), 8)
    noise = hard_matrices.gaussian(60, 8, 6)
    with (
        mock.patch.object(Gram, "scaled_inverse", lambda self, x: 1e4 * noise),
        pytest.raises(Unresolved, match="residual of the smallest"),
    ):
        _krylov.last_triplets(Gram(a, torch.float32), Triplets.within(a, start), None)


def test_what_cannot_be_counted_is_not() -> None:
    values = np.geomspace(1, 1e-3, 60)
    a, start = sighted(values, 24)
    cut = float(reference(a)[-16])  # to the last digit, as near as float64 has it
    triplets, below = _krylov.last_triplets(Gram(a, torch.float32), Triplets.within(a, start), cut)
    assert math.isclose(float(triplets.values[-1]), reference(a)[-1], rel_tol=1e-8)
    assert below is None
