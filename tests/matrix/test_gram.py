"""A matrix in panels gives the products of its float64 copy."""

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hard_matrices
from kappascope.matrix import _blas, _gram, _krylov, spectra
from kappascope.matrix._gram import Panels
from kappascope.matrix.spectra import Method
from method_limits import limits


def pair(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Panels, torch.Tensor]:
    stored = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return Panels(stored, 3), stored.double() / 8


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9))
def test_products_are_those_of_the_copy(rows: int, columns: int, panel: int) -> None:
    a, dense = pair(rows, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gram, "SYRK_ROWS", panel)
        patch.setattr(_gram, "SYRK_BUFFER_ROWS", panel)
        x, y = torch.ones(columns, 2).double(), torch.ones(rows, 3).double()
        torch.testing.assert_close(_gram.times(a, x), dense @ x)
        torch.testing.assert_close(_gram.transposed_times(a, y), dense.mT @ y)
        torch.testing.assert_close(_gram.times(a.mT, y), dense.mT @ y)
        torch.testing.assert_close(_gram.gram(a), (dense.mT @ dense).tril())
        torch.testing.assert_close(_gram.gram(a), _gram.gram(dense))
        torch.testing.assert_close(_gram.as_dense(a, torch.float32), dense.float())
        r = _gram.triangle(a)
        torch.testing.assert_close(r.mT @ r, dense.mT @ dense)


@pytest.mark.parametrize("shape", [(1000, 950), (950, 1000), (2500, 930), (930, 930), (64, 40)])
@pytest.mark.parametrize("complete", [True, False])
def test_vitals_do_not_depend_on_whether_there_is_a_copy(shape, complete, monkeypatch) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = spectra.vitals(matrix, complete=complete)
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    found = spectra.vitals(matrix, complete=complete)
    for name in ("sigma_max", "sigma_2", "sigma_min", "frobenius_norm", "condition_number_high"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-8), name
    assert found.effective_rank == expected.effective_rank
    torch.testing.assert_close(found.row_norms, expected.row_norms)


@pytest.mark.parametrize("kind", ["power_law", "graded", "low rank"])
def test_what_squaring_would_blur_is_right_in_panels_too(kind, monkeypatch) -> None:
    values = {
        "power_law": np.arange(1, 301) ** -1.5,
        "graded": np.logspace(0, -9, 300),
        "low rank": np.r_[np.linspace(1, 0.5, 200), np.zeros(100)],
    }[kind]
    matrix = hard_matrices.with_values(values, 700, 300)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    found = spectra.vitals(matrix)
    assert found.sigma_max == pytest.approx(expected[0])
    assert found.effective_rank == int((expected > 0.01 * expected[0]).sum())
    assert found.sigma_min == pytest.approx(expected[-1], rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_stored_matrix_is_left_alone(dtype) -> None:
    a, _ = pair(6, 5, dtype)
    before = a.stored.clone()
    _gram.gram(a)
    assert torch.equal(a.stored, before)


@pytest.mark.parametrize("power", [-1020, -200, 200, 1000])
def test_a_panel_is_scaled_before_it_is_narrowed(power) -> None:
    stored = torch.tensor([[1.0, 0.5], [0.25, 1.0]], dtype=torch.float64) * 2.0**power
    (panel,) = Panels(stored, power).split(2, torch.float32)
    assert panel.tolist() == [[1.0, 0.5], [0.25, 1.0]]
    assert stored[0, 0] == 2.0**power


# --- nothing is held twice ------------------------------------------------------------------------


def test_factors_take_the_place_of_what_is_factorized() -> None:
    lower = _gram.gram(hard_matrices.gaussian(40))
    place = lower.data_ptr()
    assert _blas.Cholesky.of(lower, overwrite=True).factor.data_ptr() == place
    assert _blas.LDL.of(lower, overwrite=True).factors.ctypes.data == place
    columns = hard_matrices.gaussian(40).mT
    assert _blas.LU.of(columns, overwrite=True).factors.data_ptr() == columns.data_ptr()


@pytest.mark.parametrize("shape", [(60, 60), (90, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_released_is_found_again(shape, dtype) -> None:
    a, dense = pair(*shape, torch.float32)
    square, x = _gram.Gram(a, dtype), torch.ones(60, 16, dtype=dtype)
    product = (dense.mT @ dense).to(dtype)
    digits = {"rtol": 1e-2 if dtype == torch.float32 else 1e-8, "atol": 1e-4}
    for _ in range(2):
        torch.testing.assert_close(product @ square.inverse(x), x, **digits)
        torch.testing.assert_close(square.apply(x), product @ x, **digits)
        square.factorized(_blas.LDL, 1.0)
        square.release()
        assert not {"lower", "operand", "factor"} & set(vars(square))


def test_a_tall_matrix_in_panels_has_the_inverse_of_its_triangle() -> None:
    a, dense = pair(300, 50, torch.float32)
    square = _gram.Gram(a, torch.float64, by_triangle=True)
    x = torch.ones(50, 16).double()
    torch.testing.assert_close(dense.mT @ dense @ square.inverse(x), x)
    assert str(square) == "LU float64"


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_transpose_in_place_is_the_transpose(size: int, tile: int) -> None:
    for a in (hard_matrices.gaussian(size), hard_matrices.gaussian(size).mT):
        expected, place = a.mT.clone(), a.data_ptr()
        found = _gram.transpose(a, tile)
        assert torch.equal(found, expected) and found.data_ptr() == place


def test_the_triangle_is_factorized_in_its_place(monkeypatch) -> None:
    a, _ = pair(300, 50, torch.float32)
    places = []
    triangle = _gram.triangle
    monkeypatch.setattr(_gram, "triangle", lambda a: places.append(triangle(a)) or places[0])
    square = _gram.Gram(a, torch.float64, by_triangle=True)
    assert square.factor.data_ptr() == places[0].data_ptr()


@pytest.mark.parametrize("shape", [(400, 400), (500, 300), (300, 500)])
@pytest.mark.parametrize("what", ["twins", "dead", "dead in both", "rank 9"])
def test_singular_matrices_in_panels_are_as_singular_as_others(shape, what, monkeypatch) -> None:
    matrix = hard_matrices.gaussian(*shape).float()
    match what:
        case "twins":
            matrix[:, 1] = matrix[:, 0]
            matrix[7] = matrix[3]
        case "dead":
            matrix[:, 5] = 0
        case "dead in both":
            matrix[:, 5:40], matrix[100:130] = 0, 0
        case _:
            matrix = (matrix[:, :9].double() @ matrix[:9].double()).float()
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    with limits(
        {Method.SVD: 32, Method.PIVOTS_THEN_BISECTION: 32, Method.BISECTION: 64}
        | {Method.KRYLOV_FLOAT32: 64}
    ):
        found = spectra.vitals(matrix)
    assert found.sigma_max == pytest.approx(values[0], rel=1e-8)
    assert found.effective_rank == int((values > 0.01 * values[0]).sum())
    is_singular = bool(values[-1] < max(shape) * _gram.EPS * values[0])
    assert (found.condition_number == np.inf) == is_singular


def test_all_values_of_a_matrix_in_panels_are_those_of_its_copy(monkeypatch) -> None:
    matrix = hard_matrices.gaussian(300, 280).bfloat16()
    expected = spectra.spectrum(matrix).values
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    for method in (Method.GRAM, Method.TORCH_GRAM):
        lines = dict.fromkeys((Method.STACKED_SVD, Method.SVD, method), 8)
        with limits(lines):
            torch.testing.assert_close(spectra.spectrum(matrix).values, expected)


def test_what_could_not_be_resolved_is_freed_before_the_next_method(monkeypatch) -> None:
    """Without the garbage collector: a cycle would keep the factors until that comes round."""
    alive: weakref.WeakSet[_gram.Gram] = weakref.WeakSet()
    made = _krylov.Gram

    def watched(*arguments, **more):
        square = made(*arguments, **more)
        alive.add(square)
        return square

    def all_values(a):
        assert not alive
        return torch.ones(a.shape[1]).double()

    class Kept(made):
        __hash__ = object.__hash__

    made = Kept
    monkeypatch.setattr(_krylov, "Gram", watched)
    monkeypatch.setattr(spectra, "_svd_values", all_values)
    monkeypatch.setattr(spectra, "_values", all_values)
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    values = np.logspace(0, -12, 300)  # too small to verify, too large for zero
    gc.collect()
    gc.disable()
    try:
        with limits(
            {Method.SVD: 32, Method.PIVOTS_THEN_BISECTION: 32, Method.BISECTION: 64}
            | {Method.KRYLOV_FLOAT32: 64}
        ):
            found = spectra.vitals(hard_matrices.with_values(values, 300, 300))
    finally:
        gc.enable()
    assert found.method == "all values"


def test_where_a_copy_does_not_fit_panels_are_tried(monkeypatch) -> None:
    matrix = hard_matrices.gaussian(300).float()
    expected = spectra.vitals(matrix)

    def full(stack):
        raise MemoryError

    monkeypatch.setattr(spectra, "scaled_to_one", full)
    found = spectra.vitals(matrix)
    assert found.condition_number == pytest.approx(expected.condition_number, rel=1e-8)
    monkeypatch.setattr(spectra, "MAX_COPY_BYTES", 0)
    monkeypatch.setattr(_gram, "gram", full)
    with pytest.raises(MemoryError):
        spectra.vitals(matrix)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "memory.json"


def test_no_matrix_took_more_memory_than_is_said_beforehand() -> None:
    rows = json.loads(RESULTS.read_text())["matrices"]
    assert {row["shape"][1] for row in rows} >= {4096, 6144, 8192, 10240, 16384}
    for row in rows:
        dtype = getattr(torch, row["dtype"])
        stored = dtype.itemsize * row["shape"][0] * row["shape"][1]
        said = stored + spectra.bytes_needed(tuple(row["shape"]))
        for kind in ("data", "resident"):
            assert row["peak_bytes"][kind] - row["libraries_bytes"][kind] <= said, row
