"""A matrix in panels does what its float64 copy would."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from kappascope import panels, spectra
from kappascope.panels import Panels


def pair(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Panels, torch.Tensor]:
    stored = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return Panels(stored, 3), stored.double() / 8


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9))
def test_products_are_those_of_the_copy(rows: int, columns: int, panel: int) -> None:
    a, dense = pair(rows, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "ROWS", panel)
        x, y = torch.ones(columns, 2).double(), torch.ones(rows, 3).double()
        torch.testing.assert_close(panels.times(a, x), dense @ x)
        torch.testing.assert_close(panels.transposed_times(a, y), dense.mT @ y)
        torch.testing.assert_close(panels.times(a.mT, y), dense.mT @ y)
        torch.testing.assert_close(panels.gram(a), (dense.mT @ dense).tril())
        torch.testing.assert_close(panels.gram(a), panels.gram(dense))
        torch.testing.assert_close(panels.dense(a, torch.float32), dense.float())
        r = panels.triangle(a)
        torch.testing.assert_close(r.mT @ r, dense.mT @ dense)


@pytest.mark.parametrize("shape", [(1000, 950), (950, 1000), (2500, 930), (930, 930), (64, 40)])
@pytest.mark.parametrize("complete", [True, False])
def test_vitals_do_not_depend_on_whether_there_is_a_copy(shape, complete, monkeypatch) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = spectra.vitals(matrix, complete=complete)
    monkeypatch.setattr(spectra, "COPIED", 0)
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
    matrix = zoo.with_values(values, 700, 300)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    monkeypatch.setattr(spectra, "COPIED", 0)
    found = spectra.vitals(matrix)
    assert found.sigma_max == pytest.approx(expected[0])
    assert found.effective_rank == int((expected > 0.01 * expected[0]).sum())
    assert found.sigma_min == pytest.approx(expected[-1], rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_stored_matrix_is_left_alone(dtype) -> None:
    a, _ = pair(6, 5, dtype)
    before = a.stored.clone()
    panels.gram(a)
    assert torch.equal(a.stored, before)


@pytest.mark.parametrize("power", [-1020, -200, 200, 1000])
def test_a_panel_is_scaled_before_it_is_narrowed(power) -> None:
    stored = torch.tensor([[1.0, 0.5], [0.25, 1.0]], dtype=torch.float64) * 2.0**power
    (panel,) = Panels(stored, power).split(2, torch.float32)
    assert panel.tolist() == [[1.0, 0.5], [0.25, 1.0]]
    assert stored[0, 0] == 2.0**power
