"""One matrix examined: every number right, or absent with a reason."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hard_matrices
from kappascope import Components, errors
from kappascope.clinic import examine as examining
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.examination import Examination, Spread
from kappascope.clinic.examine import PLOT_BARS, PLOT_POINTS, THRESHOLDS, examine, outlying
from kappascope.clinic.terminal import lines, matrix_table
from kappascope.matrix import spectra
from kappascope.matrix.components import component
from kappascope.matrix.spectra import ldexp
from kappascope.system.files import strict
from kappascope.theory import GaussianNull


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 99))
@settings(max_examples=40)
def test_every_number_is_that_of_numpy(rows: int, columns: int, seed: int) -> None:
    a = normal(rows, columns, seed=seed)
    found, x = examine("a", a), a.numpy()
    sigma = np.linalg.svd(x, compute_uv=False)
    norms = np.linalg.norm(x, axis=1)
    assert found.sigma_max == pytest.approx(sigma[0])
    assert found.condition_number == pytest.approx(sigma[0] / sigma[-1], rel=1e-6)
    assert found.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2)
    p = sigma / sigma.sum()
    assert found.entropy_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    expected = {str(t): int((sigma > t * sigma[0]).sum()) for t in THRESHOLDS}
    assert found.effective_ranks == expected
    assert found.effective_rank == expected["0.01"]
    assert found.row_norms.cv == pytest.approx(norms.std() / norms.mean())
    assert found.row_norms.median == pytest.approx(np.median(norms))
    assert found.entry_mean == pytest.approx(x.mean())
    assert found.entry_std == pytest.approx(x.std())
    centred = x - x.mean()
    kurtosis = (centred**4).mean() / (centred**2).mean() ** 2 - 3
    assert found.entry_kurtosis == pytest.approx(kurtosis, abs=1e-9)
    assert found.null_z == pytest.approx(float(GaussianNull(rows, columns).z(sigma[0] / sigma[-1])))


@pytest.mark.parametrize("name", hard_matrices.zoo(200))
def test_the_zoo_is_examined_without_a_nan(name: str) -> None:
    _assert_plain(examine(name, hard_matrices.zoo(200)[name]()))


CASES = {
    "zero": torch.zeros(4, 3),
    "constant": torch.ones(5, 4),
    "rank one": torch.outer(torch.arange(1.0, 5), torch.ones(3)),
    "identity": torch.eye(6),
    "row": torch.randn(1, 7),
    "column": torch.randn(7, 1),
    "number": torch.full((1, 1), 2.0),
    "empty": torch.zeros(0, 4),
    "huge": torch.full((3, 3), 1e300, dtype=torch.float64) * torch.eye(3, dtype=torch.float64),
    "tiny": torch.eye(3, dtype=torch.float64) * 1e-300,
    "subnormal": torch.eye(3) * 1e-44,
    "half": torch.randn(5, 4).half(),
    "float8": torch.randn(5, 4).to(torch.float8_e4m3fn),
    "duplicate rows": torch.randn(1, 5).repeat(4, 1),
    "nan": torch.tensor([[1.0, math.nan]]),
    "inf": torch.tensor([[1.0], [math.inf]]),
}


UNEXPLAINED = (
    "depth",
    "delta",
    "negligible",
    "part_of",
    "errors",
    "unlearned",
    "failure",
    "uncompared",
)  # None where they do not apply


def _assert_plain(found: Examination) -> None:
    for field, value in vars(found).items():
        if isinstance(value, float):
            assert math.isfinite(value), field
        if value is None and found.failure is None and field not in UNEXPLAINED:
            assert field in found.reasons, field


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spectrum", ["auto", "full", "none"])
def test_what_is_absent_has_a_reason_and_nothing_is_infinite(case: str, spectrum) -> None:
    found = examine(case, CASES[case], spectrum)
    _assert_plain(found)
    assert found.status


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_an_eight_bit_matrix_is_compared_entry_by_entry(dtype: torch.dtype) -> None:
    before = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    before[7] = 0
    found = examine("w", before.flip(1).to(dtype), reference=before.to(dtype))
    assert found.failure is None and not found.faults and found.int8 is not None
    assert found.likeness


def test_a_value_that_is_not_finite_is_counted_and_placed() -> None:
    matrix = torch.randn(4, 5)
    matrix[2, 3] = math.nan
    matrix[3, 0] = math.inf
    assert examine("w", matrix).status == "failed: non-finite (2 of 20), first at [2, 3]"


def test_without_the_spectrum_large_matrices_lack_what_needs_it() -> None:
    found = examine("w", normal(950, 940), "none")
    assert found.condition_number and found.effective_rank
    assert found.alpha is None and found.entropy_rank is None and found.outliers is None
    assert "--spectrum full" in found.reasons["alpha"]
    assert found.effective_ranks["0.001"] is None
    assert found.plot["spectrum"] == [] and found.plot["rows"]["counts"]


@pytest.mark.parametrize("spectrum", ["none", "full"])
def test_errors_against_a_reference_are_those_of_the_components(spectrum) -> None:
    a, b = normal(930, 910), normal(930, 910, seed=1)
    found = examine("w", a, spectrum, reference=b).errors
    expected = errors(a, b)
    for name, error in expected.items():
        if name == "singular_values" and spectrum == "none":
            assert found[name] is None
        else:
            assert found[name] == pytest.approx(float(error), rel=1e-6), name


def test_a_component_that_vitals_do_not_have_is_compared_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(Components, "names", Components.names)  # and put back
    largest = component(lambda self: self.matrix.double().abs().amax((-2, -1)))
    monkeypatch.setattr(Components, "largest_entry", largest, raising=False)
    largest.__set_name__(Components, "largest_entry")
    found = examine("w", 2 * torch.eye(4), reference=torch.eye(4)).errors
    assert found["largest_entry"] == found["frobenius_norm"] == 1.0


def test_a_reference_of_another_shape_gives_a_reason() -> None:
    found = examine("w", normal(3, 4), reference=normal(4, 3))
    assert found.errors is None and "another shape" in str(found.reasons["errors"])


def test_dead_and_outlying_rows_and_columns_are_counted() -> None:
    matrix = normal(64, 48)
    matrix[5] = 0
    matrix[7] *= 40
    matrix[:, 3] = 0
    found = examine("w", matrix)
    assert (found.dead_rows, found.dead_columns, found.outlier_rows) == (1, 1, 1)


def test_norms_of_random_rows_are_no_outliers() -> None:
    for seed in range(30):
        norms = normal(512, 8, seed=seed).norm(dim=1)
        assert not (norms > outlying(norms, 8)).any()


def test_a_spike_is_an_outlier_of_the_null_and_noise_is_not() -> None:
    noise = normal(200, 150)
    u, v = normal(200, seed=1), normal(150, seed=2)
    spiked = noise + 60 * torch.outer(u / u.norm(), v / v.norm())
    assert examine("noise", noise).outliers == 0
    assert examine("spiked", spiked).outliers == 1
    assert (
        examine("noise", noise).null_distance < 0.05 < examine("eye", torch.eye(50)).null_distance
    )


def test_a_plot_is_small_and_ends_at_both_ends_of_the_spectrum() -> None:
    found = examine("w", normal(700, 600))
    points = found.plot["spectrum"]
    assert len(points) <= PLOT_POINTS and len(found.plot["null"]) == len(points)
    assert points[0] == [1, found.sigma_max] and points[-1] == [600, pytest.approx(found.sigma_min)]
    assert (
        len(found.plot["rows"]["counts"]) == PLOT_BARS and sum(found.plot["rows"]["counts"]) == 700
    )


def test_the_floor_is_the_rounding_of_the_storage() -> None:
    rough = examine("w", normal(64, 64).bfloat16())
    fine = examine("w", normal(64, 64))
    assert rough.plot["floor"] > 1e4 * fine.plot["floor"]
    moved = (normal(64, 64).bfloat16().double() - normal(64, 64)).numpy()
    assert rough.plot["floor"] > np.linalg.norm(moved, 2)


def test_vitals_keep_the_values_they_took() -> None:
    a = normal(40, 30)
    torch.testing.assert_close(spectra.vitals(a).singular_values, Components(a).singular_values)
    assert spectra.vitals(normal(1000, 950)).singular_values is None
    assert len(spectra.vitals(normal(1000, 950), complete=True).singular_values) == 950


# --- any scale ------------------------------------------------------------------------------------

SCALES = {
    torch.float64: (
        *range(-1074, -980, 13),
        -600,
        -520,
        -300,
        300,
        505,
        515,
        600,
        1000,
        1019,
        1021,
    ),
    torch.float32: (-149, -140, -126, -60, 60, 124),
    torch.bfloat16: (-133, -126, -60, 60, 124),
    torch.float16: (-24, -20, -14, 5, 12),
}
# The exponent of the tail is of eigenvalues above a limit of their own, whatever the scale.
OF_SIZE = {"row_norms", "column_norms", "entry_mean", "entry_std", "sigma_max", "sigma_2",
           "sigma_min", "frobenius_norm", "edge"}  # fmt: skip
OF_SHAPE = {"dead_rows", "dead_columns", "outlier_rows", "outlier_columns", "entry_kurtosis",
            "condition_number", "effective_rank", "effective_ranks", "stable_rank", "entropy_rank",
            "spectral_gap", "null_z", "null_distance", "outliers"}  # fmt: skip


def exact(matrix: Tensor) -> tuple[Examination, int]:
    """What the same digits have near one, where nothing is beyond a range."""
    exponent = math.frexp(float(matrix.double().abs().max()))[1]
    return examine("w", ldexp(matrix.double(), -exponent)), exponent


@pytest.mark.parametrize(
    ("dtype", "power"), [(dtype, power) for dtype, powers in SCALES.items() for power in powers]
)
def test_every_number_is_right_at_any_scale_or_absent_with_a_reason(
    dtype: torch.dtype, power: int
) -> None:
    drawn = torch.Generator().manual_seed(power)
    matrix = torch.randn(12, 9, generator=drawn, dtype=torch.float64) * torch.logspace(0, -2, 9)
    matrix[3] *= 20
    matrix = ldexp(matrix / 64, power).to(dtype)
    if not matrix.any():
        matrix[0, 0] = torch.finfo(dtype).smallest_normal
    found = examine("w", matrix)
    usual, exponent = exact(matrix)
    told = found.document()
    strict(told)
    assert not found.faults and found.failure is None
    assert (found.alpha is None) == ("alpha" in found.reasons)
    for name in OF_SIZE | OF_SHAPE:
        value, expected = getattr(found, name), getattr(usual, name)
        if value is None:
            assert found.reasons[name]
            assert name in usual.reasons or "range" in found.reasons[name]
            continue
        if isinstance(value, Spread):
            value, expected = asdict(value), asdict(expected)
        pairs = (
            [(value[key], expected[key], key != "cv") for key in value]
            if isinstance(value, dict)
            else [(value, expected, True)]
        )
        for one, other, sized in pairs:
            if one is None or other is None:
                assert any(key.startswith(name) for key in found.reasons)
                continue
            scaled = math.ldexp(other, exponent) if name in OF_SIZE and sized else other
            assert one == pytest.approx(scaled, rel=1e-6, abs=5e-324), name
    diagnosis = Diagnosis("toy", (found,)).judged()
    assert not diagnosis.unjudged
    assert diagnosis.html() and [*lines(diagnosis)] and matrix_table(diagnosis, 80)
    assert diagnosis.table().num_rows == 1


@pytest.mark.parametrize("power", [-1040, -1000, -510, 510, 1015])
def test_errors_against_a_reference_do_not_depend_on_the_scale_of_both(power: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 12, 9, generator=drawn, dtype=torch.float64).sign()
    ours[0] *= 3
    usual = examine("w", ours, reference=theirs).errors
    found = examine("w", ldexp(ours, power), reference=ldexp(theirs, power))
    assert usual and found.errors
    for name, error in found.errors.items():
        if error is None:
            assert found.reasons[f"errors.{name}"]
        else:
            assert error == pytest.approx(usual[name], rel=1e-6, abs=1e-12), name


def test_a_number_that_cannot_be_computed_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(examining.powerlaw, "power_law", fails)
    found = examine("w", torch.randn(12, 9))
    assert found.alpha is None and found.reasons["alpha"].startswith("ZeroDivisionError")
    assert found.condition_number and found.row_norms and found.plot
    (lost,) = Diagnosis("toy", (found,)).failed
    assert lost.name == "w" and "alpha" in str(lost.reason)


@pytest.mark.parametrize("power", [400, 520, 1010])
def test_the_tail_of_large_values_has_the_exponent_of_the_same_tail_elsewhere(power: int) -> None:
    matrix = normal(40, 30) @ torch.diag(torch.logspace(0, -2, 30, dtype=torch.float64))
    usual, found = examine("w", ldexp(matrix, 60)), examine("w", ldexp(matrix, power))
    if power < 500:
        assert found.alpha == pytest.approx(usual.alpha) and found.alpha_count == usual.alpha_count
    else:
        assert found.alpha is None and found.reasons["alpha"] == "outside float64's range"
