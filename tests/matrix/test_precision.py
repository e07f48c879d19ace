"""What rounding hides of a condition number: known matrices are rounded and found again."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import hard_matrices
from kappascope.matrix import precision, spectra

# Each dtype with scales that keep the largest entry in range, some of them among the subnormals.
STORED = {
    "float32": (torch.float32, 1.0),
    "float32 subnormal": (torch.float32, 1e-42),
    "bfloat16": (torch.bfloat16, 1.0),
    "float16": (torch.float16, 1.0),
    "float16 partly subnormal": (torch.float16, 1e-4),
    "float16 subnormal": (torch.float16, 3e-6),
    "float8_e4m3fn": (torch.float8_e4m3fn, 1.0),
    "float8_e4m3fn subnormal": (torch.float8_e4m3fn, 0.02),
    "float8_e5m2": (torch.float8_e5m2, 1.0),
}
SHAPES = [(1, 1), (1, 9), (4, 4), (9, 3), (12, 30), (30, 30), (64, 16), (60, 60)]


def originals(shape: tuple[int, int], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Matrices with largest entry 1: even and uneven ones, well and badly conditioned."""
    rows, columns = shape
    plain = random.standard_normal(shape)
    u, _, vt = np.linalg.svd(plain, full_matrices=False)
    built = {
        "gaussian": plain,
        "uneven rows": plain * np.exp(1.5 * random.standard_normal((rows, 1))),
        "uneven columns": plain * np.exp(1.5 * random.standard_normal((1, columns))),
        "graded": (u * np.geomspace(1, 10.0 ** -random.uniform(0, 7), min(shape))) @ vt,
        "heavy tails": np.sign(plain) * np.exp(2 * random.standard_normal(shape)),
        "nearly constant": 1 + 0.01 * plain,
    }
    return {kind: a / np.abs(a).max() for kind, a in built.items()}


def kappa(matrix: np.ndarray) -> float:
    s = np.linalg.svd(matrix, compute_uv=False)
    return s[0] / s[-1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "scale"), STORED.values(), ids=STORED)
def test_the_condition_number_before_rounding_lies_in_the_interval(
    dtype, scale, shape, seed
) -> None:
    for kind, original in originals(shape, np.random.default_rng([seed, *shape])).items():
        stored = torch.from_numpy(original * scale).to(dtype)
        if not stored.double().any():
            continue
        found = spectra.vitals(stored)
        slack = 1e-12 * kappa(original)  # of the SVD that tells kappa
        assert found.condition_number_low <= kappa(original) * (1 + slack), kind
        assert kappa(original) <= found.condition_number_high * (1 + slack), kind


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(30, 30), (12, 30), (64, 16), (60, 60)])
@pytest.mark.parametrize(("dtype", "scale"), STORED.values(), ids=STORED)
def test_where_rounding_is_far_below_the_smallest_value_the_interval_is_narrow(
    dtype, scale, shape, seed
) -> None:
    """Rounding norm as one would estimate it: 1.5 times rms half-ulp times (sqrt m + sqrt n)."""
    for kind, original in originals(shape, np.random.default_rng([seed, *shape])).items():
        stored = torch.from_numpy(original * scale).to(dtype)
        half_ulps = precision.half_ulps(stored.double(), dtype)
        rounding = 1.5 * half_ulps.square().mean().sqrt() * sum(map(math.sqrt, shape))
        if kind in ("heavy tails", "nearly constant") or not stored.double().any():
            continue  # the first have no typical half-ulp, the second no independent ones
        found = spectra.vitals(stored)
        if 4 * rounding * kappa(original) < found.sigma_max:
            assert found.condition_number_high < 4 * found.condition_number_low, kind


def test_the_estimate_holds_for_random_rounding_and_is_not_wasteful() -> None:
    ratios = []
    for seed in range(60):
        original = hard_matrices.gaussian(40, 40 + seed, seed=seed)
        stored = original.bfloat16().double()
        ulps = precision.half_ulps(stored, torch.bfloat16)
        estimate = precision.rounding_norm(ulps.norm(dim=1), ulps.norm(dim=0))
        ratios.append(float(torch.linalg.matrix_norm(stored - original, 2)) / estimate)
    assert min(ratios) > 0.5 and max(ratios) < 1


def structured(n: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Matrices whose entries repeat, and so were rounded alike."""
    adjacent = (random.uniform(size=(n, n)) < 0.3).astype(float)
    adjacent = np.triu(adjacent, 1) + np.triu(adjacent, 1).T
    degrees = 1 / np.sqrt(1 + adjacent.sum(1))
    built = {
        "Toeplitz": scipy.linalg.toeplitz(random.uniform(0.5, 0.95) ** np.arange(n)),
        "circulant": scipy.linalg.circulant(random.standard_normal(n)),
        "centring": np.eye(n) - random.uniform(0.5, 0.99) / n,
        "two values": 1.3 * np.eye(n) + random.uniform(-0.1, 0.1) / 3,
        "graph": np.eye(n) + 0.9 * degrees[:, None] * adjacent * degrees,
        "blocks": np.kron(np.eye(n // 8), random.standard_normal((8, 8))),
    }
    return {kind: a / np.abs(a).max() for kind, a in built.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float16, 1.0), (torch.float16, 1e-3), (torch.bfloat16, 1.0), (torch.float32, 1.0)],
    ids=str,
)
def test_entries_that_were_rounded_alike_are_not_taken_for_random(dtype, scale, n, seed) -> None:
    for kind, original in structured(n, np.random.default_rng([seed, n])).items():
        found = spectra.vitals(torch.from_numpy(original * scale).to(dtype))
        slack = 1 + 1e-12 * kappa(original)  # of the SVD that tells kappa
        assert found.condition_number_low <= kappa(original) * slack, kind
        assert kappa(original) <= found.condition_number_high * slack, kind


@pytest.mark.parametrize("share", [0.05, 0.5, 0.85])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 300), (3000, 100)])
def test_one_number_among_random_ones_moves_values_no_further_than_told(
    shape, dtype, share
) -> None:
    random = np.random.default_rng(0)
    constant = random.random(shape) < share
    original = np.where(constant, 0.25095, 0.3 * random.standard_normal(shape))
    stored = torch.from_numpy(original).to(dtype)
    assert not precision.independent(stored, dtype)
    exact, found = np.linalg.svd(original, compute_uv=False), spectra.vitals(stored, complete=True)
    assert np.abs(found.singular_values.numpy() - exact).max() <= found.resolution
    assert found.condition_number_low <= exact[0] / exact[-1] <= found.condition_number_high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 3e-6])
def test_random_entries_repeat_no_more_than_chance_makes_them(dtype, scale) -> None:
    for original in originals((60, 60), np.random.default_rng(0)).values():
        if abs(original).min() < 0.5:  # not nearly constant
            assert precision.independent(torch.from_numpy(original * scale).to(dtype), dtype)


def test_no_rounding_exceeds_its_bound() -> None:
    for kind, original in structured(64, np.random.default_rng(0)).items():
        exact = torch.from_numpy(original)
        stored = exact.bfloat16().double()
        bound = precision.rounding_bound([stored[:10], stored[10:]], torch.bfloat16)
        assert torch.linalg.matrix_norm(stored - exact, 2) <= bound, kind


EIGHTS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", EIGHTS, ids=str)
def test_half_ulps_of_eight_bits_are_half_the_distance_of_neighbours(dtype) -> None:
    every = torch.arange(1, 127, dtype=torch.uint8).view(dtype).double()
    finite = every[every.isfinite()]
    apart = finite.diff()
    assert torch.equal(2 * precision.half_ulps(finite[:-1], dtype), apart)


@given(
    st.floats(-1e4, 1e4, width=32), st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
)
def test_no_number_of_float32_moves_further_than_its_half_ulp(number, dtype) -> None:
    """Weights are trained in float32, or in less: they are rounded once when they are stored."""
    exact = torch.tensor([number], dtype=torch.float64)
    stored = exact.float().to(dtype).double()
    assert (stored - exact).abs() <= precision.half_ulps(stored, dtype)


@given(st.floats(-1e4, 1e4), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
@example(2262.999989907744, torch.float16)  # which float32 rounds to a tie, away from itself
def test_no_number_of_float64_moves_further_than_two_roundings(number, dtype) -> None:
    """torch rounds float64 to float32 first: half an ulp of that may come on top."""
    exact = torch.tensor([number], dtype=torch.float64)
    stored = exact.to(dtype).double()
    half_ulps = [precision.half_ulps(stored, each) for each in {dtype, torch.float32}]
    assert (stored - exact).abs() <= sum(half_ulps)


@pytest.mark.parametrize("exponent", [-30, 0, 7])
def test_half_ulps_of_scaled_numbers_are_scaled_half_ulps(exponent) -> None:
    stored = (hard_matrices.gaussian(8) * 1e-5).half().double()
    scaled = precision.half_ulps(stored * 2.0**-exponent, torch.float16, exponent)
    assert torch.equal(scaled * 2.0**exponent, precision.half_ulps(stored, torch.float16))


# --- which type it was ----------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_on_a_coarser_grid_is_as_uncertain_as_that_and_says_so(narrow, wide) -> None:
    stored = hard_matrices.gaussian(40).to(narrow)
    found, plain = spectra.vitals(stored.to(wide)), spectra.vitals(stored)
    name = str(narrow).removeprefix("torch.")
    assert found.storage == name and f"values lie on the {name} grid" in found.status
    assert "grid" not in plain.status
    assert found.condition_number_high == plain.condition_number_high


def test_float64_numbers_on_the_float32_grid_are_float32() -> None:
    assert precision.storage_dtype(hard_matrices.gaussian(40).float().double()) == torch.float32


def test_full_width_numbers_are_what_their_type_says() -> None:
    assert precision.storage_dtype(hard_matrices.gaussian(40)) == torch.float64
    assert precision.storage_dtype(hard_matrices.gaussian(40).float()) == torch.float32
    assert "grid" not in spectra.vitals(hard_matrices.gaussian(40).float()).status


def test_one_number_off_the_grid_is_enough() -> None:
    matrix = hard_matrices.gaussian(40).bfloat16().float()
    matrix[-1, -1] = 1 / 3
    assert precision.storage_dtype(matrix) == torch.float32


def test_bfloat16_weights_converted_to_float16_stay_bfloat16() -> None:
    stored = hard_matrices.gaussian(40).bfloat16()
    assert torch.equal(stored.half().bfloat16(), stored), "nothing is lost on the way"
    assert precision.storage_dtype(stored.half()) == torch.bfloat16


def deep_subnormal() -> tuple[Tensor, Tensor]:
    """A matrix so small that its float16 rounding has few bits, and is on the bfloat16 grid too."""
    original = hard_matrices.with_values(np.linspace(1, 0.05, 30), 30, 30) * 1e-5
    return original, original.half()


def test_deep_float16_subnormals_are_not_taken_for_bfloat16() -> None:
    original, stored = deep_subnormal()
    assert torch.equal(stored.bfloat16().half(), stored)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert precision.storage_dtype(stored.to(dtype)) == torch.float16
        found = spectra.vitals(stored.to(dtype))
        assert found.condition_number_low <= kappa(original.numpy()) <= found.condition_number_high


# --- the interval ---------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1), st.floats(0, 1))
def test_the_interval_holds_every_matrix_within_the_uncertainty(largest, share, uncertain) -> None:
    smallest, uncertainty = largest * share, largest * uncertain
    found = precision.condition_interval(largest, smallest, uncertainty)
    for up, down in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        top, bottom = largest + up * uncertainty, smallest + down * uncertainty
        if bottom > 0 and top >= bottom:
            assert found.low * (1 - 1e-12) <= top / bottom <= found.high * (1 + 1e-12)
    assert 1 <= found.low <= found.high


def test_what_rounding_could_make_singular_has_no_upper_bound() -> None:
    found = spectra.vitals(hard_matrices.with_values(np.geomspace(1, 1e-5, 40), 40, 40).bfloat16())
    assert found.condition_number_high == math.inf and not found.resolved
    assert found.condition_number_low > 10


def test_a_well_conditioned_matrix_is_resolved_in_every_type() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert spectra.vitals(
            hard_matrices.with_values(np.linspace(2, 1, 40), 40, 40).to(dtype)
        ).resolved


@pytest.mark.parametrize(
    ("size", "every", "least", "dtype"),
    [(64, 2, 0.01, torch.float16), (300, 4, 1e-5, torch.float32), (96, 32, 0.01, torch.bfloat16)],
)
def test_zeros_in_a_pattern_do_not_hide_that_entries_repeat(size, every, least, dtype) -> None:
    matrix = torch.zeros(every * size, size).double()
    matrix[1::every] = torch.eye(size).double() - (1 - least) / size
    found = spectra.vitals(matrix.to(dtype))
    assert found.condition_number_low <= 1 / least <= found.condition_number_high


def test_a_matrix_of_a_few_entries_is_judged_by_them() -> None:
    sparse = torch.zeros(500, 500)
    sparse[torch.arange(500), torch.randperm(500, generator=torch.Generator().manual_seed(0))] = 0.1
    assert not precision.independent(sparse, torch.float32)
    drawn = torch.rand(500, generator=torch.Generator().manual_seed(0))
    assert precision.independent(torch.diag(drawn), torch.float32)
