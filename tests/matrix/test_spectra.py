"""Spectra against high precision, float64 SVDs, and properties that hold for every matrix."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import hard_matrices
from kappascope import Components
from kappascope.matrix import _gram, spectra
from kappascope.matrix.spectra import Method, Vitals, singular_values, spectrum, vitals
from method_limits import limits

EPS = torch.finfo(torch.float64).eps
SMALLER = {  # than the limits as they are, so that less time is spent on large matrices
    Method.STACKED_SVD: 192,
    Method.SVD: 192,
    Method.PIVOTS_THEN_BISECTION: 320,
    Method.BISECTION: 896,
    Method.GRAM: 1024,
}
KRYLOV = {Method.SVD: 32, Method.BISECTION: 64}  # small matrices go the way of large ones
USUAL = (spectra.ALL_VALUES, spectra.EXTREMES)


@pytest.fixture(autouse=True)
def smaller() -> Iterator[None]:
    with limits(SMALLER):
        yield


# --- oracles --------------------------------------------------------------------------------------


def reference(matrix: Tensor) -> np.ndarray:
    """Singular values by LAPACK's sturdier driver in float64; the scale is taken out and put back.

    Values beyond float64's range come out as zero or infinity.
    """
    a = matrix.double().numpy()
    _, exponent = np.frexp(np.abs(a).max())
    unit = np.ldexp(a, -int(exponent))
    values = scipy.linalg.svd(unit, compute_uv=False, lapack_driver="gesvd")
    return np.ldexp(values, int(exponent))


def backward_error(matrix: Tensor, values: Tensor) -> float:
    """How far the nearest matrix with these singular values is, in units of rounding."""
    a, exponent = spectra.scaled_to_one(matrix)
    s = spectra.ldexp(values, -exponent).numpy()
    u, _, vt = scipy.linalg.svd(a.numpy(), full_matrices=False, lapack_driver="gesvd")
    distance = np.linalg.norm(a.numpy() - (u * s) @ vt, 2)
    return distance / (max(a.shape) * EPS * s[0]) if s[0] else distance


def close(found: float, wanted: float, relative: float) -> bool:
    return math.isclose(found, wanted, rel_tol=relative, abs_tol=0)


def check(found: Vitals, matrix: Tensor, relative: float = 5e-8) -> None:
    """Every vital against the float64 SVD, as far as float64 itself can know it."""
    s = reference(matrix)
    blur = max(matrix.shape) * EPS * s[0]
    assert found.status.startswith("ok"), found.status
    assert close(found.sigma_max, s[0], relative)
    assert abs(found.sigma_2 - s[1]) <= relative * s[1] + blur
    assert abs(found.sigma_min - s[-1]) <= relative * s[-1] + blur
    assert abs(found.spectral_gap - (s[0] - s[1]) / s[0]) <= 2 * relative
    if s[-1] > 3 * blur:
        assert close(found.condition_number, s[0] / s[-1], relative + 2 * blur / s[-1])
    elif s[-1] < blur / 3:
        assert found.condition_number == math.inf and "numerically singular" in found.status
    assert 1 <= found.condition_number_low <= found.condition_number <= found.condition_number_high
    # Within 1e-11 of the threshold float64 does not know on which side a value is.
    ranks = [int((s > 0.01 * s[0] * (1 + side)).sum()) for side in (1e-11, -1e-11)]
    assert ranks[0] <= found.effective_rank <= ranks[1]
    a = matrix.double()
    np.testing.assert_allclose(found.row_norms, norms(a), rtol=1e-12)
    np.testing.assert_allclose(found.column_norms, norms(a.mT), rtol=1e-12)
    assert close(found.frobenius_norm, norms(a.reshape(1, -1))[0], 1e-12)


def norms(rows: Tensor) -> np.ndarray:
    """Euclidean norm of each row, without overflow."""
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)
    return (torch.linalg.vector_norm(rows / largest, dim=1) * largest[:, 0]).numpy()


@pytest.fixture
def fast() -> Iterator[None]:
    """Krylov spaces from 65 columns on, so that small matrices go the way of large ones."""
    with limits(KRYLOV):
        yield


# --- known answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 60, 210])
def test_the_identity_has_one_singular_value_and_kappa_one(n) -> None:
    assert torch.equal(spectrum(torch.eye(n)).values, torch.ones(n, dtype=torch.float64))
    found = vitals(torch.eye(n))
    assert (found.condition_number, found.effective_rank, found.spectral_gap) == (1, n, 0)


def test_a_zero_matrix_is_degenerate_and_has_no_condition_number() -> None:
    found = vitals(torch.zeros(4, 6))
    assert found.status.startswith("degenerate") and found.condition_number is None
    assert (found.sigma_max, found.frobenius_norm, found.effective_rank) == (0, 0, 0)
    assert spectrum(torch.zeros(4, 6)).status == "degenerate: zero matrix"
    assert torch.equal(spectrum(torch.zeros(4, 6)).values, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_is_degenerate(shape) -> None:
    found = vitals(torch.zeros(shape))
    assert found.status == "degenerate: empty matrix" and found.condition_number is None
    assert len(found.row_norms) == shape[0] and len(found.column_norms) == shape[1]
    assert spectrum(torch.zeros(shape)).values.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_a_single_row_or_column_has_its_norm_as_only_value(shape) -> None:
    matrix = torch.full(shape, -2.0)
    found = vitals(matrix)
    assert close(found.sigma_max, 2 * math.sqrt(matrix.numel()), 1e-15)
    assert (found.condition_number, found.effective_rank, found.sigma_2) == (1, 1, 0)
    assert "a single singular value" in found.status
    assert len(spectrum(matrix).values) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 200])
@pytest.mark.parametrize(
    ("build", "rank"),
    [
        (lambda n: torch.full((n, n), 0.1), 1),
        (lambda n: torch.outer(torch.arange(1.0, n + 1), torch.arange(1.0, n + 1)), 1),
        (lambda n: torch.eye(n)[[*range(n - 1), 0]], None),
    ],
    ids=["constant", "rank 1", "duplicate rows"],
)
def test_a_singular_matrix_has_infinite_kappa_and_says_so(build, rank, n, dtype) -> None:
    found = vitals(build(n).to(dtype))
    assert found.condition_number == found.condition_number_high == math.inf
    assert "numerically singular" in found.status and not found.resolved
    assert found.condition_number_low > 50
    assert found.effective_rank == (rank or n - 1)


# --- bad input ------------------------------------------------------------------------------------

SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "one NaN": lambda a: a.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan)),
    "one Inf": lambda a: a.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.inf)),
    "one -Inf": lambda a: a.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(-math.inf)),
    "last row": lambda a: torch.cat([a[:-1], torch.full_like(a[-1:], math.nan)]),
    "all NaN": lambda a: torch.full_like(a, math.nan),
}


@pytest.mark.parametrize("shape", [(3, 3), (64, 48), (48, 64), (210, 210), (1000, 1000)])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_not_finite_is_counted_and_not_analysed(spoil, shape) -> None:
    matrix = spoil(torch.ones(shape))
    status = f"failed: non-finite ({int((~matrix.isfinite()).sum())} of {matrix.numel()})"
    assert spectrum(matrix).status == status and spectrum(matrix).values.numel() == 0
    for certify in (False, True):
        found = vitals(matrix, certify)
        assert found.status == status and found.sigma_max is found.condition_number is None


@pytest.mark.parametrize("n", [3, 200])
def test_a_spoiled_matrix_does_not_spoil_its_stack(n) -> None:
    stack = hard_matrices.gaussian(n).repeat(3, 1, 1)
    stack[1, 0, 0] = math.inf
    values = singular_values(stack)
    assert values[1].isnan().all()
    assert torch.equal(values[0], singular_values(stack[0])) and torch.equal(values[0], values[2])


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 3)])
def test_what_is_no_matrix_is_refused(shape) -> None:
    for method in (spectrum, vitals):
        with pytest.raises(ValueError, match="expected a matrix"):
            method(torch.ones(shape))


@pytest.mark.parametrize("threshold", [-0.1, 1.0, math.nan])
def test_a_threshold_that_is_no_share_is_refused(threshold) -> None:
    with pytest.raises(ValueError, match=r"expected a threshold in \[0, 1\)"):
        vitals(torch.eye(2), threshold=threshold)


FLOATS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("n", [2, 200])
def test_every_real_type_is_cast_up(dtype, n) -> None:
    matrix = (torch.eye(n) * 3 + torch.eye(n).roll(1, 0)).to(dtype)
    assert backward_error(matrix.double(), spectrum(matrix).values) < 50
    check(vitals(matrix), matrix)


def test_booleans_are_zeros_and_ones() -> None:
    assert vitals(torch.eye(3, dtype=torch.bool)).condition_number == 1


def test_arrays_are_taken_too() -> None:
    assert vitals(np.diag([3.0, 1.0])).condition_number == 3


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.eye(3, device="meta"),
        torch.ones(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.empty(3, 2, dtype=torch.uint4),
    ],
    ids=["complex", "sparse", "meta", "four bits", "other four bits"],
)
def test_what_has_no_real_entries_at_hand_is_not_analysed(matrix) -> None:
    for found in (spectrum(matrix), vitals(matrix)):
        assert found.status.startswith("failed:") and found.status.endswith("is not analysed")
    with pytest.raises(ValueError, match=r"expected dense real matrices, got .*; convert first"):
        Components(matrix)


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested tensors are a prototype
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # quantized ones will go
def test_neither_are_quantized_and_nested_tensors() -> None:
    quantized = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    assert vitals(quantized).status == "failed: qint8 strided on cpu is not analysed"
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.eye(3), torch.eye(3)[:2]], layout=layout)
        with pytest.raises(ValueError, match="expected a matrix, got a nested tensor"):
            vitals(nested)
        with pytest.raises(ValueError, match="expected dense real matrices, got a nested tensor"):
            Components(nested)


# --- all values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (16, 16), (64, 48), (48, 64), (200, 10)])
@pytest.mark.parametrize("kind", range(1, 17))
def test_the_matrices_of_dchkbd_have_a_small_backward_error(kind, shape, dtype) -> None:
    matrix = hard_matrices.dchkbd(kind, *shape, dtype)
    assert backward_error(matrix, spectrum(matrix).values) < 50


HARD: dict[str, Callable[[], Tensor]] = {
    "graded": lambda: hard_matrices.with_values(np.geomspace(1, 1e-30, 20), 24, 20),
    "graded rows": lambda: (
        hard_matrices.gaussian(20) * torch.logspace(0, -30, 20).double()[:, None]
    ),
    "clustered at ulp": lambda: hard_matrices.with_values(1 + EPS * np.arange(20), 20, 20),
    "hilbert": lambda: torch.from_numpy(scipy.linalg.hilbert(12)),
    "kahan": lambda: hard_matrices.kahan(90),
    "vandermonde": lambda: torch.from_numpy(np.vander(np.linspace(-1, 1, 24), 20)),
    "companion": lambda: torch.from_numpy(scipy.linalg.companion(np.poly(np.arange(1, 17)))),
    "wilkinson": lambda: hard_matrices.wilkinson(21),
    "wilkinson growth": lambda: hard_matrices.wilkinson_growth(24),
    "toeplitz": lambda: torch.from_numpy(scipy.linalg.toeplitz(0.9 ** np.arange(24))),
    "jordan": lambda: hard_matrices.jordan(20, 0.5),
}


@cache
def exact(name: str) -> np.ndarray:
    """Singular values with thirty digits."""
    with mpmath.workdps(30):
        values = mpmath.svd_r(mpmath.matrix(HARD[name]().tolist()), compute_uv=False)
        return np.array(sorted(map(float, values), reverse=True))


@pytest.mark.parametrize("name", HARD)
def test_hard_matrices_agree_with_thirty_digits(name) -> None:
    matrix = HARD[name]()
    tolerance = 50 * max(matrix.shape) * EPS * exact(name)[0]
    np.testing.assert_allclose(spectrum(matrix).values, exact(name), rtol=0, atol=tolerance)
    found = vitals(matrix)
    assert close(found.sigma_max, exact(name)[0], 1e-13)
    assert abs(found.sigma_min - exact(name)[-1]) < tolerance


@pytest.mark.parametrize("name", hard_matrices.zoo(210))
def test_all_values_of_the_zoo_have_a_small_backward_error(name) -> None:
    matrix = hard_matrices.zoo(210)[name]()
    assert backward_error(matrix, spectrum(matrix).values) < 50


@pytest.mark.parametrize("shape", [(210, 210), (210, 400), (400, 210)])
@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6, 1e-9])
def test_the_values_that_squaring_blurs_are_sharp(shape, small) -> None:
    values = np.r_[np.linspace(1, 0.1, 207), small * np.array([3.0, 2.0, 1.0])]
    matrix = hard_matrices.with_values(values, *shape)
    s = spectrum(matrix).values
    np.testing.assert_allclose(s, reference(matrix), rtol=1e-8, atol=10 * EPS)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 4, 5), (2, 200, 210), (0, 3, 3), (2, 0, 3)])
def test_a_stack_gives_what_its_matrices_give_alone(shape) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    together = singular_values(stack)
    assert together.shape == (*shape[:-2], min(shape[-2:]))
    for index in np.ndindex(shape[:-2]):
        assert torch.equal(together[index], singular_values(stack[index]))


# --- the fast way ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("certify", [False, True], ids=["verified", "certified"])
@pytest.mark.parametrize(
    "name", [name for name in hard_matrices.zoo(208) if not name.endswith("scale")]
)
def test_the_zoo_in_float32(name, certify) -> None:
    matrix = hard_matrices.zoo(208)[name]().float()
    found = vitals(matrix, certify)
    check(found, matrix)
    assert "certified" in found.status or not certify


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", hard_matrices.zoo(208))
def test_the_zoo_in_float64_with_both_precisions_tried(name) -> None:
    matrix = hard_matrices.zoo(208)[name]()
    with limits({Method.KRYLOV_FLOAT32: 64}):
        check(vitals(matrix), matrix)


@pytest.fixture
def quick() -> Iterator[None]:
    """Float32 first for matrices of every size that have a tridiagonal form to bisect."""
    small = limits({Method.SVD: 16, Method.PIVOTS_THEN_BISECTION: 320})
    with small, mock.patch.object(spectra, "MIN_QUICK_ENTRIES", 0):
        yield


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [name for name in hard_matrices.zoo(130) if not name.endswith("scale")]
)
def test_the_zoo_quickly(name, dtype) -> None:
    matrix = hard_matrices.zoo(130)[name]().to(dtype)
    check(spectra.quick_vitals(matrix)[0], matrix)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("scale", [1e-300, 1e-38, 1e38, 1e300])
def test_quick_vitals_know_no_scale(scale) -> None:
    matrix = hard_matrices.gaussian(90, 70) * scale
    found, ends = spectra.quick_vitals(matrix)
    check(found, matrix)
    assert ends is not None
    np.testing.assert_allclose(ends.values[[0, -1]], reference(matrix)[[0, -1]], rtol=1e-7)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("shape", [(90, 70), (70, 90), (400, 60), (60, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_quick_vectors_are_those_of_the_matrix_given(shape, dtype) -> None:
    matrix = hard_matrices.gaussian(*shape).to(dtype)
    found, ends = spectra.quick_vitals(matrix)
    assert ends is not None and ends.left.dtype == torch.promote_types(dtype, torch.float32)
    held = matrix.to(ends.right.dtype)
    np.testing.assert_allclose(held @ ends.right, ends.left * ends.values, atol=1e-4)
    assert close(float(ends.values[0]), found.sigma_max, 1e-6)
    assert close(float(ends.values[-1]), found.sigma_min, 1e-6)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("given", [torch.zeros(40, 40), torch.ones(40, 40), torch.eye(40).int()])
def test_what_has_no_quick_way_goes_the_usual_one(given) -> None:
    found, ends = spectra.quick_vitals(given)
    usual = vitals(given)
    assert ends is None and (found.sigma_max, found.status) == (usual.sigma_max, usual.status)


def test_quick_vitals_of_what_is_not_finite_say_so() -> None:
    broken = hard_matrices.gaussian(400).index_fill(0, torch.tensor([7]), math.nan)
    found, ends = spectra.quick_vitals(broken)
    assert ends is None and found.status.startswith("failed: non-finite")


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kappa", [1e1, 1e3, 1e5, 1e7])
@pytest.mark.parametrize("shape", [(70, 69), (90, 70), (300, 90), (3, 4000), (2000, 70)], ids=str)
def test_tall_and_wide_matrices(shape, kappa) -> None:
    p = min(shape)
    for values in hard_matrices.graded(max(p, 50), kappa).values():
        matrix = hard_matrices.with_values(np.sort(values)[::-1][-p:], *shape).float()
        check(vitals(matrix), matrix)


REAL: dict[str, Callable[[], Tensor]] = {
    "gaussian": lambda: hard_matrices.gaussian(1000),
    "spiked": lambda: hard_matrices.spiked(1000),
    "power law": lambda: hard_matrices.power_law(950),
    "threshold": lambda: hard_matrices.at_threshold(950, 1e-4),
    "bottom cluster": lambda: hard_matrices.cluster_at(950, 80, 1e-4, 1e-6),
    "one row more": lambda: hard_matrices.gaussian(1001, 1000),
    "tall": lambda: hard_matrices.gaussian(3000, 920),
    "wide": lambda: (
        hard_matrices.gaussian(920, 2000) * hard_matrices.gaussian(920, 1, seed=5).exp()
    ),
    "product": lambda: hard_matrices.product(1000, 2),
}


@pytest.mark.parametrize("name", REAL)
def test_matrices_of_real_size(name) -> None:
    matrix = REAL[name]().float()
    check(vitals(matrix), matrix)


def test_large_gaussian_matrices_go_the_fast_way() -> None:
    assert vitals(hard_matrices.gaussian(1000).float()).method == "krylov, LU float32"
    assert "inertia" in vitals(hard_matrices.gaussian(1000).float(), certify=True).method


@pytest.mark.parametrize(
    ("way", "methods"),
    [
        (Method.SVD, ("all values", "bisection")),
        (Method.BISECTION, ("bisection", "krylov, LU float32")),
    ],
)
def test_every_way_is_used_up_to_where_the_table_says(way, methods) -> None:
    table, extremes = USUAL
    (last,) = (limit.columns for limit in extremes if limit.method is way)
    with mock.patch.multiple(spectra, ALL_VALUES=table, EXTREMES=extremes):
        for size, method in zip((last, last + 1), methods, strict=True):
            matrix = hard_matrices.gaussian(size).float()
            found = vitals(matrix)
            assert found.method == method
            check(found, matrix)


@pytest.mark.parametrize("table", USUAL, ids=["all values", "extremes"])
def test_a_table_has_a_method_for_every_size_and_says_why(table) -> None:
    columns = [limit.columns for limit in table]
    assert columns == sorted(set(columns)) and columns[-1] == math.inf
    assert all(limit.why for limit in table)


@pytest.mark.parametrize("threshold", [0.0, 1e-12, 0.305, 0.999])
@pytest.mark.parametrize("small", [64, 900])
@pytest.mark.parametrize("zeros", [0, 2, 10])
@pytest.mark.parametrize("size", [110, 220])
def test_any_share_may_be_the_threshold(threshold, small, zeros, size) -> None:
    s = np.linspace(1, 0.1, size - zeros)
    matrix = hard_matrices.with_values(np.r_[s, np.zeros(zeros)], size, size)
    with limits({Method.BISECTION: small}):
        found = vitals(matrix, threshold=threshold)
    assert found.effective_rank == (s > threshold).sum(), "zeros never count"


# --- found by trying ------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [15, 16, 17, 18, 20, 33])
@pytest.mark.parametrize("least", [2e-4, 1e-6])
def test_no_copy_of_a_small_value_is_lost(copies, least) -> None:
    """A Krylov block of sixteen vectors saw sixteen, and took a larger value for the next."""
    values = np.r_[np.linspace(1, 0.003, 300 - copies), np.full(copies, least)]
    matrix = hard_matrices.with_values(values, 300, 300)
    assert spectrum(matrix).values.numpy() == pytest.approx(reference(matrix), rel=1e-8)
    found = vitals(matrix, threshold=1e-3, complete=True)
    assert found.effective_rank == Components(matrix, 1e-3).effective_rank == 300 - copies


@pytest.mark.parametrize("scale", [1e-37, 1e-41])
def test_stored_subnormals_are_read_before_any_are_flushed(scale, monkeypatch) -> None:
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 1)
    matrix = hard_matrices.gaussian(400, 190).float() * torch.logspace(0, -2, 190) * scale
    values = reference(matrix)
    found = vitals(matrix)
    assert close(found.condition_number, values[0] / values[-1], 1e-8)


@pytest.mark.parametrize("shape", [(1200, 1200), (1500, 1100), (700, 600), (250, 250)], ids=str)
@pytest.mark.parametrize("kappa", [900, 1100, 3000, 3500])
def test_the_list_of_all_values_has_its_digits(shape, kappa) -> None:
    digits = 1e-8 if shape[1] <= SMALLER[Method.GRAM] else 1e-7
    matrix = hard_matrices.with_values(np.r_[np.linspace(1, 0.5, shape[1] - 1), 1 / kappa], *shape)
    assert close(float(spectrum(matrix).values[-1]), reference(matrix)[-1], digits)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("size", [200, 950])
def test_what_computing_leaves_open_is_in_the_interval(size, complete) -> None:
    for seed in range(3):
        matrix = hard_matrices.with_values(
            np.r_[np.linspace(1, 0.5, size - 1), 1 / 3000], size, size, seed
        )
        found = vitals(matrix, complete=complete)
        assert found.condition_number_low <= 3000 <= found.condition_number_high
        assert found.resolved


def test_the_rank_of_a_live_part_is_that_of_the_whole() -> None:
    live = hard_matrices.with_values(np.r_[np.linspace(1, 0.5, 249), 1.5e-13], 250, 250)
    matrix = torch.zeros(1000, 1000).double()
    matrix[:500:2, 1:501:2] = live
    ranks = [vitals(matrix, threshold=0.0, complete=each).effective_rank for each in (False, True)]
    assert ranks == [249, 249]


def test_a_value_at_the_threshold_is_counted_alike_by_all() -> None:
    values = np.linspace(1, 0.001, 300)
    values[150] = 0.5
    matrix = hard_matrices.with_values(values, 300, 300)
    rank = Components(matrix, 0.5).effective_rank
    assert vitals(matrix, threshold=0.5).effective_rank == rank
    assert vitals(matrix, threshold=0.5, complete=True).effective_rank == rank


def test_arrays_of_any_kind_are_taken_or_named() -> None:
    fields = np.zeros((3, 3), dtype=[("weight", "f4"), ("tag", "i2")])
    fields["weight"] = np.diag([2, 1, 1])
    assert vitals(fields["weight"]).condition_number == 2
    for wrong in (np.eye(3, dtype=np.longdouble), np.eye(3, dtype=object), np.array([["a"]]), None):
        with pytest.raises(TypeError, match=r"expected an array of numbers, got \S+; convert"):
            vitals(wrong)
    with pytest.raises(ValueError, match="some masked; fill them first"):
        vitals(np.ma.array(np.eye(2), mask=[[0, 1], [0, 0]]))
    with pytest.raises(ValueError, match="not initialized yet; run the model first"):
        vitals(torch.nn.LazyLinear(3).weight)


def test_digits_that_float64_drops_are_told() -> None:
    tiny = torch.diag(torch.tensor([3e-308, 1e-320], dtype=torch.float64))
    assert spectrum(tiny).status == "ok: 1 subnormal in float64, with fewer digits"
    assert "resolution outside float64's range" in vitals(1e8 * tiny[:1, :1]).status


# --- dead rows and columns ------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [SMALLER, KRYLOV], ids=["usual", "krylov"])
@pytest.mark.parametrize("dead", [(1, 0), (0, 1), (3, 7), (80, 2), (200, 209)], ids=str)
@pytest.mark.parametrize("shape", [(210, 210), (230, 210), (210, 260)], ids=str)
def test_dead_rows_and_columns_are_zeros_of_the_spectrum(shape, dead, ways) -> None:
    matrix = hard_matrices.gaussian(*shape)
    generator = torch.Generator().manual_seed(1)
    for axis, count in enumerate(dead):
        matrix.index_fill_(axis, torch.randperm(shape[axis], generator=generator)[:count], 0)
    with limits(ways):
        found = vitals(matrix)
    check(found, matrix)
    missing = min(shape) - min(size - count for size, count in zip(shape, dead, strict=True))
    assert ("zero rows" in found.method) == (missing > 0)
    assert (found.sigma_min == 0) == (missing > 0)
    if found.singular_values is not None:
        assert len(found.singular_values) == min(shape)


def test_a_faint_row_is_not_a_dead_one() -> None:
    faint = torch.ones(250).double()
    faint[-1] = 1e-200
    found = vitals(torch.diag(faint))
    assert "non-zero rows" not in found.method and found.sigma_min == pytest.approx(1e-200)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (193, 193), (600, 600)], ids=str)
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_small_matrices_are_bisected(shape, scale) -> None:
    matrix = scale * hard_matrices.gaussian(*shape)
    found = vitals(matrix)
    assert (found.method, found.status) == ("bisection", "ok: certified")
    check(found, matrix)


# --- subnormals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
def test_the_way_subnormals_are_treated_is_left_as_it_was(flushed) -> None:
    smallest = torch.tensor(5e-324, dtype=torch.float64)
    torch.set_flush_denormal(flushed)
    try:
        spectrum(torch.full((250, 250), 0.1)), vitals(torch.full((250, 250), 0.1))
        assert (float(smallest * 1.0) == 0) == flushed
    finally:
        torch.set_flush_denormal(False)


# --- when LAPACK fails ----------------------------------------------------------------------------


def test_a_tridiagonal_form_without_eigenvalues_is_not_the_end(monkeypatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise np.linalg.LinAlgError("sterf did not converge")

    monkeypatch.setattr(scipy.linalg, "eigvalsh_tridiagonal", fails)
    matrix = hard_matrices.gaussian(200)
    found = vitals(matrix)
    assert found.method == "all values"
    check(found, matrix)


LAPACK = {
    "eigh": (scipy.linalg, np.linalg.LinAlgError),
    "eigvalsh": (torch.linalg, torch.linalg.LinAlgError),
    "qr": (torch.linalg, torch.linalg.LinAlgError),
}


@pytest.mark.parametrize("name", LAPACK)
@pytest.mark.parametrize("least", [0.1, 1e-5])
@pytest.mark.parametrize(
    "ways", [SMALLER, KRYLOV, {Method.GRAM: 32}], ids=["usual", "krylov", "torch"]
)
def test_what_fails_within_lapack_is_done_another_way(monkeypatch, name, least, ways) -> None:
    """An eigenproblem of a Krylov space once ended a diagnosis with "Internal Error"."""
    module, error = LAPACK[name]

    def fails(*arguments: object, **options: object) -> None:
        raise error("Internal Error.")

    matrix = hard_matrices.with_values(np.r_[np.linspace(1, 0.1, 219), 0.1 * least], 220, 220)
    wanted = reference(matrix)
    monkeypatch.setattr(module, name, fails)
    with limits(ways):
        np.testing.assert_allclose(spectrum(matrix).values, wanted, rtol=1e-8)
        assert close(vitals(matrix).sigma_min, wanted[-1], 1e-8)


def failing(*drivers: str) -> Callable[..., np.ndarray]:
    original = scipy.linalg.svd

    def svd(a: np.ndarray, lapack_driver: str = "gesdd", **rest: object) -> np.ndarray:
        if lapack_driver in drivers:
            raise np.linalg.LinAlgError("SVD did not converge")
        return original(a, lapack_driver=lapack_driver, **rest)

    return svd


@pytest.fixture
def first_tries_fail(monkeypatch) -> None:
    """Torch's SVD of a stack, and scipy's of one matrix."""

    def fails(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("did not converge")

    def torch_fails(_: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svdvals", torch_fails)
    monkeypatch.setattr(scipy.linalg, "svdvals", fails)


@pytest.mark.usefixtures("first_tries_fail")
def test_a_failing_driver_is_replaced_by_a_sturdier_one(monkeypatch) -> None:
    matrix = hard_matrices.gaussian(40)
    monkeypatch.setattr(scipy.linalg, "svd", failing("gesdd"))
    np.testing.assert_allclose(spectrum(matrix).values, reference(matrix), rtol=1e-12)
    assert vitals(matrix).status.startswith("ok")


@pytest.mark.usefixtures("first_tries_fail")
@pytest.mark.parametrize("n", [40, 210])
def test_when_every_driver_fails_the_result_says_so(monkeypatch, n) -> None:
    matrix = hard_matrices.with_values(np.geomspace(1, 1e-12, n), n, n)
    monkeypatch.setattr(scipy.linalg, "svd", failing("gesdd", "gesvd"))
    assert spectrum(matrix).status == "failed: the SVD did not converge"
    assert spectrum(matrix).values.numel() == 0
    assert vitals(matrix).status.startswith("failed: the SVD did not converge")
    assert vitals(matrix).sigma_max is None
    assert singular_values(matrix.repeat(2, 1, 1)).isnan().all()


# --- the same again -------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("certify", [False, True])
def test_the_same_input_gives_the_same_output_and_no_random_state_moves(certify) -> None:
    matrix = hard_matrices.spiked(200).float()
    state, legacy = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - the one to watch
    first, second = vitals(matrix, certify), vitals(matrix.clone(), certify)
    assert torch.equal(torch.get_rng_state(), state)
    after = np.random.get_state()  # noqa: NPY002
    assert np.array_equal(after[1], legacy[1]) and after[2:] == legacy[2:]
    for name, value in vars(first).items():
        other = getattr(second, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "build", [hard_matrices.gaussian, hard_matrices.spiked, hard_matrices.power_law]
)
def test_one_thread_and_two_agree_to_the_digits_that_are_true(build) -> None:
    matrix = build(200).float()
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(vitals(matrix))
    torch.set_num_threads(threads)
    for name in ("sigma_max", "sigma_2", "sigma_min", "condition_number"):
        assert close(getattr(found[0], name), getattr(found[1], name), 2e-8)
    assert found[0].effective_rank == found[1].effective_rank


def test_the_input_is_left_as_it_was() -> None:
    matrix = hard_matrices.gaussian(210)
    before = matrix.clone()
    vitals(matrix)
    spectrum(matrix)
    assert torch.equal(matrix, before)


def test_views_gradients_and_order_of_memory_do_not_matter() -> None:
    matrix = hard_matrices.gaussian(210, 200)
    twice = torch.zeros(420, 400, dtype=torch.float64)
    twice[::2, ::2] = matrix
    for same in (twice[::2, ::2], matrix.mT.contiguous().mT, matrix.clone().requires_grad_()):
        assert close(vitals(same).sigma_min, vitals(matrix).sigma_min, 1e-12)


# --- far from one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 210])
@pytest.mark.parametrize("scale", [1e300, 1e-300, 2.0**1010, 2.0**-1000])
def test_float64_scales(n, scale) -> None:
    matrix = hard_matrices.gaussian(n) / 8 * scale
    check(vitals(matrix), matrix)
    np.testing.assert_allclose(spectrum(matrix).values / scale, reference(matrix) / scale, 1e-9)


@pytest.mark.parametrize("scale", [3e38, 1e-38, 1e-43])
def test_float32_scales(scale) -> None:
    matrix = (hard_matrices.gaussian(30) / 4).clamp(-1, 1).mul(scale).float()
    check(vitals(matrix), matrix)


def test_values_beyond_float64_are_absent_and_named() -> None:
    huge = torch.full((4, 4), 1.7e308, dtype=torch.float64).fill_diagonal_(0.7e308)
    found = vitals(huge)
    assert found.sigma_max is found.row_norms is found.frobenius_norm is None
    assert "row_norms, column_norms outside float64's range" in found.status
    assert close(found.condition_number, 5.8, 1e-12), "a ratio is known all the same"
    assert spectrum(huge).status == "failed: outside float64's range"


def test_subnormal_values_are_absent_and_named() -> None:
    tiny = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64) * 5e-324
    found = vitals(tiny)
    assert found.sigma_max is found.sigma_min is found.row_norms is None
    assert "outside float64's range" in found.status
    assert close(found.condition_number, np.linalg.cond([[4.0, 1.0], [1.0, 3.0]]), 1e-12)
    assert spectrum(tiny).status == "failed: outside float64's range"


def test_faint_rows_keep_their_norms() -> None:
    scales = [1e300, 1e-300, 1.0, 1e139]
    matrix = torch.tensor(scales, dtype=torch.float64)[:, None].expand(4, 4)
    found = vitals(matrix)
    np.testing.assert_allclose(found.row_norms, 2 * np.array(scales), rtol=1e-15)
    np.testing.assert_allclose(found.column_norms, [1e300] * 4, rtol=1e-15)
    for one in (scales[:2], scales[::3]):  # squares of the second vanish, or lose digits
        column = torch.tensor(one, dtype=torch.float64)[None]
        np.testing.assert_allclose(vitals(column).column_norms, one, rtol=1e-15)


# --- properties -----------------------------------------------------------------------------------

ENTRIES = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 6))
SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, max_side=7)
MATRICES = arrays.arrays(np.float64, SHAPES, elements=ENTRIES).map(torch.from_numpy)


def rotation(size: int) -> Tensor:
    return torch.from_numpy(hard_matrices.orthogonal(size, size, np.random.default_rng(size)))


@given(MATRICES)
def test_rotations_leave_the_values_alone(matrix) -> None:
    rotated = rotation(matrix.shape[0]) @ matrix @ rotation(matrix.shape[1])
    before, after = spectrum(matrix).values, spectrum(rotated).values
    np.testing.assert_allclose(after, before, rtol=0, atol=100 * EPS * float(before[0]))


@given(MATRICES, st.integers(-900, 900))
def test_powers_of_two_scale_exactly(matrix, power) -> None:
    scale = 2.0**power
    assert torch.equal(spectrum(matrix * scale).values, spectrum(matrix).values * scale)
    one, other = vitals(matrix), vitals(matrix * scale)
    assert other.condition_number == one.condition_number
    assert other.effective_rank == one.effective_rank
    assert other.sigma_min == one.sigma_min * scale


@settings(max_examples=10)
@given(st.integers(-900, 900))
def test_powers_of_two_scale_exactly_the_fast_way(power) -> None:
    matrix = hard_matrices.spiked(128)
    with limits(KRYLOV):
        one, other = vitals(matrix), vitals(matrix * 2.0**power)
    assert other.sigma_max == one.sigma_max * 2.0**power
    assert other.condition_number == one.condition_number


@given(MATRICES)
def test_a_transpose_has_the_same_vitals(matrix) -> None:
    threshold = math.pi / 300  # no ratio of round entries
    one, other = vitals(matrix, threshold=threshold), vitals(matrix.mT, threshold=threshold)
    assert one.effective_rank == other.effective_rank
    if matrix.any():
        assert one.condition_number_low <= other.condition_number <= one.condition_number_high
    np.testing.assert_allclose(one.row_norms, other.column_norms, rtol=1e-15)


@given(MATRICES)
def test_kappa_is_at_least_one_and_inside_its_interval(matrix) -> None:
    found = vitals(matrix)
    if matrix.any():
        assert 1 <= found.condition_number_low <= found.condition_number_high
        assert found.condition_number_low <= found.condition_number <= found.condition_number_high
        assert found.resolved == (found.condition_number_high <= 2 * found.condition_number_low)


@given(MATRICES, st.lists(st.floats(0, 0.99), min_size=2, max_size=4))
def test_a_higher_threshold_leaves_no_more_rank(matrix, thresholds) -> None:
    ranks = [vitals(matrix, threshold=t).effective_rank for t in sorted(thresholds)]
    assert ranks == sorted(ranks, reverse=True)


@given(MATRICES)
def test_norms_and_values_fit_together(matrix) -> None:
    found, s = vitals(matrix), spectrum(matrix).values
    assert close(found.frobenius_norm, float(s.norm()), 1e-13)
    assert found.row_norms.max() <= found.sigma_max * (1 + 1e-13)
    assert (s.diff() <= 0).all() and (s >= 0).all()
    assert (found.sigma_max, found.sigma_min) == (float(s[0]), float(s[-1]))


@given(MATRICES)
def test_the_values_of_a_part_interlace_with_those_of_the_whole(matrix) -> None:
    whole, part = spectrum(matrix).values, spectrum(matrix[:-1]).values
    slack = 100 * EPS * float(whole[0])
    assert (part <= whole[: len(part)] + slack).all()
    assert (part[: len(whole) - 1] >= whole[1 : len(part) + 1] - slack).all()


@pytest.mark.parametrize("shape", [(60, 60), (300, 300), (800, 800), (1000, 800)])
def test_autocast_and_the_default_device_change_nothing(shape) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected, values = spectra.vitals(given), spectra.spectrum(given).values
    with torch.autocast("cpu", torch.float16):
        assert spectra.vitals(given).condition_number == expected.condition_number
        assert torch.equal(spectra.spectrum(given).values, values)
        assert spectra.decomposition(given)[1].dtype == torch.float32
    torch.set_default_device("meta")
    try:
        found = spectra.vitals(given)
        assert torch.equal(spectra.spectrum(given).values, values)
        assert spectra.vitals(given.numpy()).sigma_min == expected.sigma_min
        signs = given[:40, :40].sign()  # entries that are rounded alike
        assert spectra.vitals(signs).status.startswith("ok")
    finally:
        torch.set_default_device(None)
    assert found.condition_number == expected.condition_number
    assert found.row_norms is not None and found.row_norms.device.type == "cpu"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_has_no_decomposition(bad) -> None:
    with pytest.raises(spectra.LinAlgError, match="not finite"):
        spectra.decomposition(torch.full((2, 3, 3), bad))


def test_panels_of_subnormal_numbers_are_scaled_in_two_steps() -> None:
    stored = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64) * 2.0**-1074
    exact = next(iter(_gram.Panels(stored, -1071).split(2)))
    assert torch.equal(exact, torch.tensor([[4.0, 1.0], [1.0, 3.0]]).double() / 8)


def test_results_compare_without_an_error_and_negated_views_are_read() -> None:
    ones = torch.ones(3, 2).double()
    found = vitals(torch.complex(ones, ones).conj().imag)
    assert found.sigma_max == pytest.approx(6**0.5) and found != vitals(ones)
    assert spectra.spectrum(torch.zeros(0, 3)).status == "degenerate: empty matrix"


@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e6, 1e9, math.inf])
def test_quick_values_of_products_are_those_of_the_slow_way(kappa: float) -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(s, generator=random).double() for s in ((3, 40, 8), (3, 8, 30)))
    left[..., -1] = left[..., -1] / kappa + left[..., 0] * (kappa > 1)
    quick = spectra.quick_product_singular_values(left, right)
    slow, floor = spectra.product_singular_values(left, right)
    assert ((quick - slow).abs() <= 1e-7 * slow + 4 * floor[:, None]).all()


def test_a_notebook_shows_what_the_storage_leaves_open() -> None:
    weight = torch.diag(torch.tensor([1.0, 0.5, 1 / 64]))
    assert "<td>64.00</td>" in vitals(weight)._repr_html_()
    noisy = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) + 10).bfloat16()
    found = vitals(noisy)
    assert found.resolved == ("not resolved" not in found._repr_html_())
